"""How many steps fit into a time budget."""

import time
from collections.abc import Callable

from lipflow.train.learner import Learner

DISCARD = 3  # the first steps pay for memory and compilation
MEASURE = 0.03  # the part of the budget that measuring may take,
FEWEST, MOST = 5, 200  # and the number of steps it takes
RESERVE = 0.05  # the part of the budget kept for checkpoints, and for a machine that slows down


def steps_within(seconds: float, spent: float, learner: Learner, validate: Callable[[], object]) -> int:
    """The number of steps that a schedule may have to end in `seconds`, of which `spent` are gone already.

    The rate is measured on steps at learning rate 0; afterwards the learner is as it was, bit for bit, so that the
    number of steps is all that a run keeps of its budget. All ranks measure, and the first one's answer holds.
    """
    began, per_epoch = time.monotonic(), learner.steps_per_epoch
    before = {name: tensor.clone() for name, tensor in learner.tensors().items()}
    _time_steps(learner, DISCARD)
    once = _time_steps(learner, 1)
    count = learner.ranks.agree(round(min(max(MEASURE * seconds / once, FEWEST), MOST)))
    step = _time_steps(learner, count) / count
    validation_began = time.monotonic()
    validate()
    validation = time.monotonic() - validation_began
    learner.load(before)
    left = (seconds - spent - (time.monotonic() - began)) * (1 - RESERVE) - validation
    steps = learner.ranks.agree(int(left / (step + validation / per_epoch)))
    if steps < 1:
        raise ValueError(
            f"--budget {seconds:g}s is too short: starting took {spent + time.monotonic() - began:.1f} s, a step takes "
            f"{step:.2g} s and validation {validation:.2g} s"
        )
    return steps


def _time_steps(learner: Learner, count: int) -> float:
    began = time.monotonic()
    for _, epoch, batch in learner.visits(0, count):
        learner.gradients(batch, epoch)
        learner.update(0.0)
    return time.monotonic() - began
