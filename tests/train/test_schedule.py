"""Schedules as functions of progress, and plans that change during a run."""

import itertools

import pytest

from lipflow.train.schedule import Constant, Exponential, Linear, MultiStep, Plan, Triangular


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        (Triangular(), [(0, 0), (0.2, 0.5), (0.4, 1), (0.6, 0.525), (0.8, 0.05), (0.9, 0.025), (1, 0)]),
        (Linear(), [(0, 0), (0.1, 0.5), (0.2, 1), (0.6, 0.5), (1, 0)]),
        (MultiStep((0.5, 0.75), 0.1), [(0, 1), (0.49, 1), (0.5, 0.1), (0.74, 0.1), (0.75, 0.01), (1, 0.01)]),
        (Exponential(0.5), [(0, 1), (0.3, 1), (0.4, 0.5), (0.7, 0.25)]),  # of three epochs
        (Constant(), [(0, 1), (1, 1)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_factors_of_the_schedules(schedule, points):
    for progress, factor in points:
        assert schedule.factor(progress, epochs=3) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 7, 1000])
def test_no_step_has_rate_zero_and_the_mean_rate_is_the_integral(steps):
    factors = [Triangular().factor(Plan.of(steps).progress(step), 200) for step in range(steps)]
    assert min(factors) > 0
    assert max(factors) <= 1
    if steps == 1000:  # the corners are between steps if 5 divides their number
        assert sum(factors) / steps == pytest.approx(0.4 * 0.5 + 0.4 * 0.525 + 0.2 * 0.025, rel=1e-12)


def test_progress_of_one_decision_is_the_middle_of_each_share():
    plan = Plan.of(7)
    assert [plan.progress(step) for step in range(7)] == [(step + 0.5) / 7 for step in range(7)]
    assert (plan.steps, plan.decided) == (7, 0)


@pytest.mark.parametrize(
    "decisions", [[(0, 10), (4, 20)], [(0, 10), (4, 5)], [(0, 9), (1, 100), (2, 3)], [(0, 50), (49, 80), (50, 51)]]
)
def test_progress_is_continuous_increases_and_ends_at_one(decisions):
    plan, before = Plan.of(decisions), Plan.of(decisions[:-1])
    steps = [plan.progress(step) for step in range(plan.steps)]
    assert all(a < b for a, b in itertools.pairwise(steps))
    assert steps[0] > 0
    assert steps[-1] < 1
    start, end = decisions[-1]
    assert steps[:start] == [before.progress(step) for step in range(start)]
    old_step = before.progress(start) - before.progress(start - 1)
    new_step = steps[-1] - steps[-2] if end > start + 1 else 2 * (1 - steps[-1])
    # From the middle of the last step before the decision to the middle of the first one after it.
    assert steps[start] - steps[start - 1] == pytest.approx((old_step + new_step) / 2)
    assert steps[-1] + new_step / 2 == pytest.approx(1)
    assert Plan.of([list(pair) for pair in before.replan(start, end).decisions]) == plan


@pytest.mark.parametrize(
    "decisions", [0, -1, True, [], [(0, 0)], [(1, 5)], [(0, 5), (0, 6)], [(0, 5), (5, 9)], [(0, 5), (3, 3)], [(0, 5.0)]]
)
def test_bad_plans_are_refused(decisions):
    with pytest.raises(ValueError, match="plan"):
        Plan.of(decisions)
