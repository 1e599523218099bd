"""How far a command is that works through images: a bar on a terminal, a line now and then anywhere else."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def through(parts: Sequence["Tensor"], verb: str, shown: bool = True) -> Iterator["Tensor"]:
    """The parts, each a tensor of indices of images; with the rate so far and the time that remains, if `shown`."""
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
