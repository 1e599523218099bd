"""Experiments: rows of runs, the measures of each run, and claims with the rules that judge them.

A claim is **seen**, **not seen**, or **cannot be judged** at a scale. A rule compares accuracies with their standard
errors: √(p(1 - p)/n + s²/k) for n images and k seeds with standard deviation s. For one seed, s is unknown; then the
error is that of the images alone, and the evidence says so. A difference cannot be judged if it is within its noise,
which is two standard errors, or more for few seeds (Student's 95% quantile with Welch's degrees of freedom).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from scipy.special import stdtrit  # the quantile of Student's distribution

from experiments.scale import Scale
from lipflow.train.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_SCALE = ("paper",)  # the scales of a claim about which smaller networks give no evidence
SEEN, NOT_SEEN, NOT_JUDGED = "seen", "not seen", "cannot be judged"
Outcome = Literal["seen", "not seen", "cannot be judged"]
Measured = Mapping[str, Any]  # of one run, as JSON values


class Verdict(NamedTuple):
    """The outcome of a rule, and the numbers on which it rests."""

    outcome: Outcome
    evidence: str


class Missing(KeyError):
    """A number that a rule needs and that was not measured."""


class Quantity(NamedTuple):
    """A mean over seeds, and the two parts of its variance: from the sample of images and from the seeds."""

    value: float
    of_images: float
    of_seeds: float
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float], of_images: float = 0.0) -> "Quantity":
        spread = stdev(values) ** 2 / len(values) if len(values) > 1 else 0.0
        return cls(mean(values), of_images, spread, len(values))

    def __str__(self) -> str:
        return f"{100 * self.value:.1f}%"


@dataclass(frozen=True)
class Rows:
    """What was measured: for each label of a row, a table of numbers per seed."""

    measured: Mapping[str, Sequence[Measured]]

    def values(self, label: str, *path: str) -> list[Any]:
        """The entry at a path of keys, for each seed of a row."""
        found = []
        for value in self.measured.get(label, ()):
            for key in path:
                if not isinstance(value, Mapping) or key not in value:
                    raise Missing(f"{label}: {' '.join(path)}")
                value = value[key]
            found.append(value)
        if not found:
            raise Missing(label)
        return found

    def accuracy(self, label: str, *path: str) -> Quantity:
        """A fraction of images, such as ("certified", "36/255"), with its variance for the number of images."""
        values = [float(v) for v in self.values(label, *path)]
        counted = {"attacked": "attacked_images", "validation": "validation_images"}
        images = min(self.values(label, counted.get(path[0], "images")))
        p = mean(values)
        return Quantity.of(values, p * (1 - p) / images)

    def drop(self, label: str, first: tuple[str, ...], last: tuple[str, ...]) -> Quantity:
        """The accuracy at one path minus that at another, for each seed."""
        values = [self.values(label, *path) for path in (first, last)]
        of_images = sum(self.accuracy(label, *path).of_images for path in (first, last))
        return Quantity.of([float(a) - float(b) for a, b in zip(*values, strict=True)], of_images)


Rule = Callable[[Rows], Verdict]


def noise_of(*quantities: Quantity) -> float:
    """The noise of a sum or difference of independent quantities."""
    total = sum(q.of_images + q.of_seeds for q in quantities)
    welch = sum(q.of_seeds**2 / (q.seeds - 1) for q in quantities if q.of_seeds)
    freedom = total**2 / welch if welch else math.inf
    return math.sqrt(total) * max(2.0, float(stdtrit(freedom, 0.975)))


def judge(difference: float, noise: float, evidence: str) -> Verdict:
    """Seen if a difference is above its noise, not seen if it is below minus its noise."""
    return Verdict(SEEN if difference > noise else NOT_SEEN if difference < -noise else NOT_JUDGED, evidence)


def above(rows: Rows, first: tuple[str, ...], second: tuple[str, ...], by: float = 0.0) -> Verdict:
    """Whether one accuracy is above another by more than `by`; each is given as (label, key, …)."""
    a, b = rows.accuracy(*first), rows.accuracy(*second)
    noise, where = noise_of(a, b), " ".join(first[1:])
    return judge(a.value - b.value - by, noise, f"{where}: {first[0]} {a}, {second[0]} {b} ({_noise(noise, a, b)})")


def shrinks(rows: Rows, better: str, worse: str, first: tuple[str, ...], last: tuple[str, ...]) -> Verdict:
    """Whether one row is above another, and by more at the first path than at the last one."""
    a, b, c, d = (rows.accuracy(label, *path) for path in (first, last) for label in (better, worse))
    gain, later = a.value - b.value, c.value - d.value
    # The runs at both paths are the same, so the noise is that of their differences.
    noise = noise_of(rows.drop(better, first, last), rows.drop(worse, first, last))
    text = (
        f"{better} over {worse}: {100 * gain:.1f} points {' '.join(first)}, {100 * later:.1f} {' '.join(last)} "
        f"({_noise(noise, a, b, c, d)})"
    )
    if gain <= noise_of(a, b):
        return Verdict(NOT_JUDGED, f"{text}: the gain is within its noise")
    return judge(gain - later, noise, text)


def _noise(noise: float, *quantities: Quantity) -> str:
    alone = ", of images alone" if min(q.seeds for q in quantities) == 1 else ""
    return f"noise ±{100 * noise:.1f}{alone}"


def every(*verdicts: Verdict) -> Verdict:
    """The conjunction: not seen if one is not seen, and otherwise seen only if all are seen."""
    outcomes = {v.outcome for v in verdicts}
    outcome = NOT_SEEN if NOT_SEEN in outcomes else NOT_JUDGED if NOT_JUDGED in outcomes else SEEN
    return Verdict(outcome, "; ".join(v.evidence for v in verdicts))


def holds(condition: bool, evidence: str) -> Verdict:
    """Seen or not seen, for a condition without noise."""
    return Verdict(SEEN if condition else NOT_SEEN, evidence)


@dataclass(frozen=True)
class Claim:
    """A sentence, the rule that judges it, and the scales at which it can be judged."""

    text: str
    rule: Rule
    scales: tuple[str, ...] = ("small", "paper")
    otherwise: str = "the smaller networks and shorter schedules of this scale give no evidence"  # at other scales
    ours: bool = False  # a claim of lipflow, which the paper does not make

    def judge(self, scale: str, rows: Rows) -> Verdict:
        if scale == "smoke":
            return Verdict(NOT_JUDGED, "a smoke run, on synthetic images, only shows that the code runs")
        if scale not in self.scales:
            return Verdict(NOT_JUDGED, self.otherwise)
        try:
            return self.rule(rows)
        except Missing as error:
            return Verdict(NOT_JUDGED, f"not measured: {error.args[0]}")


class Column(NamedTuple):
    """A column of a table: the path of its numbers, whether they are fractions, and the scales that show it."""

    title: str
    path: tuple[str, ...]
    percent: bool = True
    scales: tuple[str, ...] = ("smoke", "small", "paper")


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of the paper."""

    name: str
    title: str
    source: str  # where in the paper
    claims: tuple[Claim, ...]
    columns: tuple[Column, ...]
    draw: Callable[["Figure", Mapping[str, Any]], None]  # draws a result, given as JSON values, on an empty figure
    runs: Callable[[Scale], Mapping[str, Sequence[Run]]] = lambda scale: {}
    measures: tuple[str, ...] = ()  # names in experiments.measure.MEASURES, in order
    fixed: Callable[[], Mapping[str, Sequence[Measured]]] = dict  # rows that need no run
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # row → column → as printed there
    data: str = "cifar10"

    def judge(self, scale: str, rows: Rows) -> list[dict[str, Any]]:
        """Every claim with its verdict, as JSON values."""
        verdicts = [(claim, claim.judge(scale, rows)) for claim in self.claims]
        return [
            {"text": c.text, "whose": "ours" if c.ours else "the paper's", "verdict": v.outcome, "evidence": v.evidence}
            for c, v in verdicts
        ]
