"""Plans that bend, and budgets that are kept on machines whose speed changes: with a clock of our own."""

import itertools
from types import SimpleNamespace

import pytest

from lipflow.train import budget as budget_module
from lipflow.train.budget import Budget
from lipflow.train.plan import Plan
from lipflow.train.recipe import Recipe
from lipflow.train.schedule import SCHEDULES
from lipflow.train.scribe import Standing


def test_one_decision_is_the_middle_of_each_share():
    plan = Plan.of(7)
    assert [plan.progress(step) for step in range(7)] == [(step + 0.5) / 7 for step in range(7)]
    assert (plan.steps, plan.decided) == (7, 0)


@pytest.mark.parametrize(
    "decisions", [[(0, 10), (4, 20)], [(0, 10), (4, 5)], [(0, 9), (1, 100), (2, 3)], [(0, 50), (49, 80), (50, 51)]]
)
def test_progress_is_continuous_rises_and_ends_at_one(decisions):
    plan = Plan.of(decisions)
    steps = [plan.progress(step) for step in range(plan.steps)]
    assert all(a < b for a, b in itertools.pairwise(steps))
    assert steps[0] > 0
    assert steps[-1] < 1
    (start, end), before = decisions[-1], Plan.of(decisions[:-1])
    jump = before.progress(start) - before.progress(start - 1)  # a whole step by the plan before,
    last = steps[-1] - steps[-2] if end > start + 1 else 2 * (1 - steps[-1])  # and by the one after
    assert steps[start] - steps[start - 1] == pytest.approx((jump + last) / 2)  # meet half-way
    assert steps[-1] + last / 2 == pytest.approx(1)


def test_a_plan_is_as_it_was_before_it_bends():
    plan = Plan.of(100).bend(30, 80)
    assert [plan.progress(step) for step in range(30)] == [Plan.of(100).progress(step) for step in range(30)]
    assert plan.progress(30) == pytest.approx(0.3 + 0.7 * 0.5 / 50)
    assert Plan.of([list(pair) for pair in plan.decisions]) == plan


@pytest.mark.parametrize(
    "decisions", [0, -1, True, [], [(0, 0)], [(1, 5)], [(0, 5), (0, 6)], [(0, 5), (5, 9)], [(0, 5), (3, 3)], [(0, 5.0)]]
)
def test_no_plan(decisions):
    with pytest.raises(ValueError, match="plan"):
        Plan.of(decisions)


class Clock:
    """A monotonic clock that only work moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def follow(monkeypatch, seconds, guess, step_takes, validation_takes, per_epoch=100):
    """A run by the budget's decisions: how long it took, how many steps, and what was decided."""
    clock = Clock()
    monkeypatch.setattr(budget_module, "time", clock)
    learner = SimpleNamespace(steps_per_epoch=per_epoch, run=SimpleNamespace(recipe=Recipe(batch_size=100)))
    budget, plan, standing = Budget(seconds, learner, 1000), Plan.of(guess), Standing()  # pyright: ignore[reportArgumentType]
    while standing.step < plan.steps:
        standing.elapsed = clock.now - 100
        if steps := budget.again(standing, plan):
            plan = plan.bend(standing.step, steps)
        took = step_takes(standing.elapsed / seconds)
        clock.now += took
        standing.seconds += took
        standing.step += 1
        if standing.step % per_epoch == 0 or standing.step == plan.steps:
            clock.now += validation_takes
            standing.checking = validation_takes
    return (clock.now - 100) / seconds, plan


SPEEDS = {
    "steady": lambda part: 0.1,
    "slows down": lambda part: 0.1 + 0.1 * part,
    "speeds up": lambda part: 0.2 - 0.1 * part,
    "one slow spell": lambda part: 0.5 if 0.4 < part < 0.6 else 0.1,
    "slow at the end": lambda part: 0.1 if part < 0.9 else 0.2,
}


@pytest.mark.parametrize("guess", [1000, 3000, 20000])
@pytest.mark.parametrize("speed", SPEEDS)
def test_a_budget_is_kept_and_used_whatever_was_guessed_and_whatever_the_machine_does(monkeypatch, speed, guess):
    took, plan = follow(monkeypatch, 600.0, guess, SPEEDS[speed], validation_takes=2.0)
    assert 0.97 < took <= 1.005
    assert len(plan.decisions) <= 51
    assert plan.progress(plan.steps - 1) < 1


def test_a_dear_validation_is_reckoned_with(monkeypatch):
    took, _ = follow(monkeypatch, 600.0, 3000, SPEEDS["steady"], validation_takes=60.0)
    assert 0.9 < took <= 1.0


def test_a_budget_that_is_spent_ends_with_the_next_step(monkeypatch):
    took, plan = follow(monkeypatch, 10.0, 1000, lambda part: 30.0, validation_takes=0.0)
    assert plan.decisions == ((0, 1000), (1, 2))
    assert took == 6.0
    schedule = SCHEDULES["linear"]
    assert 0 < schedule(plan.progress(1), Recipe()) < 1
