"""Atomic writes of files, with the permissions of the user's umask."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file, sync it to the disk, and rename it to `path`.

    A device or a pipe, such as /dev/null, is written to directly, as a renamed file would replace it.
    """
    if path.exists() and not path.is_file():
        write(path)
        return
    with temporary_file(path, write) as temporary:
        temporary.replace(path)
    sync_names(path.parent)


def sync_names(folder: Path) -> None:
    """Sync the names of the files in a folder to the disk."""
    with contextlib.suppress(OSError):  # some systems cannot sync a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def temporary_file(path: Path, write: Callable[[Path], object]) -> Iterator[Path]:
    """A temporary file in the folder of `path`, filled by `write` and synced; removed at the end unless renamed.

    Its name cannot be guessed, and it is created exclusively: in a folder that others can write to, a link with its
    name would otherwise decide what is overwritten.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    temporary.touch(exist_ok=False)
    try:
        mode = temporary.stat().st_mode  # by the user's umask; safetensors creates files that only the user can read
        write(temporary)
        temporary.chmod(mode)
        with temporary.open("r+b") as file:  # Windows syncs only files that are open for writing
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def require_file(path: Path) -> None:
    """Raise unless a path is a regular file, or a link to one: a pipe or a device may never end."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")


def sha256(path: Path) -> str:
    """The SHA-256 of a file, read in blocks."""
    require_file(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def apply_umask(path: Path) -> None:
    """Give a file the permissions of the user's umask, if the system allows it."""
    with contextlib.suppress(OSError), temporary_file(path, lambda temporary: None) as new:
        path.chmod(new.stat().st_mode)


def write_text(path: Path, text: str) -> None:
    """Write a text file with `write_atomic`."""
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def save_arrays(columns: Mapping[str, Any], path: Path) -> None:
    """Write an .npz file; not atomic."""
    import numpy as np

    with path.open("wb") as file:  # NumPy would append .npz to a path
        np.savez(file, **columns)


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors of any device and layout to a safetensors file with `write_atomic`; raise OSError if that fails."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        write_atomic(path, lambda temporary: save_file(dense, temporary, metadata))
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from None


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file."""
    from safetensors import SafetensorError, safe_open

    require_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from None
