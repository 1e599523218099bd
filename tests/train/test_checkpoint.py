"""Checkpoints: complete, checked, and replaced by the one before if they are damaged."""

import errno
import os
import subprocess
import warnings

import pytest
import torch

from lipflow.train.checkpoint import Checkpoint, Checkpoints


def checkpoint(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    return Checkpoint(step, {"a": torch.randn(3, generator=generator), "n": torch.tensor(step)}, {"best": step / 3})


def equal(one: Checkpoint | None, other: Checkpoint) -> bool:
    assert one is not None
    same = all(torch.equal(one.tensors[k], v) for k, v in other.tensors.items())
    return same and one.tensors.keys() == other.tensors.keys() and one[::2] == other[::2]


def test_an_unreadable_checkpoint_is_not_treated_as_damaged(tmp_path, monkeypatch):
    """Otherwise the run would continue from the one before, and remove this one."""
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(Checkpoint(step, {"x": torch.zeros(1)}, {}))

    def failing(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr("lipflow.train.checkpoint.sha256", failing)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoints.latest()
    monkeypatch.undo()
    last = checkpoints.latest()
    assert last is not None
    assert last.step == 2


def test_the_latest_two_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    assert checkpoints.latest() is None
    for step in (1, 5, 12):
        checkpoints.save(checkpoint(step))
    assert checkpoints.steps() == [12, 5]
    assert sorted(os.listdir(tmp_path / "c")) == [
        "step-00000005.safetensors", "step-00000005.sha256", "step-00000012.safetensors", "step-00000012.sha256",
    ]  # fmt: skip
    assert equal(checkpoints.latest(), checkpoint(12))
    assert equal(checkpoints.load(5), checkpoint(5))
    subprocess.run(["sha256sum", "--quiet", "-c", "step-00000012.sha256"], cwd=tmp_path / "c", check=True)


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def _flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def _another_step(path):
    """The older checkpoint under the newer one's name, with a digest that matches."""
    older = path.with_name("step-00000001.safetensors")
    path.write_bytes(older.read_bytes())
    digest = older.with_suffix(".sha256").read_text()
    path.with_suffix(".sha256").write_text(digest.replace(older.name, path.name))


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _flip_a_bit,
        _another_step,
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.with_suffix(".sha256").write_text(""),
        lambda path: path.with_suffix(".sha256").write_bytes(b"\xff\xfe"),
    ],
)
def test_after_a_damaged_checkpoint_the_one_before_is_used(damage, tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(checkpoint(1))
    checkpoints.save(checkpoint(2))
    damage(tmp_path / "step-00000002.safetensors")
    with pytest.warns(UserWarning, match="continuing from step 1 instead"):
        assert equal(checkpoints.latest(), checkpoint(1))
    _flip_a_bit(tmp_path / "step-00000001.safetensors")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is complete: .*step-00000002.*step-00000001"):
        checkpoints.latest()


def test_a_checkpoint_without_a_digest_is_ignored_and_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(checkpoint(1))
    checkpoints.save(checkpoint(2))
    (tmp_path / "step-00000002.sha256").unlink()
    (tmp_path / ".step-00000003.safetensors.part").write_bytes(b"half")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert equal(checkpoints.latest(), checkpoint(1))
    checkpoints.tidy(1)
    assert not list(tmp_path.glob(".*"))
    assert not (tmp_path / "step-00000002.safetensors").exists()


def test_tidy_removes_later_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(checkpoint(1))
    checkpoints.save(checkpoint(2))
    checkpoints.tidy(1)
    assert checkpoints.steps() == [1]
