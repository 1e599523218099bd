"""How far a command is that works through images: a bar on a terminal, a line now and then anywhere else."""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lipflow.train.progress import images_pace

if TYPE_CHECKING:
    from torch import Tensor

EVERY = 10.0  # seconds between two lines


def through(parts: Sequence["Tensor"], verb: str, shown: bool = True) -> Iterator["Tensor"]:
    """The parts, each a tensor of indices of images; with the rate so far and the time that remains, if `shown`."""
    total, done, began = sum(map(len, parts)), 0, time.monotonic()
    if not shown or len(parts) < 2:
        yield from parts
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console, said = Console(), began
    bar = Progress(
        BarColumn(), TextColumn("{task.description}"), console=console, transient=True, disable=not console.is_terminal
    )
    with bar:
        task = bar.add_task(verb, total=total)
        for part in parts:
            yield part
            done += len(part)
            now = time.monotonic()
            line = images_pace(verb, done, total, now - began)
            bar.update(task, completed=done, description=line)
            if not console.is_terminal and now - said >= EVERY and done < total:
                print(line, flush=True)
                said = now
