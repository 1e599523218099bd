"""Work on many images in parts, with progress, and resume after an interruption.

The result of each part is stored in the user's cache until the whole work is done. A part is found again by a digest of
everything that it depends on, the source code of lipflow included. The folder of the run is not used for this, because
it may come from a stranger, nor is $LIPFLOW_DATA, because it may be shared.
"""

import contextlib
import hashlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import lipflow

if TYPE_CHECKING:
    from torch import Tensor

    Columns = dict[str, Tensor]

MAX_AGE_SECONDS = 30 * 24 * 3600  # of parts that no command has used


class PartCache:
    """The stored parts of one work, which depends on the text `about` and on the rows that it is done for."""

    def __init__(self, about: str) -> None:
        import torch

        from lipflow.data.network import own_cache

        sha = hashlib.sha256(f"{about}, torch {torch.__version__}".encode())
        for source in sorted(Path(lipflow.__file__).parent.rglob("*.py")):
            sha.update(source.read_bytes())
        self.folder = own_cache() / "parts" / sha.hexdigest()

    def run(
        self, work: "Callable[..., Columns]", rows: "Sequence[Tensor]", chunk: int, verb: str, shown: bool = True
    ) -> "list[Columns]":
        """Call `work` on chunks of the rows of some tensors, except for chunks whose result is stored."""
        import torch

        total = len(rows[0])
        parts = torch.arange(total).split(chunk)  # one part, if there are no rows
        paths = [self.folder / f"{_digest([t[part] for t in rows])}.safetensors" for part in parts]
        results = {path: columns for path in paths if (columns := _read(path)) is not None}
        left = [(part, path) for part, path in zip(parts, paths, strict=True) if path not in results]
        done = total - sum(len(part) for part, _ in left)
        if done and shown:
            print(f"{done} of {total} images were done before an interruption; continuing")
        progress = with_progress_bar([part for part, _ in left], verb, shown)
        try:
            for part, path in zip(progress, [path for _, path in left], strict=True):
                results[path] = work(*(t[part] for t in rows))
                _store(path, results[path])
                done += len(part)
        except KeyboardInterrupt:
            if done and shown:
                print(f"{done} of {total} images are done; the same command continues from there", file=sys.stderr)
            raise
        return [results[path] for path in paths]

    def clear(self) -> None:
        """Remove the parts of this work, and old parts of any other."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for other in self.folder.parent.glob("*"):
            with contextlib.suppress(OSError):
                if time.time() - other.stat().st_mtime > MAX_AGE_SECONDS:
                    shutil.rmtree(other, ignore_errors=True)


def with_progress_bar(parts: "Sequence[Tensor]", verb: str, shown: bool = True) -> "Iterator[Tensor]":
    """Iterate over parts, each a tensor of indices of images; show a bar on a terminal, and lines elsewhere."""
    if not shown or len(parts) < 2:
        yield from parts
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from lipflow.train.writer import with_progress

    console = Console()
    if not console.is_terminal:
        yield from with_progress(parts, verb, lambda line: print(line, flush=True))
        return
    with Progress(BarColumn(), TextColumn("{task.description}"), console=console, transient=True) as bar:
        task = bar.add_task(verb, total=sum(map(len, parts)))
        for part in with_progress(parts, verb, lambda line: bar.update(task, description=line), seconds=0.0):
            yield part
            bar.advance(task, len(part))


def _digest(rows: "Sequence[Tensor]") -> str:
    sha = hashlib.sha256()
    for t in rows:
        sha.update(f"{t.dtype} {tuple(t.shape)}".encode())
        sha.update(t.numpy().tobytes())
    return sha.hexdigest()


def _read(path: Path) -> "Columns | None":
    """Read the result of a part; None if it is missing or damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError):
        return None


def _store(path: Path, columns: "Columns") -> None:
    """Store the result of a part. A failure is ignored: the part would only be computed again."""
    from lipflow.files import save_tensors, write_atomic

    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, lambda temporary: save_tensors(columns, temporary))
