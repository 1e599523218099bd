"""Files that are whole or not there, and that those may read whom the user's umask lets."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file of this process, sync it to the disk, and give it its name in one step.

    What is no file, as /dev/null, is written to as it is: a name in its place would be the end of it.
    """
    if path.exists() and not path.is_file():
        write(path)
        return
    with filled(path, write) as temporary:
        temporary.replace(path)
    sync_names(path.parent)


def sync_names(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    with contextlib.suppress(OSError):  # a folder cannot be synced on every system
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


@contextlib.contextmanager
def filled(path: Path, write: Callable[[Path], object]) -> Iterator[Path]:
    """A temporary file beside `path`, filled by `write` and on the disk; removed at the end, unless it was renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # what the user's umask says; safetensors makes files that no one else can read
        write(temporary)
        temporary.chmod(mode)
        with temporary.open("r+b") as file:  # Windows syncs only what it may write
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def permit(path: Path) -> None:
    """Let those read a file whom the user's umask lets, if that is ours to say."""
    with contextlib.suppress(OSError), filled(path, lambda temporary: None) as new:
        path.chmod(new.stat().st_mode)


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file; if that fails, it is an OSError, as of any other file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from None
