"""Checkpoints: complete, checked, and replaced by the one before if they are damaged."""

import errno
import os
import subprocess
import warnings

import pytest
import torch
from safetensors.torch import save_file

from lipflow.files import sha256
from lipflow.train.checkpoint import Checkpoint, Checkpoints
from tests.train.tiny import fail


def checkpoint(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    return Checkpoint(step, {"a": torch.randn(3, generator=generator), "n": torch.tensor(step)}, {"best": step / 3})


def equal(one: Checkpoint | None, other: Checkpoint) -> bool:
    assert one is not None
    same = all(torch.equal(one.tensors[k], v) for k, v in other.tensors.items())
    return same and one.tensors.keys() == other.tensors.keys() and one[::2] == other[::2]


@pytest.fixture
def two(tmp_path):
    """Checkpoints of the steps 1 and 2."""
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(checkpoint(step))
    return checkpoints


def test_the_latest_two_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    assert checkpoints.latest() is None
    for step in (1, 5, 12):
        checkpoints.save(checkpoint(step))
    assert checkpoints.steps() == [12, 5]
    names = {f"step-{step:08d}.{end}" for step in (5, 12) for end in ("safetensors", "sha256")}
    assert set(os.listdir(tmp_path / "c")) == names
    assert equal(checkpoints.latest(), checkpoint(12))
    assert equal(checkpoints.load(5), checkpoint(5))
    subprocess.run(["sha256sum", "--quiet", "-c", "step-00000012.sha256"], cwd=tmp_path / "c", check=True)


def _of_another_step(path):
    """Its digest is that of its content, but not its name."""
    for end in (".safetensors", ".sha256"):
        path.with_suffix(end).write_bytes(path.with_name("step-00000001").with_suffix(end).read_bytes())


def _without_numbers(path):
    """Its digest is that of its content."""
    save_file({"a": torch.zeros(3)}, path)
    path.with_suffix(".sha256").write_text(f"{sha256(path)}  {path.name}\n")


def _flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-3]),
        _flip_a_bit,
        _of_another_step,
        _without_numbers,
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.with_suffix(".sha256").write_text(""),
        lambda path: path.with_suffix(".sha256").write_bytes(b"\xff\xfe"),
    ],
)
def test_latest_skips_a_damaged_checkpoint(damage, two):
    damage(two.folder / "step-00000002.safetensors")
    with pytest.warns(UserWarning, match="continuing from step 1 instead"):
        assert equal(two.latest(), checkpoint(1))
    _flip_a_bit(two.folder / "step-00000001.safetensors")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is complete: .*step-00000002.*step-00000001"):
        two.latest()


def test_latest_does_not_skip_a_checkpoint_that_cannot_be_read(two, monkeypatch):
    """Otherwise the run would continue from the one before, and remove this one."""
    with monkeypatch.context() as patch:
        patch.setattr("lipflow.train.checkpoint.sha256", lambda path: fail(OSError(errno.EIO, "Input/output error")))
        with pytest.raises(OSError, match="Input/output error"):
            two.latest()
    assert equal(two.latest(), checkpoint(2))


def test_tidy_removes_later_and_partly_written_checkpoints(two):
    two.save(checkpoint(3))
    (two.folder / "step-00000003.sha256").unlink()
    (two.folder / ".step-00000004.safetensors.part").write_bytes(b"half")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert equal(two.latest(), checkpoint(2))
    two.tidy(2)
    assert set(os.listdir(two.folder)) == {"step-00000002.safetensors", "step-00000002.sha256"}
    two.tidy(1)  # a later checkpoint is damaged
    assert os.listdir(two.folder) == []
