"""The summary: clean, certified and attacked accuracy of every run, and below them the paper's numbers.

The terminal, Markdown and the page print the same values. A number that was not measured is a dash. If only some images
were attacked, there is a line of the certified accuracy of the same images, so that certified ≤ attacked ≤ clean.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from lipflow.certificate import CertificateFile
from lipflow.radius import parse_radius
from lipflow.report.published import Reference, reference, references
from lipflow.report.run_results import RunResults
from lipflow.train.recipe import typed
from lipflow.train.run import Difference, Run, differences

DASH = "–"
PUBLISHED = "the paper's own networks"


@dataclass(frozen=True)
class Line:
    """A line of the summary. Its values are text: the clean accuracy, then the accuracy at each ε."""

    kind: str  # "certified", "part" (certified, of the attacked images only), "attacked" or "published"
    title: str
    note: str
    values: tuple[str, ...]
    average: str = ""  # the average radius


@dataclass(frozen=True)
class Entry:
    """A run in the summary."""

    name: str
    about: str
    remarks: tuple[str, ...]
    lines: tuple[Line, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of all lines, and the remarks."""
        return (*(f"{line.title}: {line.note}" for line in self.lines if line.note), *self.remarks)


@dataclass(frozen=True)
class Summary:
    """All runs at the same ε, and the paper's networks with the same names."""

    epsilons: tuple[str, ...]
    entries: tuple[Entry, ...]
    published: tuple[Line, ...] = ()

    @property
    def paper(self) -> tuple[Entry, ...]:
        """The networks of the paper as one entry, if there are any."""
        return (Entry(PUBLISHED, "as printed, not our runs", (), self.published),) if self.published else ()

    @property
    def header(self) -> tuple[str, ...]:
        return ("clean", *(f"ε = {eps}" for eps in self.epsilons))


def summarise(runs: Sequence[RunResults], radii: Sequence[str] = ()) -> Summary:
    """Return the summary at the given ε, or at those of all recipes, attacks and networks of the paper."""
    epsilons = tuple(merge(radii or [eps for run in runs for eps in _epsilons(run)]))
    paper = tuple(_reference(found, epsilons) for found in references([run.record.run for run in runs]))
    return Summary(epsilons, tuple(_entry(run, epsilons) for run in runs), paper)


def merge(radii: Sequence[str]) -> list[str]:
    """Sort the radii above 0. Of equal ones, such as 0.5 and 1/2, keep the first."""
    by_value: dict[Fraction, str] = {}
    for text in radii:
        by_value.setdefault(parse_radius(text), text)
    return [by_value[value] for value in sorted(by_value) if value > 0]


def accuracy(flags: np.ndarray) -> float:
    """Return the fraction of flags that are true; 0 if there are none."""
    return float(flags.mean()) if len(flags) else 0.0


def percent(fraction: float) -> str:
    """Format a fraction with two decimals, as chart.js does: 0% only for 0 and 100% only for 1."""
    hundredths = math.floor(1e4 * fraction + 0.5)
    hundredths = max(1, hundredths) if fraction > 0 else hundredths
    return f"{(min(9999, hundredths) if fraction < 1 else hundredths) / 100:.2f}%"


def images_of(certificate: CertificateFile) -> str:
    """Describe the certified images: how many, of which split, and by which network if it is not the final one."""
    best = ", best by validation" if certificate.network == "best" else ""
    return f"{len(certificate.right)} {certificate.split} images{best}".replace("  ", " ")


def _epsilons(run: RunResults) -> list[str]:
    attacked = [] if run.outcome is None else list(run.outcome.robust)
    paper = reference(run.record.run)
    return [*run.record.run.recipe.radii, *attacked, *([eps for eps, _ in paper.at] if paper else [])]


def _entry(run: RunResults, epsilons: Sequence[str]) -> Entry:
    config, lines = run.record.run, []
    of = f", first {run.part} images" if run.part else ""
    if run.certificate is not None:
        certificate = run.certificate
        title = "certified" if certificate.split in ("test", "") else f"certified, {certificate.split} images"
        title += ", best by validation" if certificate.network == "best" else ""
        lines.append(_certified(certificate, epsilons, "certified", title, images_of(certificate)))
        if of:
            lines.append(_certified(certificate.first(run.part), epsilons, "part", f"certified{of}", ""))
    if run.outcome is not None:
        by_value = {parse_radius(eps): percent(accuracy(robust)) for eps, robust in run.outcome.robust.items()}
        values = (percent(accuracy(run.outcome.clean)), *(by_value.get(parse_radius(eps), DASH) for eps in epsilons))
        restarts = "" if run.outcome.restarts == 1 else f", {run.outcome.restarts} starts"
        note = f"L2-PGD, {run.outcome.steps} steps{restarts}, {len(run.outcome)} images"
        lines.append(Line("attacked", f"under attack{of}", note, values))
    return Entry(run.name, f"{config.model} on {config.data}, seed {config.seed}", tuple(_remarks(run)), tuple(lines))


def _certified(certificate: CertificateFile, epsilons: Sequence[str], kind: str, title: str, note: str) -> Line:
    values = [accuracy(certificate.right), *(accuracy(certificate.certified(parse_radius(eps))) for eps in epsilons)]
    average = f"{accuracy(np.minimum(certificate.radius, 1e9) * certificate.right):.4f}"
    return Line(kind, title, note, tuple(map(percent, values)), average)


def _reference(found: Reference, epsilons: Sequence[str]) -> Line:
    by_value = {parse_radius(eps): f"{value:g}%" for eps, value in found.at}  # as printed
    values = (f"{found.clean:g}%", *(by_value.get(parse_radius(eps), DASH) for eps in epsilons))
    return Line("published", found.title, found.source, values)


def _remarks(run: RunResults) -> list[str]:
    """Return what is missing, and which flags differ from those of the published run."""
    remarks = run.missing
    try:
        # The paper trains on all images.
        published = replace(Run.of(run.record.run.model, run.record.run.data), validation_images=0)
    except ValueError:  # a model without a recipe
        return remarks
    changed = differences(published, run.record.run)
    changed = [change for change in changed if change.flag not in ("seed", "threads", "radii")]
    if changed and reference(run.record.run) is not None:
        remarks.append(f"not the published run: {'; '.join(map(_difference, changed))}")
    return remarks


def _difference(change: Difference) -> str:
    """Format a difference as in "--epochs 20 (published: 200)"."""
    published = "" if change.stored in ({}, None) else f" (published: {typed(change.stored)})"
    return f"--{change.flag} {typed(change.asked)}{published}"


def markdown(summary: Summary, contradictions: Sequence[str] = ()) -> str:
    """Format the summary as a table of GitHub's Markdown, below the contradictions if there are any."""
    lines = [f"> **Contradiction**: {escape(text)}\n>" for text in contradictions]
    lines += [""] if contradictions else []
    lines.append("| run | | " + " | ".join(map(escape, summary.header)) + " | average radius |")
    lines.append("|---|---|" + "---:|" * (len(summary.header) + 1))
    for entry in (*summary.entries, *summary.paper):
        if not entry.lines:
            lines.append(f"| **{escape(entry.name)}** | |{' |' * (len(summary.header) + 1)}")
        for number, line in enumerate(entry.lines):
            name = f"**{escape(entry.name)}**" if number == 0 else ""
            lines.append(f"| {name} | {escape(line.title)} | {' | '.join((*line.values, line.average))} |")
    lines.append("")
    for entry in (*summary.entries, *summary.paper):
        about = "; ".join((entry.about, *entry.notes))
        lines.append(f"- **{escape(entry.name)}**: {escape(about)}")
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Escape text from a run for Markdown, so that it adds no markup, no HTML, no line and no cell."""
    flat = " ".join(text.split())
    safe = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#!~])", r"\\\1", safe)
