"""Several processes: the loss curve of one, the same arguments on each, and no threads left at the end."""

import json
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from lipflow.data import load
from lipflow.train import loop as loop_module
from lipflow.train import train
from lipflow.train.distributed import Ranks, choose_device
from tests.processes import torchrun
from tests.train.tiny import SGD, digest, log, tiny


def results(folder):
    """What the ranks have written."""
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def test_two_processes_have_the_loss_curve_of_one(tmp_path):
    """31 images in batches of 3: two ranks have 1 and 2 of them, and of the last batch 0 and 1.

    The optimiser is SGD, as Adam does not depend on the scale of a gradient.
    """
    alone, run = tmp_path / "alone", tmp_path / "run"
    train(tiny(alone, epochs=2, images=31, batch_size=3, **SGD))
    output = torchrun("tests/train/two_processes.py", str(tmp_path), "whole")
    assert output.count("epoch 2/2") == 1  # only the first rank prints
    first, second = results(tmp_path)
    assert any(name.endswith(".u") for name in first[0])
    assert first == second  # weights, power-iteration vectors, and validation accuracy
    one, two = log(alone, "step"), log(run, "step")
    assert [line["step"] for line in two] == [line["step"] for line in one]
    torch.testing.assert_close([x["loss"] for x in two], [x["loss"] for x in one], rtol=2e-4, atol=2e-5)
    validation = [log(folder, "epoch")[-1]["validation"]["clean"] for folder in (alone, run)]
    exact = [log(folder, "exact")[0] for folder in (alone, run)]
    assert validation[0] == pytest.approx(validation[1], abs=3 / 1466)
    assert exact[0]["clean"] == pytest.approx(exact[1]["clean"], abs=3 / 1466)
    assert exact[0]["images"] == exact[1]["images"] == 1466

    # Two processes of the command line resume the run.
    before = digest(run / "model.safetensors")
    (run / "model.safetensors").unlink()
    output = torchrun("-m", "lipflow", "train", "--out", str(run), "--resume")
    assert "cpu × 2" in output
    assert "continuing after step 22" in output
    assert digest(run / "model.safetensors") == before


def test_processes_with_different_flags_are_refused_on_every_rank(tmp_path):
    """With a different learning rate on each, their weights would differ without an error."""
    torchrun("tests/train/two_processes.py", str(tmp_path), "apart")
    error = "the processes do not have the same flags; start all with the same command and data"
    assert results(tmp_path) == [error, error]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("split", ["train", "validation"])
def test_processes_with_different_images_are_refused(split, tmp_path, monkeypatch):
    gathered, data = [], load("digits")
    monkeypatch.setattr(Ranks, "gather", lambda self, parts: gathered.extend(parts) or gathered)
    other = replace(data, **{split: getattr(data, split).take(torch.arange(9))})
    for own, outcome in (
        (data, nullcontext()),
        (other, pytest.raises(ValueError, match="do not have the same images")),
    ):
        with outcome:
            loop_module._require_same_on_all(tiny(tmp_path), False, own, Ranks(0, 2, torch.device("cpu")))


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
def test_no_thread_of_a_process_group_is_left(tmp_path):
    """One that outlives the interpreter aborts the process; see Note [leaving a process group]."""
    torchrun("tests/train/process_groups.py", str(tmp_path))
    first, second = results(tmp_path)
    assert {name: left for name, (_, left) in [*first.items(), *second.items()] if left} == {}
    assert {name: (first[name][0], second[name][0]) for name in first} == {
        "trained": (0, 0),
        "certified": (0, 0),
        "attacked": (0, 0),
        "refused on the first rank": (2, 1),
        "loss not finite": (1, 1),
        "signal to one rank": (128 + signal.SIGTERM, 128 + signal.SIGINT),
        "interrupted": (130, 130),
        "error on the first rank": (2, 1),
        "trained again": (0, 0),
    }


def test_an_error_within_a_collective_ends_all_processes(tmp_path):
    """A group waits for its collectives before it is destroyed: without a limit, both processes would never end."""
    output = torchrun("tests/train/process_groups.py", str(tmp_path), "--collective", fails=True)
    assert "lipflow: a collective has begun" in output
    assert "exitcode  : 2 " in output  # of the first process: it ended by itself


def test_choose_device_needs_an_existing_device():
    assert choose_device("cpu") == torch.device("cpu")
    if not torch.cuda.is_available():
        assert choose_device("auto") == torch.device("cpu")
        with pytest.raises(ValueError, match="--device cuda: torch finds no GPU here"):
            choose_device("cuda")
