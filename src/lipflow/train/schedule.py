"""Learning-rate schedules, and the plan that gives the progress of each step of a run. Does not import torch.

Note [the schedule reaches its end]
    Step t of T (t = 0, …, T-1) is taken at progress (t + ½)/T, the middle of its share of the run. So the first and the
    last step have a rate above 0 even if the schedule starts and ends at 0. The midpoint rule is exact on straight
    lines, so the mean of the rates is the integral of the schedule.

Note [replanning]
    A run with a time budget does not know T in advance, as the speed of a machine varies. It decides on T repeatedly.
    After each decision, progress continues from its current value on a straight line to 1 at the new T. So progress
    is continuous and increasing, and the schedule still reaches its end.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


class Schedule(ABC):
    """A learning rate over a run, as a factor on `lr`."""

    @abstractmethod
    def factor(self, progress: float, epochs: int) -> float:
        """The factor at `progress`, from 0 at the start to 1 at the end of a run that is planned for `epochs`."""


@dataclass(frozen=True)
class Triangular(Schedule):
    """Straight lines through (0, 0), (2/5, 1), (4/5, 1/20) and (1, 0): the schedule of the paper."""

    def factor(self, progress: float, epochs: int) -> float:
        return _between(((0.0, 0.0), (2 / 5, 1.0), (4 / 5, 1 / 20), (1.0, 0.0)), progress)


@dataclass(frozen=True)
class Linear(Schedule):
    """Straight lines through (0, 0), (1/5, 1) and (1, 0)."""

    def factor(self, progress: float, epochs: int) -> float:
        return _between(((0.0, 0.0), (1 / 5, 1.0), (1.0, 0.0)), progress)


def _between(corners: Sequence[tuple[float, float]], progress: float) -> float:
    right = min(max(bisect_right(corners, (progress, 2.0)), 1), len(corners) - 1)
    (x0, y0), (x1, y1) = corners[right - 1], corners[right]
    return y0 + (y1 - y0) * (progress - x0) / (x1 - x0)


@dataclass(frozen=True)
class MultiStep(Schedule):
    """× `decay` at each of the `milestones`, which are fractions of the run."""

    milestones: tuple[float, ...] = (0.5, 0.75)
    decay: float = 0.1

    def __post_init__(self) -> None:
        _require_decay(self.decay)
        if not all(0 < milestone < 1 for milestone in self.milestones):
            raise ValueError(f"--milestones are fractions of the run, between 0 and 1, not {self.milestones}")

    def factor(self, progress: float, epochs: int) -> float:
        return self.decay ** sum(progress >= milestone for milestone in self.milestones)


@dataclass(frozen=True)
class Exponential(Schedule):
    """× `decay` after each planned epoch; with a time budget the same rates are spread over the steps that fit."""

    decay: float = 0.1

    def __post_init__(self) -> None:
        _require_decay(self.decay)

    def factor(self, progress: float, epochs: int) -> float:
        return self.decay ** int(progress * epochs)


def _require_decay(decay: float) -> None:
    if not decay >= 0:
        raise ValueError(f"--decay must be at least 0, not {decay}")


@dataclass(frozen=True)
class Constant(Schedule):
    """The same rate throughout."""

    def factor(self, progress: float, epochs: int) -> float:
        return 1.0


SCHEDULES: Mapping[str, type[Schedule]] = {
    "triangular": Triangular,
    "linear": Linear,
    "multistep": MultiStep,
    "exponential": Exponential,
    "constant": Constant,
}


@dataclass(frozen=True)
class Plan:
    """Decisions (s, T) in order: from step s on, the schedule ends after T steps. The first one is (0, T)."""

    decisions: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        rising = all(a < b < end for (a, end), (b, _) in pairwise(self.decisions))
        if not (rising and self.decisions and self.decisions[0][0] == 0 and all(s < end for s, end in self.decisions)):
            raise ValueError(f"a plan has decisions (s, T) with s < T and increasing s from 0 on, not {self.decisions}")

    @classmethod
    def of(cls, decisions: int | Sequence[Sequence[int]]) -> "Plan":
        """The plan of a number of steps, or of decisions as JSON has them."""
        pairs = [(0, decisions)] if isinstance(decisions, int) else [(start, end) for start, end in decisions]
        if not all(type(number) is int for pair in pairs for number in pair):
            raise ValueError(f"the decisions of a plan are integers, not {decisions!r}")
        return cls(tuple(pairs))

    @property
    def steps(self) -> int:
        """T of the last decision."""
        return self.decisions[-1][1]

    @property
    def decided(self) -> int:
        """The step of the last decision."""
        return self.decisions[-1][0]

    def replan(self, step: int, steps: int) -> "Plan":
        """This plan with one more decision, at `step`, for T = `steps`."""
        return Plan((*self.decisions, (step, steps)))

    def progress(self, step: int) -> float:
        """The progress of step t, from 0 at the start to 1 at the end: the middle of its share."""
        reached = 0.0
        for (start, end), (until, _) in pairwise((*self.decisions, (self.steps, 0))):
            place = min(step + 0.5, until)
            reached += (1 - reached) * ((place - start) / (end - start))
            if step < until:
                break
        return reached
