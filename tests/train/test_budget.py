"""Durations as text, and budgets on machines whose speed changes."""

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
from tests.train.clock import Clock
from tests.train.tiny import before_call, digest, fail, log, tiny

# Durations


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1h30m", 5400), ("1d", 86400), ("0.5s", 0.5)]
)
def test_parse_duration(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "30", "1.2.3s", "30m2h", "-5s", "nans", "1H 30M"])
def test_parse_duration_refuses_other_text(text):
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (59.7, "1m00s"), (185, "3m05s"), (7620, "2h07m"), (97500, "1d03h")]
)
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text


# Decisions, with a simulated clock


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(budget_module, "time", clock)
    return clock


def make_budget(seconds, per_epoch, images):
    learner = SimpleNamespace(steps_per_epoch=per_epoch, run=SimpleNamespace(recipe=Recipe(batch_size=100)))
    return Budget(seconds, learner, range(images))  # pyright: ignore[reportArgumentType]


def simulate(clock, seconds, guess, step_seconds, validation_seconds, per_epoch=100):
    """Follow the decisions of a budget; return the part of it that the run took, and the plan."""
    start, budget, plan, state = clock.now, make_budget(seconds, per_epoch, 1000), Plan.of(guess), State()
    budget.decided = start  # the first decision has been made
    while state.step < plan.steps:
        state.elapsed = clock.now - start
        if steps := budget.replan(state, plan):
            plan = plan.replan(state.step, steps)
        took = step_seconds(state.elapsed / seconds)
        clock.now += took
        state.seconds += took
        state.step += 1
        if state.step % per_epoch == 0 or state.step == plan.steps:
            clock.now += validation_seconds
            state.validation_seconds = validation_seconds
    return (clock.now - start) / seconds, plan


SPEEDS = {
    "steady": lambda part: 0.1,
    "slows down": lambda part: 0.1 + 0.1 * part,
    "speeds up": lambda part: 0.2 - 0.1 * part,
    "slow for a while": lambda part: 0.5 if 0.4 < part < 0.6 else 0.1,
    "slow at the end": lambda part: 0.1 if part < 0.9 else 0.2,
}


@pytest.mark.parametrize("guess", [1000, 3000, 20000])
@pytest.mark.parametrize("speed", SPEEDS)
def test_a_budget_is_kept_and_used(clock, speed, guess):
    took, plan = simulate(clock, 600.0, guess, SPEEDS[speed], validation_seconds=2.0)
    assert 0.97 < took <= 1.005
    assert len(plan.decisions) <= 51
    assert plan.progress(plan.steps - 1) < 1


@pytest.mark.parametrize("validation", [20.0, 40.0, 60.0, 90.0])
def test_a_budget_includes_slow_validations(clock, validation):
    for seconds in range(1500, 3600, 37):  # the last epoch may end anywhere
        took, _ = simulate(clock, float(seconds), 1000, lambda part: 3.75, validation, per_epoch=176)
        assert 0.93 < took <= 1.0, seconds


def test_a_budget_that_is_spent_ends_with_the_next_step(clock):
    took, plan = simulate(clock, 10.0, 1000, lambda part: 30.0, validation_seconds=0.0)
    assert plan.decisions == ((0, 1000), (1, 2))
    assert took == 6.0
    assert 0 < Linear().factor(plan.progress(1), 200) < 1


def test_a_resumed_run_decides_at_once(clock):
    """After ten processes, each with a startup of 10 s and ten steps of 1 s, the plan fills the other 800 s."""
    plan, state = Plan.of(1000), State()
    for _ in range(10):
        budget = make_budget(1000.0, 10**6, 0)
        state.elapsed += 10
        for _ in range(10):
            if steps := budget.replan(state, plan):
                plan = plan.replan(state.step, steps)
            clock.now += 1
            state.seconds += 1
            state.elapsed += 1
            state.step += 1
    assert 100 + 790 <= plan.steps <= 100 + 810


@pytest.mark.parametrize("validation", [0.0, 0.5, 2.0])
def test_the_first_decision_includes_validations(tmp_path, monkeypatch, clock, validation):
    """A validation has 5 batches, the first of which takes three times as long; a step takes 0.1 s."""
    seconds = itertools.chain([3 * validation], itertools.repeat(validation))

    def pass_time(seconds):
        clock.now += seconds

    monkeypatch.setattr(evaluate_module, "estimate", lambda *_: pass_time(next(seconds)))
    monkeypatch.setattr(Learner, "gradients", lambda *_: pass_time(0.1))
    monkeypatch.setattr(Learner, "update", lambda *_: None)
    run, data = tiny(tmp_path, images=1000, batch_size=100), load("digits", validation=500)
    learner = Learner(make_network(run, data), run, data.train, Ranks(0, 1, torch.device("cpu")))
    budget = Budget(100.0, learner, data.validation)
    steps = budget.measure(clock.now)
    left = 100 * (1 - budget_module.RESERVE_FRACTION) - (2 + 10) * 0.1 - 4 * validation

    def takes(steps: int) -> float:
        return steps * 0.1 + -(-steps // 10) * 7 * validation  # a validation for each started epoch

    assert budget.validation_seconds == pytest.approx(7 * validation)
    assert takes(steps) <= left + 1e-9
    assert takes(steps + 1) > left - 1e-9


# Whole runs, with a clock that moves at every call


@pytest.fixture
def ticking(monkeypatch):
    clock = Clock(0.005)
    for module in (budget_module, loop_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


def on_budget(folder, **changes):
    run = tiny(folder, images=1197, batch_size=100)
    return replace(run, budget="3s", certify_validation=0, **changes)


def test_the_schedule_of_a_run_ends_within_its_budget(tmp_path, ticking):
    run, began = on_budget(tmp_path), ticking.now
    train(run)
    assert 0.95 < (ticking.now - began) / 3 <= 1.01
    rates, record = [line["lr"] for line in log(tmp_path, "step")], json.loads((tmp_path / "run.json").read_text())
    assert len(rates) == record["steps"] > 60
    assert 20 < len(record["plan"]) <= 51
    assert rates[-1] < 0.05 * run.recipe.optimiser.lr
    assert max(rates) > 0.9 * run.recipe.optimiser.lr


def test_a_crashed_run_keeps_its_decisions(tmp_path, monkeypatch, ticking):
    """Steps that were lost are repeated with the stored decisions, to the same bits; only later decisions are new."""
    before_call(monkeypatch, Learner, "gradients", 41, lambda: fail(ZeroDivisionError()))
    run = on_budget(tmp_path, save_every="1h")
    with pytest.raises(ZeroDivisionError):
        train(run)
    before, lines = json.loads((tmp_path / "run.json").read_text()), log(tmp_path, "step")
    count = before["plan"][-1][0]
    assert len(before["plan"]) > 3
    assert before["steps"] == before["plan"][-1][1]
    assert count > 5
    ticking.now += 0.7  # a pause that shifts every later decision
    train(run, resume=True)
    after, again = json.loads((tmp_path / "run.json").read_text()), log(tmp_path, "step")
    assert after["plan"][: len(before["plan"])] == before["plan"]
    assert len(after["plan"]) > len(before["plan"])
    assert [line["step"] for line in again] == list(range(1, after["steps"] + 1))
    assert [(line["loss"], line["lr"]) for line in again[:count]] == [(x["loss"], x["lr"]) for x in lines[:count]]


def test_measuring_does_not_change_the_learner(tmp_path, monkeypatch, ticking):
    """A run of T steps is the same if T is from a budget as if it is from the epochs."""
    measure = Budget.measure
    monkeypatch.setattr(Budget, "measure", lambda self, start: measure(self, start) * 0 + 6)
    monkeypatch.setattr(Budget, "replan", lambda self, state, plan: 0)
    train(replace(tiny(tmp_path / "a"), budget="20s"))
    train(tiny(tmp_path / "b"))
    assert digest(tmp_path / "a" / "model.safetensors") == digest(tmp_path / "b" / "model.safetensors")


def test_a_budget_that_is_too_short_is_refused(tmp_path, ticking):
    with pytest.raises(ValueError, match=r"--budget 0\.001s is too short"):
        train(replace(tiny(tmp_path / "r"), budget="0.001s"))
    assert not (tmp_path / "r").exists()


def test_all_processes_use_the_clock_of_the_first(tmp_path):
    """The clock of the second one is three times as fast."""
    torchrun("tests/train/two_processes.py", str(tmp_path), "on_budget")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["environment"]["processes"] == 2
    assert [line["step"] for line in log(tmp_path / "run", "step")] == list(range(1, record["steps"] + 1))
    assert len(record["plan"]) > 1
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second  # the same weights, so the same steps at the same rates
