"""How far along its schedule a run is at each step, also where the number of steps follows a clock. Without torch.

Note [the schedule reaches its end]
    Step t of T (t = 0, …, T-1) is taken at progress (t + ½)/T, the middle of its share of the run. The first and the
    last step then have a rate above 0 even where the schedule starts and ends at 0, no step is wasted at rate 0, and as
    the midpoint rule is exact on straight lines, the rates sum to what the schedule's integral says.

Note [a plan bends]
    A run with a budget cannot know T: machines slow down and speed up. It decides on T again and again. Where it does,
    progress goes on from where it stands, in a straight line to 1 at the new T: it is continuous and increasing, so
    rates do not jump, and the schedule still reaches its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Plan:
    """Decisions (s, T), in order: from step s on, the schedule is to end after T steps. The first is (0, T)."""

    decisions: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.decisions]
        ends = [end for _, end in self.decisions]
        if not (starts and starts[0] == 0 and all(a < b for a, b in zip(starts, ends, strict=True))):
            raise ValueError(f"a plan is of decisions (s, T) with s < T, the first at 0, not {self.decisions}")
        if not all(here < there < end for (here, there), end in zip(pairwise(starts), ends[:-1], strict=True)):
            raise ValueError(f"the decisions of a plan come one after the other, not {self.decisions}")

    @classmethod
    def of(cls, decisions: int | Sequence[Sequence[int]]) -> "Plan":
        """So many steps, or decisions from JSON."""
        pairs = [(0, decisions)] if isinstance(decisions, int) else [(start, end) for start, end in decisions]
        if not all(type(number) is int for pair in pairs for number in pair):
            raise ValueError(f"a plan is of whole numbers, not {decisions!r}")
        return cls(tuple(pairs))

    @property
    def steps(self) -> int:
        """T, as it was decided last."""
        return self.decisions[-1][1]

    @property
    def decided(self) -> int:
        """The step of the last decision."""
        return self.decisions[-1][0]

    def bend(self, step: int, steps: int) -> "Plan":
        """The plan that decides at `step`, after its last decision, for T = `steps`."""
        return Plan((*self.decisions, (step, steps)))

    def progress(self, step: int) -> float:
        """Where step t is taken, from 0 at the start to 1 at the end: the middle of its share."""
        reached = 0.0
        for (start, end), (until, _) in pairwise((*self.decisions, (self.steps, 0))):
            place = min(step + 0.5, until)
            reached += (1 - reached) * ((place - start) / (end - start))
            if step < until:
                break
        return reached
