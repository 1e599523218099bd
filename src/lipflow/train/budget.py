"""A time budget: the number of steps that fit into what is left of it, asked again and again as a run goes on."""

import math
import time
from dataclasses import replace
from itertools import islice

from lipflow.data import Split
from lipflow.train.estimate import estimate
from lipflow.train.learner import Learner
from lipflow.train.plan import Plan
from lipflow.train.scribe import Standing

AGAIN = 0.02  # decide anew when this part of the budget has passed
MEASURE, MOST = 0.01, 10  # the part of the budget that the first decision may take, and the number of steps it takes
SLIGHTLY = 1e-3  # of the learning rate: weights that do not change at all would be evaluated too fast
ROOM = 0.002  # the part of the budget kept for the last checkpoint


class Budget:
    """How many steps a run of `seconds` should have, by the steps and validations that it has done."""

    def __init__(self, seconds: float, learner: Learner, validation: Split) -> None:
        self.seconds, self.learner, self.per_epoch = seconds, learner, learner.steps_per_epoch
        self.validation, self.batches = validation, -(-len(validation) // learner.run.recipe.batch_size)
        self.decided, self.then = -math.inf, Standing()  # a run that is resumed decides at once
        self.check: float | None = None  # what a validation is thought to take, before there was one

    def first(self, start: float) -> int:
        """T by a few steps and two batches of validation, for a run that began at `start`.

        Afterwards the learner is as it was, bit for bit. The very first step pays for memory and compilation, and is
        not counted. All ranks measure, and the first one's answer holds.
        """
        learner = self.learner
        before = {name: tensor.clone() for name, tensor in learner.tensors().items()}
        _time_steps(learner, 1)
        step = _time_steps(learner, 1)
        if more := learner.ranks.agree(min(int(MEASURE * self.seconds / step), MOST)):
            step = _time_steps(learner, more) / more
        self.check = self._time_check()
        learner.load(before)
        elapsed = time.monotonic() - start
        steps = learner.ranks.agree(self._fit(0, step, elapsed, self.check))
        if steps < 1:
            raise ValueError(
                f"--budget {self.seconds:g}s is too short: starting took {elapsed:.1f} s, a step takes {step:.2g} s, "
                f"and a validation {self.check:.2g} s (of fewer images by --validation)"
            )
        self.decided = time.monotonic()
        return steps

    def again(self, standing: Standing, plan: Plan) -> int:
        """T anew if that is due, else 0. There is always one step more: the schedule has to reach its end.

        A step takes what it did on average, or of late if that is more. Steps that a resumed run does once more follow
        the decisions that were taken then.
        """
        now = time.monotonic()
        if standing.step <= plan.decided or now - self.decided < AGAIN * self.seconds:
            return 0
        late = (standing.seconds - self.then.seconds) / (standing.step - self.then.step)
        step = max(standing.seconds / standing.step, late)
        self.decided, self.then = now, replace(standing)
        check = self.check if standing.checking is None else standing.checking
        return max(self._fit(standing.step, step, standing.elapsed, check), standing.step + 1)

    def _fit(self, done: int, step: float, elapsed: float, validation: float | None) -> int:
        """T, with `done` steps behind us, of `step` seconds each; a validation never timed is taken for dear.

        There is a validation after each epoch and one at the end, which are one if T ends an epoch.
        """
        check = self.batches * step if validation is None else validation
        left = (1 - ROOM) * self.seconds - elapsed - check
        ahead = self.per_epoch - done % self.per_epoch
        if left < ahead * step + check:  # the next validation is the last
            return done + min(ahead, int(left / step))
        epochs, rest = divmod(left - ahead * step - check, self.per_epoch * step + check)
        return done + ahead + int(epochs) * self.per_epoch + min(self.per_epoch, int(rest / step))

    def _time_check(self) -> float:
        """The time of a validation: its first batch also pays for what follows from the weights, which have changed."""
        recipe, took = self.learner.run.recipe, [0.0, 0.0]
        part = Split(self.validation.images[: recipe.batch_size], self.validation.labels[: recipe.batch_size])
        for i in range(2 if self.batches else 0):
            began = time.monotonic()
            estimate(self.learner.network, part, recipe.radii, recipe.batch_size, self.learner.ranks)
            took[i] = time.monotonic() - began
        return took[0] + (self.batches - 1) * took[1]


def _time_steps(learner: Learner, count: int) -> float:
    began = time.monotonic()
    for _, epoch, batch in islice(learner.visits(0), count):
        learner.gradients(batch, epoch)
        learner.update(learner.run.recipe.lr * SLIGHTLY)
    return time.monotonic() - began
