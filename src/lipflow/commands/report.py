"""`lipflow report RUN…`: what runs have to show, as a page, tables and figures."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lipflow.report.table import Summary


@dataclass(frozen=True)
class Report:
    """Compare runs on one page that opens offline: tables, curves, radii, images and certificates."""

    runs: tuple[Path, ...]
    """The folders of runs, or pretrained networks by name; what a run lacks is said, other folders are left out."""
    out: Path = Path("report.html")
    """The page."""
    names: tuple[str, ...] = ()
    """What to call the runs, one name each (default: their folders' names)."""
    radii: tuple[str, ...] = ()
    """Radii of the tables, such as 36/255 0.5 (default: all that the runs speak of)."""
    markdown: Path | None = None
    """Write the table as Markdown too, into this file."""
    figures: Path | None = None
    """Write the curves as PNG and PDF too, into this folder (needs matplotlib)."""


def report(arguments: Report) -> int:
    """Read, compare, write, and print the table; certified ≤ attacked ≤ clean, or something is wrong (1)."""
    from lipflow.files import write_atomic
    from lipflow.pretrained import folder_of
    from lipflow.report import figure
    from lipflow.report.consistency import contradictions
    from lipflow.report.page import page
    from lipflow.report.run_results import read_all
    from lipflow.report.table import markdown, summarise

    for flag, path in (("--out", arguments.out), ("--markdown", arguments.markdown)):
        if path is not None:
            _require_place(flag, path)
    if arguments.markdown is not None and arguments.markdown.resolve() == arguments.out.resolve():
        raise ValueError(f"--out {arguments.out} and --markdown {arguments.markdown} are one file; give two")
    if arguments.figures is not None:
        figure.require_matplotlib()
        if arguments.figures.exists() and not arguments.figures.is_dir():
            raise ValueError(f"--figures {arguments.figures}: that is a file; give a folder")
    folders = tuple(folder_of(run) for run in arguments.runs)
    runs = read_all(folders if arguments.names else _with_runs(folders), arguments.names)  # names go by position
    for run in runs:
        if run.stale:
            print(f"lipflow: {run.name}: {run.missing[-1]}", file=sys.stderr)
    summary = summarise(runs, arguments.radii)
    wrong = [text for run in runs for text in contradictions(run)]
    texts = {arguments.out: page(runs, summary)}
    if arguments.markdown is not None:
        texts[arguments.markdown] = markdown(summary, wrong)
    for path, text in texts.items():
        write_atomic(path, lambda temporary, text=text: temporary.write_text(text, encoding="utf-8"))
    for text in wrong:  # before anything else can go wrong
        print(f"CONTRADICTION: {text}", file=sys.stderr)
    if wrong:
        print("a certificate and an attack cannot both be right: run `lipflow check`, and report it", file=sys.stderr)
    show(summary)
    written = [arguments.markdown] if arguments.markdown is not None else []
    if arguments.figures is not None:
        written += figure.save(runs, summary, arguments.figures)
    for path in written:
        print(f"wrote {path}")
    print(f"wrote {arguments.out}: open it in a browser")
    return 1 if wrong else 0


def show(summary: "Summary") -> None:
    """Print a table for each run, ε down, what was proved and what an attack left across; then one of the paper."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for entry in (*summary.entries, *summary.paper):
        title = Text(f"{entry.name}: {entry.about}")  # a name is text, whatever brackets are in it
        table = Table("radius", title=title)
        for line in entry.lines:
            table.add_column(Text(line.title))
        for row, name in enumerate(("0 (clean)", *summary.epsilons)):
            table.add_row(name, *(line.values[row] for line in entry.lines))
        if any(line.average for line in entry.lines):
            table.add_row("average radius", *(line.average for line in entry.lines))
        console.print(table if entry.lines else title)
        for remark in (*entry.notes, *entry.remarks):
            console.print(Text(f"{entry.name}: {remark}"), soft_wrap=True)


def _with_runs(folders: tuple[Path, ...]) -> tuple[Path, ...]:
    """Those that hold a run, and a word on the others; all of them if none does, to be refused."""
    empty = [folder for folder in folders if not (folder / "run.json").is_file()]
    if len(empty) == len(folders):
        return folders
    for folder in empty:
        print(f"lipflow: passed over {folder}: it holds no run.json", file=sys.stderr)
    return tuple(folder for folder in folders if folder not in empty)


def _require_place(flag: str, path: Path) -> None:
    """Refuse a place that cannot be written to before any work is done."""
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"{flag} {path}: that is a folder; give a file, such as {path / 'report.html'}")
