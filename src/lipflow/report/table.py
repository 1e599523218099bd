"""The summary: clean, certified and attacked accuracy of every run, with the paper's numbers beside them.

It is worked out once, as values; the terminal, Markdown and the page differ in how they print it. A number that was not
measured is a dash: an attack at 0.5 says nothing exact about 0.4, and no row is filled in from another.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from lipflow.report.evidence import Evidence
from lipflow.report.published import EPSILONS, published
from lipflow.train.recipe import radius
from lipflow.train.run import Run, differences

DASH = "–"


@dataclass(frozen=True)
class Line:
    """One line of a run: what it is, a note on it, and its values as they are printed, clean first, then at each ε."""

    kind: str  # "certified", "attacked" or "published"
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


@dataclass(frozen=True)
class Summary:
    """All runs at the same ε."""

    epsilons: tuple[str, ...]
    entries: tuple[Entry, ...]

    @property
    def header(self) -> tuple[str, ...]:
        return ("clean", *(f"ε = {eps}" for eps in self.epsilons))


def summarise(runs: Sequence[Evidence], radii: Sequence[str] = ()) -> Summary:
    """The summary at the ε given, or at all that the runs, their attacks and the paper's rows speak of."""
    epsilons = tuple(merge(radii or [eps for run in runs for eps in _spoken_of(run)]))
    return Summary(epsilons, tuple(_entry(run, epsilons) for run in runs))


def merge(radii: Sequence[str]) -> list[str]:
    """Radii in increasing order; of several ways to write one, the first."""
    by_value: dict[Fraction, str] = {}
    for text in radii:
        by_value.setdefault(radius(text), text)
    return [by_value[value] for value in sorted(by_value) if value > 0]


def accuracy(flags: np.ndarray) -> float:
    """The fraction that is true; 0 of nothing."""
    return float(flags.mean()) if len(flags) else 0.0


def percent(fraction: float) -> str:
    return f"{fraction:.2%}"


def _spoken_of(run: Evidence) -> list[str]:
    attacked = [] if run.outcome is None else list(run.outcome.standing)
    paper = EPSILONS if _paper(run) else ()
    return [*run.record.run.recipe.radii, *attacked, *paper]


def _paper(run: Evidence):
    return published(run.record.run.model, run.record.run.data)


def _entry(run: Evidence, epsilons: Sequence[str]) -> Entry:
    told, lines = run.record.run, []
    if run.certificate is not None:
        held = run.certificate
        values = [accuracy(held.right), *(accuracy(held.certified(radius(eps))) for eps in epsilons)]
        average = f"{accuracy(np.minimum(held.radius, 1e9) * held.right):.4f}"
        images = f"{len(held.right)} {held.split} images".replace("  ", " ")
        title = "certified, validation images" if held.split == "validation" else "certified"
        lines.append(Line("certified", title, images, tuple(map(percent, values)), average))
    if run.outcome is not None:
        by_value = {radius(eps): standing for eps, standing in run.outcome.standing.items()}
        found = [by_value.get(radius(eps)) for eps in epsilons]
        values = [percent(accuracy(run.outcome.clean)), *(DASH if f is None else percent(accuracy(f)) for f in found)]
        restarts = "" if run.outcome.restarts == 1 else f", {run.outcome.restarts} starts"
        note = f"L2-PGD, {run.outcome.steps} steps{restarts}, {len(run.outcome)} images"
        part = run.certificate is not None and len(run.outcome) < len(run.certificate.right)
        title = f"under attack, first {len(run.outcome)}" if part else "under attack"
        lines.append(Line("attacked", title, note, tuple(values)))
    if paper := _paper(run):
        values = [f"{paper.clean:.1f}%", *(_published(paper.at(_spelled(eps))) for eps in epsilons)]
        lines.append(Line("published", f"the paper's {paper.title}", f"certified; {paper.source}", tuple(values)))
    return Entry(run.name, f"{told.model} on {told.data}, seed {told.seed}", tuple(_remarks(run)), tuple(lines))


def _remarks(run: Evidence) -> list[str]:
    """What a reader has to know: what is missing, and in which flags this is not the published run."""
    remarks = run.missing
    try:
        changed = differences(Run.of(run.record.run.model, run.record.run.data), run.record.run)
    except ValueError:  # a model without a recipe
        changed = []
    changed = [text for text in changed if not text.startswith("--seed ")]
    if changed and _paper(run):
        remarks.append(f"not the published run: {'; '.join(map(_difference, changed))}")
    return remarks


def _difference(text: str) -> str:
    """ "--epochs 20 (the run has 200)" → "--epochs 20 (published: 200)", and sizes as they are typed."""
    told = re.sub(r" \(the run has (.*)\)$", lambda m: "" if m[1] in ("{}", "None") else f" (published: {m[1]})", text)
    return re.sub(r"\{(.*)\}", lambda m: m[1].replace("'", "").replace(": ", "=").replace(",", ""), told)


def _spelled(eps: str) -> str:
    """As the paper writes it."""
    return next((text for text in EPSILONS if radius(text) == radius(eps)), eps)


def _published(value: float | None) -> str:
    return DASH if value is None else f"{value:.1f}%"


def markdown(summary: Summary, warnings: Sequence[str] = ()) -> str:
    """The summary as a table of GitHub's Markdown, with what contradicts it on top."""
    lines = [f"> **Contradiction**: {escape(text)}\n>" for text in warnings] + ([""] if warnings else [])
    lines.append("| run | | " + " | ".join(map(escape, summary.header)) + " | average radius |")
    lines.append("|---|---|" + "---:|" * (len(summary.header) + 1))
    for entry in summary.entries:
        if not entry.lines:
            lines.append(f"| **{escape(entry.name)}** | |{' |' * (len(summary.header) + 1)}")
        for number, line in enumerate(entry.lines):
            name = f"**{escape(entry.name)}**" if number == 0 else ""
            cells = " | ".join((*line.values, line.average))
            lines.append(f"| {name} | {escape(line.title)} | {cells} |")
    lines.append("")
    for entry in summary.entries:
        notes = [f"{line.title}: {line.note}" for line in entry.lines]
        lines.append(f"- **{escape(entry.name)}**: {escape('; '.join((entry.about, *notes, *entry.remarks)))}")
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Text of a stranger's run as Markdown that says just that: no markup, no HTML, no new line or cell."""
    flat = " ".join(text.split())
    safe = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#!~])", r"\\\1", safe)
