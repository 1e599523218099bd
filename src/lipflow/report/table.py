"""The summary: clean, certified and attacked accuracy of every run, and the paper's numbers, apart from them.

It is worked out once, as values; the terminal, Markdown and the page differ in how they print it. A number that was not
measured is a dash: an attack at 0.5 says nothing exact about 0.4, and no row is filled in from another. An attack on
some images stands beside what is certified of the same images, so that certified ≤ attacked ≤ clean can be seen.
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
from lipflow.train.run import Difference, Run, differences

DASH = "–"
PUBLISHED = "the paper's own networks"


@dataclass(frozen=True)
class Line:
    """One line: what it is, a note on it, and its values as they are printed, clean first, then at each ε."""

    kind: str  # "certified", "part" (of the attacked images alone), "attacked" or "published"
    title: str
    note: str
    values: tuple[str, ...]
    average: str = ""  # radius


@dataclass(frozen=True)
class Entry:
    """A run in the summary."""

    name: str
    about: str
    remarks: tuple[str, ...]
    lines: tuple[Line, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(f"{line.title}: {line.note}" for line in self.lines if line.note)


@dataclass(frozen=True)
class Summary:
    """All runs at the same ε, and the networks of the paper that they are named after, each once."""

    epsilons: tuple[str, ...]
    entries: tuple[Entry, ...]
    published: tuple[Line, ...] = ()

    @property
    def paper(self) -> tuple[Entry, ...]:
        """The networks of the paper as one more entry, if there are any."""
        return (Entry(PUBLISHED, "as printed, no runs of ours", (), self.published),) if self.published else ()

    @property
    def header(self) -> tuple[str, ...]:
        return ("clean", *(f"ε = {eps}" for eps in self.epsilons))


def summarise(runs: Sequence[RunResults], radii: Sequence[str] = ()) -> Summary:
    """The summary at the ε given, or at all that the runs, their attacks and the paper's rows speak of."""
    epsilons = tuple(merge(radii or [eps for run in runs for eps in _spoken_of(run)]))
    paper = [_reference(found, epsilons) for found in references([run.record.run for run in runs])]
    return Summary(epsilons, tuple(_entry(run, epsilons) for run in runs), tuple(paper))


def merge(radii: Sequence[str]) -> list[str]:
    """Radii in increasing order; of several ways to write one, the first."""
    by_value: dict[Fraction, str] = {}
    for text in radii:
        by_value.setdefault(parse_radius(text), text)
    return [by_value[value] for value in sorted(by_value) if value > 0]


def accuracy(flags: np.ndarray) -> float:
    """The fraction that is true; 0 of nothing."""
    return float(flags.mean()) if len(flags) else 0.0


def percent(fraction: float) -> str:
    """In hundredths, as chart.js has it; all only if it is all, and none only if it is none."""
    hundredths = math.floor(1e4 * fraction + 0.5)
    hundredths = max(1, hundredths) if fraction > 0 else hundredths
    return f"{(min(9999, hundredths) if fraction < 1 else hundredths) / 100:.2f}%"


def images_of(held: CertificateFile) -> str:
    """How many images are certified, of which split, and by which network if it is not the final one."""
    best = ", best by validation" if held.network == "best" else ""
    return f"{len(held.right)} {held.split} images{best}".replace("  ", " ")


def _spoken_of(run: RunResults) -> list[str]:
    attacked = [] if run.outcome is None else list(run.outcome.robust)
    paper = reference(run.record.run)
    return [*run.record.run.recipe.radii, *attacked, *([eps for eps, _ in paper.at] if paper else [])]


def _entry(run: RunResults, epsilons: Sequence[str]) -> Entry:
    told, lines = run.record.run, []
    of = f", first {run.part} images" if run.part else ""
    if run.certificate is not None:
        held = run.certificate
        title = "certified" if held.split in ("test", "") else f"certified, {held.split} images"
        title += ", best by validation" if held.network == "best" else ""
        lines.append(_certified(held, epsilons, "certified", title, images_of(held)))
        if of:
            lines.append(_certified(held.first(run.part), epsilons, "part", f"certified{of}", ""))
    if run.outcome is not None:
        by_value = {parse_radius(eps): standing for eps, standing in run.outcome.robust.items()}
        found = [by_value.get(parse_radius(eps)) for eps in epsilons]
        values = [percent(accuracy(run.outcome.clean)), *(DASH if f is None else percent(accuracy(f)) for f in found)]
        restarts = "" if run.outcome.restarts == 1 else f", {run.outcome.restarts} starts"
        note = f"L2-PGD, {run.outcome.steps} steps{restarts}, {len(run.outcome)} images"
        lines.append(Line("attacked", f"under attack{of}", note, tuple(values)))
    return Entry(run.name, f"{told.model} on {told.data}, seed {told.seed}", tuple(_remarks(run)), tuple(lines))


def _certified(held: CertificateFile, epsilons: Sequence[str], kind: str, title: str, note: str) -> Line:
    values = [accuracy(held.right), *(accuracy(held.certified(parse_radius(eps))) for eps in epsilons)]
    average = f"{accuracy(np.minimum(held.radius, 1e9) * held.right):.4f}"
    return Line(kind, title, note, tuple(map(percent, values)), average)


def _reference(found: Reference, epsilons: Sequence[str]) -> Line:
    by_value = {parse_radius(eps): f"{value:g}%" for eps, value in found.at}  # as printed there, to 0.1 or 0.01
    values = (f"{found.clean:g}%", *(by_value.get(parse_radius(eps), DASH) for eps in epsilons))
    return Line("published", found.title, found.source, values)


def _remarks(run: RunResults) -> list[str]:
    """What a reader has to know: what is missing, and in which flags this is not the published run."""
    remarks = run.missing
    try:
        published = replace(
            Run.of(run.record.run.model, run.record.run.data), validation_images=0
        )  # nothing is held out
        changed = differences(published, run.record.run)
    except ValueError:  # a model without a recipe
        changed = []
    changed = [change for change in changed if change.flag not in ("seed", "threads", "radii")]
    if changed and reference(run.record.run) is not None:
        remarks.append(f"not the published run: {'; '.join(map(_difference, changed))}")
    return remarks


def _difference(change: Difference) -> str:
    """ "--epochs 20 (published: 200)"."""
    return f"--{change.flag} {_typed(change.asked)}" + (
        "" if change.stored in ({}, None) else f" (published: {_typed(change.stored)})"
    )


def _typed(value: object) -> str:
    """A flag's value as it is typed."""
    if isinstance(value, dict):
        return " ".join(f"{name}={argument}" for name, argument in value.items())
    return "by default" if value is None else " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def markdown(summary: Summary, warnings: Sequence[str] = ()) -> str:
    """The summary as a table of GitHub's Markdown, with what contradicts it on top."""
    lines = [f"> **Contradiction**: {escape(text)}\n>" for text in warnings] + ([""] if warnings else [])
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
        told = "; ".join((entry.about, *entry.notes, *entry.remarks))
        lines.append(f"- **{escape(entry.name)}**: {escape(told)}")
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Text of a stranger's run as Markdown that says just that: no markup, no HTML, no new line or cell."""
    flat = " ".join(text.split())
    safe = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#!~])", r"\\\1", safe)
