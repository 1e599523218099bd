"""Files that are whole or not there, and that those may read whom the user's umask lets."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file of this process, sync it to the disk, and give it its name in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # what the user's umask says; safetensors makes files that no one else can read
        write(temporary)
        temporary.chmod(mode)
        with temporary.open("r+b") as file:  # Windows syncs only what it may write
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # a folder cannot be synced on every system
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
