"""Work on many images, part by part; parts are kept until all of it is done, so that none is done twice.

A command that was interrupted, and is typed again, takes up the parts that it finds. A part is known by a digest of all
that it depends on, our own sources included, and lies in the user's own cache: the folder of a run may come from a
stranger, and one for downloads ($LIPFLOW_DATA) may be shared.
"""

import contextlib
import hashlib
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import lipflow
from lipflow.commands.progress import through

if TYPE_CHECKING:
    from torch import Tensor

    Columns = dict[str, Tensor]

FORGOTTEN = 30 * 24 * 3600  # seconds after which a part will not be asked for any more


class Kept:
    """The parts of one piece of work, which depends on what `about` says, and on the rows that it is done for."""

    def __init__(self, about: str) -> None:
        import torch

        from lipflow.data.network import own_cache

        sha = hashlib.sha256(f"{about}, torch {torch.__version__}".encode())
        for source in sorted(Path(lipflow.__file__).parent.rglob("*.py")):
            sha.update(source.read_bytes())
        self.folder = own_cache() / "parts" / sha.hexdigest()

    def through(
        self, work: "Callable[..., Columns]", rows: "Sequence[Tensor]", size: int, verb: str, shown: bool = True
    ) -> "list[Columns]":
        """`work` of the rows of some tensors, `size` at a time, but for what an interrupted command has left behind."""
        import torch

        total = len(rows[0])
        parts = torch.arange(total).split(size)  # one, if it is empty
        paths = [self.folder / f"{_digest([t[part] for t in rows])}.safetensors" for part in parts]
        done = {path: columns for path in paths if (columns := _read(path)) is not None}
        left = [(part, path) for part, path in zip(parts, paths, strict=True) if path not in done]
        before = total - sum(len(part) for part, _ in left)
        if before and shown:
            print(f"{before} of {total} images were done before an interruption; going on")
        try:
            for part, path in zip(through([part for part, _ in left], verb, shown), [p for _, p in left], strict=True):
                done[path] = work(*(t[part] for t in rows))
                _keep(path, done[path])
                before += len(part)
        except KeyboardInterrupt:
            if before and shown:
                print(f"{before} of {total} images are kept: the same command goes on from there", file=sys.stderr)
            raise
        return [done[path] for path in paths]

    def forget(self) -> None:
        """Remove the parts, when what they were for is written; and those of others that nobody has come back to."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for other in self.folder.parent.glob("*"):
            with contextlib.suppress(OSError):
                if time.time() - other.stat().st_mtime > FORGOTTEN:
                    shutil.rmtree(other, ignore_errors=True)


def _digest(rows: "Sequence[Tensor]") -> str:
    sha = hashlib.sha256()
    for t in rows:
        sha.update(f"{t.dtype} {tuple(t.shape)}".encode())
        sha.update(t.numpy().tobytes())
    return sha.hexdigest()


def _read(path: Path) -> "Columns | None":
    """A part, if it is there and whole."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError):
        return None


def _keep(path: Path, columns: "Columns") -> None:
    """Write a part. If that fails, it is only done again some day: no reason to lose the others."""
    from lipflow.files import save_tensors, write_atomic

    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, lambda temporary: save_tensors(columns, temporary))
