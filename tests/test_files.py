"""Atomic writes, with the permissions of the user's umask."""

import os

import pytest
import torch

from lipflow.files import save_tensors, write_atomic


def test_write_atomic_keeps_the_old_file_if_the_write_fails(tmp_path):
    path = tmp_path / "x"
    write_atomic(path, lambda temporary: temporary.write_text("old"))

    def fail(temporary):
        temporary.write_text("ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_write_atomic_in_two_processes_leaves_the_file_of_one(tmp_path, monkeypatch):
    path = tmp_path / "x"

    def write(temporary):
        temporary.write_text("mine")
        monkeypatch.setattr(os, "getpid", lambda: 1)
        write_atomic(path, lambda other: other.write_text("another's"))
        assert path.read_text() == "another's"

    write_atomic(path, write)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_write_atomic_gives_the_permissions_of_the_umask(umask, tmp_path):
    path, before = tmp_path / "x", os.umask(umask)
    try:
        write_atomic(path, lambda temporary: (temporary.write_text("x"), temporary.chmod(0o600)))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_write_atomic_writes_to_a_pipe_and_does_not_replace_it(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(pipe, lambda path: path.write_text("it"))
    assert os.read(reader, 10) == b"it"
    os.close(reader)
    assert pipe.is_fifo()


def test_save_tensors_raises_os_error(tmp_path):
    with pytest.raises(OSError, match="cannot be written"):
        save_tensors({"x": torch.zeros(1)}, tmp_path)  # a folder, which write_atomic does not replace
