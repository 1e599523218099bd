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


def test_write_atomic_twice_at_once_leaves_the_file_of_one(tmp_path):
    path = tmp_path / "x"

    def write(temporary):
        temporary.write_text("mine")
        write_atomic(path, lambda other: other.write_text("another's"))
        assert path.read_text() == "another's"

    write_atomic(path, write)
    assert path.read_text() == "mine"


def test_a_link_with_the_name_of_the_temporary_file_is_not_followed(tmp_path, monkeypatch):
    """Names cannot be guessed; here the links have every name that the process could use."""
    names = []
    write_atomic(tmp_path / "x", lambda temporary: (names.append(temporary.name), temporary.write_text("new")))
    for same in (f".x.{os.getpid()}.part", names[0]):
        (tmp_path / same).symlink_to(tmp_path / "precious")
    (tmp_path / "precious").write_text("old")
    write_atomic(tmp_path / "x", lambda temporary: temporary.write_text("new"))
    monkeypatch.setattr("secrets.token_hex", lambda count: names[0].split(".")[2])
    with pytest.raises(FileExistsError):
        write_atomic(tmp_path / "x", lambda temporary: temporary.write_text("newer"))
    assert (tmp_path / "precious").read_text() == "old"
    assert (tmp_path / "x").read_text() == "new"


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
