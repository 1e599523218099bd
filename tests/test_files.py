"""A file is whole, or the one that was there before; and its mode is what the umask says."""

import os

import pytest
import torch

from lipflow.files import save_tensors, write_atomic


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x"
    write_atomic(path, lambda temporary: temporary.write_text("old"))

    def fail(temporary):
        temporary.write_text("ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_tensors_that_cannot_be_written_are_an_error_of_the_system(tmp_path):
    with pytest.raises(OSError, match="cannot be written"):
        save_tensors({"x": torch.zeros(1)}, tmp_path / "no folder" / "x")


def test_two_processes_that_write_at_once_leave_the_file_of_one(tmp_path, monkeypatch):
    path = tmp_path / "x"

    def write(temporary):
        temporary.write_text("mine")
        monkeypatch.setattr(os, "getpid", lambda: 1)
        write_atomic(path, lambda other: other.write_text("another's"))
        assert path.read_text() == "another's"

    write_atomic(path, write)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_mode_is_the_umasks_whatever_wrote_the_file(umask, tmp_path):
    path, before = tmp_path / "x", os.umask(umask)
    try:
        write_atomic(path, lambda temporary: (temporary.write_text("x"), temporary.chmod(0o600)))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_what_is_no_file_is_written_to_and_stays_what_it_is(tmp_path):
    """A name in the place of /dev/null would be the end of it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(pipe, lambda path: path.write_text("it"))
    assert os.read(reader, 10) == b"it"
    os.close(reader)
    assert pipe.is_fifo()
