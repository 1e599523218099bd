"""Weights and checkpoints on disk: complete, checked, and never executed."""

import errno
import json
import os
import pickle
import subprocess
import warnings

import pytest
import torch
from safetensors.torch import save_file

import lipflow
from lipflow.models.file import read, save
from lipflow.train.checkpoint import Checkpoint, Checkpoints
from tests.train.tiny import fail


@pytest.fixture
def network():
    torch.manual_seed(0)
    return lipflow.build(
        "cpl-digits", classes=3, in_shape=(1, 4, 4), depth=1, channels=3, features=4, lln=True, mean=[0.3]
    ).eval()


def checkpoint(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    return Checkpoint(step, {"a": torch.randn(3, generator=generator), "n": torch.tensor(step)}, {"best": step / 3})


def equal(one: Checkpoint | None, other: Checkpoint) -> bool:
    assert one is not None
    same = all(torch.equal(one.tensors[k], v) for k, v in other.tensors.items())
    return same and one.tensors.keys() == other.tensors.keys() and one[::2] == other[::2]


# Networks


def test_a_loaded_network_is_equal_bit_for_bit(network, tmp_path):
    save(network, tmp_path / "m.safetensors")
    before = torch.get_rng_state()
    loaded = read(tmp_path / "m.safetensors")
    assert torch.equal(before, torch.get_rng_state())
    assert not loaded.training
    assert (loaded.name, loaded.classes, loaded.in_shape) == ("cpl-digits", 3, (1, 4, 4))
    assert loaded.state_dict().keys() == network.state_dict().keys()
    assert all(torch.equal(v, network.state_dict()[k]) for k, v in loaded.state_dict().items())
    x = torch.rand(2, 1, 4, 4)
    assert torch.equal(loaded(x), network(x))


def test_equal_networks_have_equal_files(network, tmp_path):
    save(network, tmp_path / "a")
    save(read(tmp_path / "a"), tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    (tmp_path / "c").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "c").stat().st_mode


def test_a_network_of_ones_own_is_refused(network, tmp_path):
    network.name = None
    with pytest.raises(ValueError, match=r"only a network made by lipflow.build"):
        save(network, tmp_path / "m")


GOOD = {"format": 1, "model": "cpl-digits", "classes": 3, "in_shape": [1, 4, 4], "sizes": {}}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (None, "not that of a lipflow network"),
        ({}, "not that of a lipflow network"),
        ({**GOOD, "more": 1}, "not that of a lipflow network"),
        ({**GOOD, "classes": "3"}, "not that of a lipflow network"),
        ({**GOOD, "format": 2}, "it has format 2; this version of lipflow reads format 1"),
        ({**GOOD, "model": "os.system"}, "there is no model 'os.system'"),
        ({**GOOD, "sizes": {"__class__": 1}}, "has no argument '__class__'"),
        ({**GOOD, "sizes": {"classes": 1}}, "cannot be loaded"),
        ({**GOOD, "sizes": {"depth": "import os"}}, "cannot be loaded"),
        ({**GOOD, "in_shape": [1, 4]}, r"in_shape is \(channels, height, width\)"),
        (GOOD, "Missing key"),
    ],
)
def test_metadata_is_checked(metadata, words, tmp_path):
    header = {"lipflow": json.dumps(metadata)} if metadata is not None else None
    save_file({"x": torch.zeros(1)}, tmp_path / "m", header)
    with pytest.raises(ValueError, match=words):
        read(tmp_path / "m")


def test_a_truncated_file_and_a_pickle_are_refused(network, tmp_path):
    save(network, tmp_path / "m")
    (tmp_path / "m").write_bytes((tmp_path / "m").read_bytes()[:-1])
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        read(tmp_path / "m")
    (tmp_path / "p").write_bytes(pickle.dumps(_Trap()))
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        read(tmp_path / "p")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read(tmp_path / "absent")


class _Trap:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


# Checkpoints


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


def _flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-3]),
        _flip_a_bit,
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


def test_a_checkpoint_without_a_digest_does_not_exist(two):
    (two.folder / "step-00000002.sha256").unlink()
    (two.folder / ".step-00000003.safetensors.part").write_bytes(b"half")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert equal(two.latest(), checkpoint(1))
    two.tidy(1)
    assert set(os.listdir(two.folder)) == {"step-00000001.safetensors", "step-00000001.sha256"}


def test_tidy_removes_later_checkpoints(two):
    two.tidy(1)
    assert two.steps() == [1]
