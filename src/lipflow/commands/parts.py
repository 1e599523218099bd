"""Work on many images in parts, and resume after an interruption.

The result of each part is stored in the user's cache until all parts are done. The name of its file is a digest of
everything that it depends on, the source code of lipflow included. It is not stored in the folder of the run, which may
come from a stranger, nor in $LIPFLOW_DATA, which may be shared.
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
from lipflow.commands.terminal import with_progress_bar

if TYPE_CHECKING:
    from torch import Tensor

    Columns = dict[str, Tensor]

MAX_AGE_SECONDS = 30 * 24 * 3600  # of parts that no command has used


class PartCache:
    """The stored parts of one task. The text `about` describes everything on which a part depends, except its rows."""

    def __init__(self, about: str) -> None:
        import torch

        from lipflow.data.downloads import user_cache_dir

        sha = hashlib.sha256(f"{about}, torch {torch.__version__}".encode())
        for source in sorted(Path(lipflow.__file__).parent.rglob("*.py")):
            sha.update(source.read_bytes())
        self.folder = user_cache_dir() / "parts" / sha.hexdigest()

    def run(
        self, work: "Callable[..., Columns]", rows: "Sequence[Tensor]", chunk: int, verb: str, shown: bool = True
    ) -> "list[Columns]":
        """Call `work` on chunks of the rows of some tensors, except for chunks whose result is stored."""
        import torch

        total = len(rows[0])
        parts = torch.arange(total).split(chunk)  # one part, if there are no rows
        paths = [self._path([t[part] for t in rows]) for part in parts]
        results = {i: columns for i, path in enumerate(paths) if (columns := _read(path)) is not None}
        missing = [i for i in range(len(parts)) if i not in results]
        done = total - sum(len(parts[i]) for i in missing)
        if done and shown:
            print(f"{done} of {total} images were done before an interruption; continuing")
        try:
            for i, part in zip(missing, with_progress_bar([parts[i] for i in missing], verb, shown), strict=True):
                results[i] = work(*(t[part] for t in rows))
                _store(paths[i], results[i])
                done += len(part)
        except KeyboardInterrupt:
            if done and shown:
                print(f"{done} of {total} images are done; the same command continues from there", file=sys.stderr)
            raise
        return [results[i] for i in range(len(parts))]

    def clear(self) -> None:
        """Remove the parts of this task, and old parts of all others."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for other in self.folder.parent.glob("*"):
            with contextlib.suppress(OSError):
                if time.time() - other.stat().st_mtime > MAX_AGE_SECONDS:
                    shutil.rmtree(other, ignore_errors=True)

    def _path(self, rows: "Sequence[Tensor]") -> Path:
        sha = hashlib.sha256()
        for t in rows:
            sha.update(f"{t.dtype} {tuple(t.shape)}".encode())
            sha.update(t.numpy().tobytes())
        return self.folder / f"{sha.hexdigest()}.safetensors"


def _read(path: Path) -> "Columns | None":
    """Read the result of a part; None if it is missing or damaged."""
    from lipflow.files import read_tensors

    try:
        return read_tensors(path)[0]
    except (OSError, ValueError):
        return None


def _store(path: Path, columns: "Columns") -> None:
    """Store the result of a part. A failure is ignored: the part would only be computed again."""
    from lipflow.files import save_tensors

    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(columns, path)
