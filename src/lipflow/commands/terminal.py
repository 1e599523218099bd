"""Tables, contradictions and progress in the terminal."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]], title: str | None = None) -> None:
    """Print a table. Strings are not read as markup of rich, as the name of a run may contain it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=None if title is None else Text(title))
    for column in columns:
        table.add_column(Text(column))
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def print_contradictions(found: Sequence[str]) -> None:
    """Print where an attack refutes a certificate."""
    for text in found:
        print(f"CONTRADICTION: {text}", file=sys.stderr)
    if found:
        print("a certificate or an attack is wrong: run `lipflow check`, and report the bug", file=sys.stderr)


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
