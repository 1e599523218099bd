"""Resuming a run from a folder of unknown origin: one line says what is wrong, and in which file."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lipflow.files import sha256
from lipflow.train import train
from lipflow.train.checkpoint import Checkpoint, Checkpoints
from lipflow.train.record import FINAL
from tests.train.tiny import tiny


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Path:
    """A run that has ended, except for its last file."""
    run = tiny(tmp_path_factory.mktemp("run") / "run", epochs=1)
    train(replace(run, certify_validation=0))
    (run.folder / FINAL).unlink()
    return run.folder


def resumed(ended: Path, folder: Path, forge: Callable[[Path], object]) -> None:
    """Resume a copy of a run in which something is changed."""
    shutil.copytree(ended, folder)
    forge(folder)
    train(replace(tiny(folder, epochs=1), certify_validation=0), resume=True)


def test_a_true_run_is_resumed(ended, tmp_path):
    resumed(ended, tmp_path / "run", lambda folder: None)
    assert (tmp_path / "run" / FINAL).exists()


def _tensor(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Checkpoint], Checkpoint]:
    """Change the first tensor whose name ends so, or leave it out."""

    def forgery(checkpoint: Checkpoint) -> Checkpoint:
        found = next(key for key in checkpoint.tensors if key.endswith(name))
        tensors = dict(checkpoint.tensors)
        new = change(tensors.pop(found))
        return checkpoint._replace(tensors=tensors if new is None else {**tensors, found: new})

    return forgery


def _more(name: str) -> Callable[[Checkpoint], Checkpoint]:
    return lambda checkpoint: checkpoint._replace(tensors={**checkpoint.tensors, name: torch.ones(())})


def _number(name: str, value: Any) -> Callable[[Checkpoint], Checkpoint]:
    return lambda checkpoint: checkpoint._replace(numbers={**checkpoint.numbers, name: value})


CHECKPOINTS: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "a weight is missing": _tensor("weight", lambda t: None),
    "a weight of another shape": _tensor("weight", lambda t: t[:1]),
    "a moment is missing": _tensor("exp_avg", lambda t: None),
    "a moment of another shape": _tensor("exp_avg_sq", lambda t: t.reshape(-1)[:1]),
    "moments of integers": _tensor("exp_avg", torch.Tensor.int),
    "a step of many numbers": _tensor("0.step", lambda t: torch.ones(9)),
    "a parameter that does not exist": _more("optimiser.99.step"),
    "a parameter before the first": _more("optimiser.-1.step"),
    "a parameter without a number": _more("optimiser.x.step"),
    "an unknown name": _more("optimiser.0.more"),
    "an unknown field": _number("more", 1),
    "a step that is text": _number("step", "3"),
    "another step": _number("step", 10**9),
    "fewer images than none": _number("epoch_images", -20),
    "a time that is infinite": _number("elapsed", float("inf")),
    "a log of text": _number("log_bytes", "all"),
    "accuracy at no radius": _number("validation", dict(images=1, clean=1.0, certified={})),
    "accuracy that is text": _number("validation", dict(images=1, clean=1.0, certified={"1": "x"})),
    "accuracy that is a list": _number("validation", [1]),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_that_are_signed_again_are_refused(name, ended, tmp_path):
    def forge(folder: Path) -> None:
        checkpoints = Checkpoints(folder / "checkpoints")
        latest = checkpoints.latest()
        assert latest is not None
        checkpoints.save(CHECKPOINTS[name](latest))

    with pytest.raises(ValueError, match=r"step-\d+.safetensors is not a checkpoint of this run: ") as caught:
        resumed(ended, tmp_path / "run", forge)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_step_is_refused(ended, tmp_path):
    """After the end of the run it would train for ever."""

    def forge(folder: Path) -> None:
        path = next((folder / "checkpoints").glob("*.safetensors"))
        later = path.rename(path.with_name("step-99999999.safetensors"))
        later.with_suffix(".sha256").write_text(f"{sha256(later)}  {later.name}\n")

    with pytest.raises(ValueError, match="is not a checkpoint of this run: it is of step 3, its name of step 99999999"):
        resumed(ended, tmp_path / "run", forge)


def _link(folder: Path) -> None:
    (folder / "log.jsonl").rename(folder.parent / "precious")
    (folder / "log.jsonl").symlink_to(folder.parent / "precious")


def _pipe(folder: Path) -> None:
    (folder / "log.jsonl").unlink()
    os.mkfifo(folder / "log.jsonl")


@pytest.mark.parametrize("forge", [_link, _pipe])
def test_a_log_that_is_a_link_or_a_pipe_is_not_written_to(forge, ended, tmp_path):
    with pytest.raises(ValueError, match=r"log\.jsonl is a link, or not a regular file"):
        resumed(ended, tmp_path / "run", forge)


@pytest.mark.parametrize("place", ["environment", "recipe"])
@pytest.mark.parametrize("threads", [10**6, -1, 1.5, "1"])
def test_a_number_of_threads_that_cannot_be_started_is_refused(place, threads, ended, tmp_path):
    """The libraries of torch crash on 10⁶ threads."""

    def forge(folder: Path) -> None:
        values = json.loads((folder / "run.json").read_text())
        (values["run"]["recipe"] if place == "recipe" else values["environment"])["threads"] = threads
        (folder / "run.json").write_text(json.dumps(values))

    with pytest.raises(ValueError, match=r"run.json is not a record of a run: .*threads"):
        resumed(ended, tmp_path / "run", forge)
