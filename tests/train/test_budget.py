"""Plans that bend, and budgets that are kept on machines whose speed changes: with a clock of our own."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lipflow.data import load
from lipflow.train import budget as budget_module
from lipflow.train import loop as loop_module
from lipflow.train import train
from lipflow.train.budget import Budget
from lipflow.train.distributed import Ranks
from lipflow.train.learner import Learner, make_network
from lipflow.train.plan import Plan
from lipflow.train.recipe import Recipe
from lipflow.train.schedule import SCHEDULES
from lipflow.train.scribe import Standing
from tests.processes import torchrun
from tests.train.clock import Clock, Ticking
from tests.train.tiny import digest, log, tiny


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


def follow(monkeypatch, seconds, guess, step_takes, validation_takes, per_epoch=100):
    """A run by the budget's decisions: how long it took, how many steps, and what was decided."""
    clock = Clock()
    monkeypatch.setattr(budget_module, "time", clock)
    learner = SimpleNamespace(steps_per_epoch=per_epoch, run=SimpleNamespace(recipe=Recipe(batch_size=100)))
    budget, plan, standing = Budget(seconds, learner, range(1000)), Plan.of(guess), Standing()  # pyright: ignore[reportArgumentType]
    budget.decided = clock.now  # as after its first decision
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


@pytest.mark.parametrize("validation", [20.0, 40.0, 60.0, 90.0])
def test_a_dear_validation_is_reckoned_with(monkeypatch, validation):
    """Wherever the last epoch ends: one validation more, or none, in the last few steps."""
    for seconds in range(1500, 3600, 37):
        took, _ = follow(monkeypatch, float(seconds), 1000, lambda part: 3.75, validation, per_epoch=176)
        assert 0.93 < took <= 1.0, seconds


def test_a_budget_that_is_spent_ends_with_the_next_step(monkeypatch):
    took, plan = follow(monkeypatch, 10.0, 1000, lambda part: 30.0, validation_takes=0.0)
    assert plan.decisions == ((0, 1000), (1, 2))
    assert took == 6.0
    schedule = SCHEDULES["linear"]
    assert 0 < schedule(plan.progress(1), Recipe()) < 1


def test_a_resumed_run_decides_at_once_whatever_its_machine_lost(monkeypatch):
    """Ten lives of a hundredth of the budget each, with a start of as long: the budget is kept all the same."""
    clock = Clock()
    monkeypatch.setattr(budget_module, "time", clock)
    learner = SimpleNamespace(steps_per_epoch=10**6, run=SimpleNamespace(recipe=Recipe(batch_size=100)))
    plan, standing = Plan.of(1000), Standing()
    for _ in range(10):
        budget = Budget(1000.0, learner, range(0))  # pyright: ignore[reportArgumentType]
        standing.elapsed += 10
        for _ in range(10):
            if steps := budget.again(standing, plan):
                plan = plan.bend(standing.step, steps)
            clock.now += 1
            standing.seconds, standing.elapsed, standing.step = (
                standing.seconds + 1, standing.elapsed + 1, standing.step + 1
            )  # fmt: skip
    assert standing.elapsed == 200
    assert 100 + 790 <= plan.steps <= 100 + 810


# Whole runs, by a clock that moves whenever it is asked


@pytest.fixture
def ticking(monkeypatch):
    clock = Ticking(0.005)
    for module in (budget_module, loop_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_budget_ends_the_schedule_in_time(tmp_path, ticking):
    run = replace(tiny(tmp_path, images=1197, batch_size=100), budget="3s", exact=0)
    began = ticking.now
    train(run)
    assert 0.95 < (ticking.now - began) / 3 <= 1.01
    rates = [line["lr"] for line in log(tmp_path, "step")]
    told = json.loads((tmp_path / "run.json").read_text())
    assert len(rates) == told["steps"] > 60
    assert 20 < len(told["plan"]) <= 51
    assert rates[-1] < 0.05 * run.recipe.lr  # the schedule came to its end
    assert max(rates) > 0.9 * run.recipe.lr


def test_a_run_that_crashed_keeps_its_decisions(tmp_path, monkeypatch, ticking):
    """What a crash loses is done again by the decisions of then, to the same bits; only later ones are new."""
    run = replace(tiny(tmp_path, images=1197, batch_size=100), budget="3s", checkpoint_every="1h", exact=0)
    gradients, steps = Learner.gradients, itertools.count()

    def crash(self, batch, epoch):
        if next(steps) == 40:
            raise ZeroDivisionError
        return gradients(self, batch, epoch)

    monkeypatch.setattr(Learner, "gradients", crash)
    with pytest.raises(ZeroDivisionError):
        train(run)
    before, lines = json.loads((tmp_path / "run.json").read_text()), log(tmp_path, "step")
    count = before["plan"][-1][0]
    assert len(before["plan"]) > 3
    assert before["steps"] == before["plan"][-1][1]
    assert count > 5
    ticking.now += 0.7  # after a pause that shifts every later decision
    train(run, resume=True)
    after, again = json.loads((tmp_path / "run.json").read_text()), log(tmp_path, "step")
    assert after["plan"][: len(before["plan"])] == before["plan"]
    assert len(after["plan"]) > len(before["plan"])
    assert [line["step"] for line in again] == list(range(1, after["steps"] + 1))
    assert [(line["loss"], line["lr"]) for line in again[:count]] == [(x["loss"], x["lr"]) for x in lines[:count]]


def test_measuring_leaves_the_learner_as_it_was(tmp_path, monkeypatch, ticking):
    """A run of T steps is the same, whether T came from a budget or from the epochs."""
    first = Budget.first
    monkeypatch.setattr(Budget, "first", lambda self, start: first(self, start) * 0 + 6)
    monkeypatch.setattr(Budget, "again", lambda self, standing, plan: 0)
    train(replace(tiny(tmp_path / "a"), budget="20s"))
    train(tiny(tmp_path / "b"))
    assert digest(tmp_path / "a" / "model.safetensors") == digest(tmp_path / "b" / "model.safetensors")


@pytest.mark.parametrize("check", [0.0, 0.5, 2.0])
def test_the_first_decision_leaves_room_for_validation(tmp_path, monkeypatch, check):
    """Of 5 batches, the first dearer than the others; a step takes a tenth of a second."""
    clock, calls = Clock(), itertools.count()

    def validate(*_):
        clock.now += 3 * check if next(calls) == 0 else check

    def step(*_):
        clock.now += 0.1

    monkeypatch.setattr(budget_module, "time", clock)
    monkeypatch.setattr(budget_module, "estimate", validate)
    monkeypatch.setattr(Learner, "gradients", step)
    run = tiny(tmp_path, images=1000, batch_size=100)
    data = load("digits", validation=500)
    learner = Learner(make_network(run, data), run, data.train, Ranks(0, 1, torch.device("cpu")))
    monkeypatch.setattr(learner, "update", lambda rate: None)
    budget, validation = Budget(100.0, learner, data.validation), 7 * check
    steps = budget.first(clock.now)
    left = 100 * (1 - budget_module.ROOM) - (2 + 10) * 0.1 - 4 * check

    def takes(steps: int) -> float:
        return steps * 0.1 + -(-steps // 10) * validation  # one a started epoch

    assert budget.check == pytest.approx(validation)
    assert takes(steps) <= left + 1e-9
    assert takes(steps + 1) > left - 1e-9


def test_a_budget_too_short_is_refused(tmp_path, ticking):
    with pytest.raises(ValueError, match=r"--budget 0\.001s is too short"):
        train(replace(tiny(tmp_path / "r"), budget="0.001s"))
    assert not (tmp_path / "r").exists()


def test_two_processes_follow_one_clock(tmp_path):
    """The second has a clock that is three times as fast."""
    torchrun("tests/train/worker.py", str(tmp_path), "on_budget")
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    assert told["environment"]["processes"] == 2
    assert [line["step"] for line in log(tmp_path / "run", "step")] == list(range(1, told["steps"] + 1))
    assert len(told["plan"]) > 1
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second  # they took the same steps, at the same rates
