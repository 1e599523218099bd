"""Durations as text, and budgets that are kept on machines whose speed changes."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lipflow.data import load
from lipflow.train import budget as budget_module
from lipflow.train import evaluate as evaluate_module
from lipflow.train import loop as loop_module
from lipflow.train import train
from lipflow.train.budget import Budget, format_duration, parse_duration
from lipflow.train.distributed import Ranks
from lipflow.train.learner import Learner, make_network
from lipflow.train.recipe import Recipe
from lipflow.train.schedule import Linear, Plan
from lipflow.train.writer import State
from tests.processes import torchrun
from tests.train.clock import Clock, Ticking
from tests.train.tiny import digest, log, tiny

# Durations


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1h30m", 5400), ("1d", 86400), ("0.5s", 0.5)]
)
def test_durations_are_parsed(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "30", "1.2.3s", "30m2h", "-5s", "nans", "1H 30M"])
def test_other_text_is_no_duration(text):
    with pytest.raises(ValueError, match="a duration is written as"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (59.7, "1m00s"), (185, "3m05s"), (7620, "2h07m"), (97500, "1d03h")]
)
def test_durations_are_formatted(seconds, text):
    assert format_duration(seconds) == text


# Decisions, with a clock of the test


def follow(monkeypatch, seconds, guess, step_takes, validation_takes, per_epoch=100):
    """A run by the budget's decisions: how long it took, how many steps, and what was decided."""
    clock = Clock()
    monkeypatch.setattr(budget_module, "time", clock)
    learner = SimpleNamespace(steps_per_epoch=per_epoch, run=SimpleNamespace(recipe=Recipe(batch_size=100)))
    budget, plan, state = Budget(seconds, learner, range(1000)), Plan.of(guess), State()  # pyright: ignore[reportArgumentType]
    budget.decided = clock.now  # as after its first decision
    while state.step < plan.steps:
        state.elapsed = clock.now - 100
        if steps := budget.replan(state, plan):
            plan = plan.replan(state.step, steps)
        took = step_takes(state.elapsed / seconds)
        clock.now += took
        state.seconds += took
        state.step += 1
        if state.step % per_epoch == 0 or state.step == plan.steps:
            clock.now += validation_takes
            state.validation_seconds = validation_takes
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
def test_a_budget_is_kept_and_used_at_any_first_guess_and_speed(monkeypatch, speed, guess):
    took, plan = follow(monkeypatch, 600.0, guess, SPEEDS[speed], validation_takes=2.0)
    assert 0.97 < took <= 1.005
    assert len(plan.decisions) <= 51
    assert plan.progress(plan.steps - 1) < 1


@pytest.mark.parametrize("validation", [20.0, 40.0, 60.0, 90.0])
def test_a_slow_validation_is_in_the_budget(monkeypatch, validation):
    """For any end of the last epoch: there is one more validation, or none, in the last few steps."""
    for seconds in range(1500, 3600, 37):
        took, _ = follow(monkeypatch, float(seconds), 1000, lambda part: 3.75, validation, per_epoch=176)
        assert 0.93 < took <= 1.0, seconds


def test_a_budget_that_is_spent_ends_with_the_next_step(monkeypatch):
    took, plan = follow(monkeypatch, 10.0, 1000, lambda part: 30.0, validation_takes=0.0)
    assert plan.decisions == ((0, 1000), (1, 2))
    assert took == 6.0
    assert 0 < Linear().factor(plan.progress(1), 200) < 1


def test_a_resumed_run_decides_at_once(monkeypatch):
    """Ten processes of a hundredth of the budget each, with a startup of as long, keep the budget."""
    clock = Clock()
    monkeypatch.setattr(budget_module, "time", clock)
    learner = SimpleNamespace(steps_per_epoch=10**6, run=SimpleNamespace(recipe=Recipe(batch_size=100)))
    plan, state = Plan.of(1000), State()
    for _ in range(10):
        budget = Budget(1000.0, learner, range(0))  # pyright: ignore[reportArgumentType]
        state.elapsed += 10
        for _ in range(10):
            if steps := budget.replan(state, plan):
                plan = plan.replan(state.step, steps)
            clock.now += 1
            state.seconds, state.elapsed, state.step = (
                state.seconds + 1, state.elapsed + 1, state.step + 1
            )  # fmt: skip
    assert state.elapsed == 200
    assert 100 + 790 <= plan.steps <= 100 + 810


# Whole runs, with a clock that moves at every call


@pytest.fixture
def ticking(monkeypatch):
    clock = Ticking(0.005)
    for module in (budget_module, loop_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_budget_ends_the_schedule_in_time(tmp_path, ticking):
    run = replace(tiny(tmp_path, images=1197, batch_size=100), budget="3s", certify_validation=0)
    began = ticking.now
    train(run)
    assert 0.95 < (ticking.now - began) / 3 <= 1.01
    rates = [line["lr"] for line in log(tmp_path, "step")]
    told = json.loads((tmp_path / "run.json").read_text())
    assert len(rates) == told["steps"] > 60
    assert 20 < len(told["plan"]) <= 51
    assert rates[-1] < 0.05 * run.recipe.optimiser.lr  # the schedule came to its end
    assert max(rates) > 0.9 * run.recipe.optimiser.lr


def test_a_run_that_crashed_keeps_its_decisions(tmp_path, monkeypatch, ticking):
    """Steps lost in a crash are repeated with the stored decisions, to the same bits; only later decisions are new."""
    run = replace(tiny(tmp_path, images=1197, batch_size=100), budget="3s", save_every="1h", certify_validation=0)
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
    first = Budget.measure
    monkeypatch.setattr(Budget, "measure", lambda self, start: first(self, start) * 0 + 6)
    monkeypatch.setattr(Budget, "replan", lambda self, state, plan: 0)
    train(replace(tiny(tmp_path / "a"), budget="20s"))
    train(tiny(tmp_path / "b"))
    assert digest(tmp_path / "a" / "model.safetensors") == digest(tmp_path / "b" / "model.safetensors")


@pytest.mark.parametrize("check", [0.0, 0.5, 2.0])
def test_the_first_decision_leaves_time_for_validation(tmp_path, monkeypatch, check):
    """Of 5 batches, the first slower than the others; a step takes a tenth of a second."""
    clock, calls = Clock(), itertools.count()

    def validate(*_):
        clock.now += 3 * check if next(calls) == 0 else check

    def step(*_):
        clock.now += 0.1

    monkeypatch.setattr(budget_module, "time", clock)
    monkeypatch.setattr(evaluate_module, "estimate", validate)
    monkeypatch.setattr(Learner, "gradients", step)
    run = tiny(tmp_path, images=1000, batch_size=100)
    data = load("digits", validation=500)
    learner = Learner(make_network(run, data), run, data.train, Ranks(0, 1, torch.device("cpu")))
    monkeypatch.setattr(learner, "update", lambda rate: None)
    budget, validation = Budget(100.0, learner, data.validation), 7 * check
    steps = budget.measure(clock.now)
    left = 100 * (1 - budget_module.RESERVE_FRACTION) - (2 + 10) * 0.1 - 4 * check

    def takes(steps: int) -> float:
        return steps * 0.1 + -(-steps // 10) * validation  # one a started epoch

    assert budget.validation_seconds == pytest.approx(validation)
    assert takes(steps) <= left + 1e-9
    assert takes(steps + 1) > left - 1e-9


def test_a_budget_too_short_is_refused(tmp_path, ticking):
    with pytest.raises(ValueError, match=r"--budget 0\.001s is too short"):
        train(replace(tiny(tmp_path / "r"), budget="0.001s"))
    assert not (tmp_path / "r").exists()


def test_two_processes_use_the_clock_of_the_first(tmp_path):
    """The second has a clock that is three times as fast."""
    torchrun("tests/train/two_processes.py", str(tmp_path), "on_budget")
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    assert told["environment"]["processes"] == 2
    assert [line["step"] for line in log(tmp_path / "run", "step")] == list(range(1, told["steps"] + 1))
    assert len(told["plan"]) > 1
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second  # they took the same steps, at the same rates
