"""Time budgets: durations as text, and the number of steps that fits into a budget. Does not import torch.

The number of steps is first decided from a measurement, and then again, at regular intervals, from the speed so far.
"""

import math
import re
import time
from itertools import islice, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lipflow.data import Split
    from lipflow.train.learner import Learner
    from lipflow.train.schedule import Plan
    from lipflow.train.writer import State

REPLAN_FRACTION = 0.02  # of the budget, between two decisions
MEASURE_FRACTION = 0.01  # of the budget, for the first measurement of steps
MAX_MEASURED_STEPS = 10
MEASURE_RATE_FACTOR = 1e-3  # of the learning rate; not 0, as a validation is faster with unchanged weights
RESERVE_FRACTION = 0.002  # of the budget, for the last checkpoint

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_FORM = re.compile("".join(rf"(?:(\d*\.?\d+){unit})?" for unit in _UNITS))


def parse_duration(text: str) -> float:
    """Seconds: "90s" → 90, "1h30m" → 5400, "0.5s" → 0.5."""
    match = _FORM.fullmatch(text.strip().lower())
    if match is None or not any(match.groups()):
        raise ValueError(f"a duration is written as 90s, 30m, 2h or 1h30m, not {text!r}")
    return sum(float(n) * seconds for n, seconds in zip(match.groups(), _UNITS.values(), strict=True) if n)


def format_duration(seconds: float) -> str:
    """ "42s", "3m05s", "2h07m", "1d03h": the two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    (big, size), (small, part) = next(pair for pair in pairwise(_UNITS.items()) if whole >= pair[0][1])
    return f"{whole // size}{big}{whole % size // part:02d}{small}"


class Budget:
    """The number of steps of a run of `seconds`, from the time that its steps and validations have taken."""

    def __init__(self, seconds: float, learner: "Learner", validation: "Split") -> None:
        self.seconds, self.learner, self.per_epoch = seconds, learner, learner.steps_per_epoch
        self.validation, self.batches = validation, -(-len(validation) // learner.run.recipe.batch_size)
        self.decided = -math.inf  # when T was decided last; a resumed run decides at its first step
        self.last = (0.0, 0)  # seconds and steps at the last decision of this process
        self.validation_seconds: float | None = None  # measured before the first validation

    def measure(self, start: float) -> int:
        """T, the number of steps, from a few steps and two batches of validation, for a run that began at `start`.

        The state of the learner is restored bit for bit. The first step includes allocation and compilation and is not
        counted. All ranks measure, and all use the result of the first one.
        """
        learner = self.learner
        before = {name: tensor.clone() for name, tensor in learner.tensors().items()}
        _time_steps(learner, 1)
        step = _time_steps(learner, 1)
        if more := learner.ranks.agree(min(int(MEASURE_FRACTION * self.seconds / step), MAX_MEASURED_STEPS)):
            step = _time_steps(learner, more) / more
        self.validation_seconds = self._time_validation()
        learner.load(before)
        elapsed = time.monotonic() - start
        steps = learner.ranks.agree(self._fit(0, step, elapsed, self.validation_seconds))
        if steps < 1:
            raise ValueError(
                f"--budget {self.seconds:g}s is too short: startup took {elapsed:.1f} s, a step takes {step:.2g} s, "
                f"and a validation {self.validation_seconds:.2g} s (--validation-images N: use fewer images)"
            )
        self.decided = time.monotonic()
        return steps

    def replan(self, state: "State", plan: "Plan") -> int:
        """A new T if a decision is due, else 0. T is at least `state.step + 1`, so that the schedule reaches its end.

        The time of a step is its mean over the run, or since the last decision if that is longer. A resumed run does
        not decide again before the step of the plan's last decision.
        """
        now = time.monotonic()
        if state.step <= plan.decided or now - self.decided < REPLAN_FRACTION * self.seconds:
            return 0
        seconds, steps = self.last
        step = max(state.seconds / state.step, (state.seconds - seconds) / (state.step - steps))
        self.decided, self.last = now, (state.seconds, state.step)
        validation = self.validation_seconds if state.validation_seconds is None else state.validation_seconds
        return max(self._fit(state.step, step, state.elapsed, validation), state.step + 1)

    def _fit(self, done: int, step: float, elapsed: float, validation: float | None) -> int:
        """T, after `done` steps, if a step takes `step` seconds; an unknown time of validation is overestimated.

        A validation follows each epoch and the last step; these coincide if T is a multiple of the epoch.
        """
        validation = self.batches * step if validation is None else validation
        left = (1 - RESERVE_FRACTION) * self.seconds - elapsed - validation
        ahead = self.per_epoch - done % self.per_epoch
        if left < ahead * step + validation:  # the next validation is the last
            return done + min(ahead, int(left / step))
        epochs, rest = divmod(left - ahead * step - validation, self.per_epoch * step + validation)
        return done + ahead + int(epochs) * self.per_epoch + min(self.per_epoch, int(rest / step))

    def _time_validation(self) -> float:
        """The seconds of a validation. Its first batch also computes what is derived from the weights."""
        from lipflow.data import Split
        from lipflow.train.evaluate import estimate

        if not self.batches:
            return 0.0
        radii, size = self.learner.run.recipe.radii, self.learner.run.recipe.batch_size
        part, times = Split(self.validation.images[:size], self.validation.labels[:size]), [time.monotonic()]
        for _ in range(2):
            estimate(self.learner.network, part, radii, size, self.learner.ranks)
            times.append(time.monotonic())
        return times[1] - times[0] + (self.batches - 1) * (times[2] - times[1])


def _time_steps(learner: "Learner", count: int) -> float:
    began = time.monotonic()
    for _, epoch, batch in islice(learner.visits(0), count):
        learner.gradients(batch, epoch)
        learner.update(learner.run.recipe.optimiser.lr * MEASURE_RATE_FACTOR)
    return time.monotonic() - began
