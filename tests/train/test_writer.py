"""The log, the best network, progress, and TensorBoard."""

import sys
import time
import types
from dataclasses import replace

import pytest
import torch

import lipflow
from lipflow.data import load
from lipflow.train import loop as loop_module
from lipflow.train import train
from lipflow.train.learner import Learner
from lipflow.train.schedule import Plan
from tests.train.tiny import before_call, fail, log, tiny


def test_the_log_has_every_step_and_the_mean_loss_of_epochs(tmp_path):
    run = tiny(tmp_path, epochs=2, images=70, batch_size=20)  # the last batch of an epoch has 10 images
    train(run)
    steps, epochs = log(tmp_path, "step"), log(tmp_path, "epoch")
    assert [(line["step"], line["epoch"]) for line in steps] == [(t + 1, t // 4 + 1) for t in range(8)]
    assert [line["lr"] for line in steps] == [run.recipe.rate(Plan.of(8).progress(step)) for step in range(8)]
    for number, epoch in enumerate(epochs):
        losses = [line["loss"] for line in steps[4 * number : 4 * number + 4]]
        mean = sum(loss * n for loss, n in zip(losses, [20, 20, 20, 10], strict=True)) / 70
        assert epoch["loss"] == pytest.approx(mean, rel=1e-12)
        assert set(epoch["validation"]["certified_estimated"]) == {"36/255", "0.25", "0.5", "1"}


def test_the_best_network_is_the_latest_with_the_best_score_on_validation_images(tmp_path, monkeypatch):
    scores, splits, weights = iter([0.2, 0.6, 0.6, 0.1]), [], []
    usual = loop_module.estimate

    def estimate(network, split, *rest):
        splits.append(split)
        weights.append({k: v.clone() for k, v in network.state_dict().items()})
        result = usual(network, split, *rest)
        return replace(result, certified={**result.certified, "36/255": next(scores)})

    monkeypatch.setattr(loop_module, "estimate", estimate)
    train(tiny(tmp_path, epochs=4))
    best, final = lipflow.load(tmp_path, "best").state_dict(), lipflow.load(tmp_path).state_dict()
    assert all(torch.equal(v, weights[2][k]) for k, v in best.items())
    assert all(torch.equal(v, weights[3][k]) for k, v in final.items())
    assert not any(torch.equal(v, weights[3][k]) for k, v in best.items() if k.endswith("weight"))
    test = load("digits").test.images
    assert all(len(split) == 1437 and not (split.images[0] == test).flatten(1).all(1).any() for split in splits)


def test_a_terminal_has_a_progress_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    train(tiny(tmp_path, epochs=1))
    output = capsys.readouterr().out
    assert "━" in output
    assert "step 3/3" in output


def test_tensorboard_reads_the_events_of_a_resumed_run(tmp_path, monkeypatch):
    """The resumed run repeats steps that were written before a crash."""
    reason = "tensorboard is not installed: it is in the `dev` extra"
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason=reason)
    before_call(monkeypatch, Learner, "gradients", 5, lambda: fail(RuntimeError("crash")))
    with pytest.raises(RuntimeError, match="crash"):
        train(tiny(tmp_path))
    time.sleep(1.1)  # TensorBoard orders files by the second, then by a number as text: 10 before 9
    train(tiny(tmp_path), resume=True)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses, steps = events.Scalars("step/loss"), log(tmp_path, "step")
    assert [event.step for event in losses] == [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [event.value for event in losses] == pytest.approx([line["loss"] for line in steps])
    names = {"epoch/loss", "epoch/validation/clean", "step/lr", "exact/clean", "exact/certified/36/255"}
    assert names <= set(events.Tags()["scalars"])


def test_a_broken_tensorboard_is_not_used(tmp_path, monkeypatch):
    class Broken(types.ModuleType):
        def __getattr__(self, name):
            if name != "SummaryWriter":  # code that inspects all modules asks for other names
                raise AttributeError(name)
            raise TypeError("Descriptors cannot be created directly")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Broken("torch.utils.tensorboard"))
    with pytest.warns(UserWarning, match="TensorBoard"):
        train(tiny(tmp_path, epochs=1))
