"""`lipflow report RUN…`: compare runs on an HTML page, in tables and in figures."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from lipflow.commands.terminal import print_contradictions, print_table

if TYPE_CHECKING:
    from lipflow.report.table import Summary


@dataclass(frozen=True)
class Report:
    """Compare runs on one page that opens offline: tables, curves, radii, images and certificates."""

    runs: tuple[Path, ...]
    """The folders of runs, or pretrained networks by name; folders without a run are left out."""
    out: Path = Path("report.html")
    """The file of the page."""
    names: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: those of their folders)")] = ()
    """The names of the runs, one each."""
    radii: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: of recipes, attacks and the paper)")] = ()
    """Radii of the tables, such as 36/255 0.5."""
    markdown: Path | None = None
    """Also write the table as Markdown, into this file."""
    figures: Path | None = None
    """Also write the curves as PNG and PDF, into this folder (needs matplotlib)."""


def report(arguments: Report) -> int:
    """Read and compare runs, write the page, and print the tables. Return 1 if an attack refutes a certificate."""
    from lipflow.files import write_text
    from lipflow.pretrained import folder_of
    from lipflow.report import figure
    from lipflow.report.consistency import contradictions
    from lipflow.report.page import page
    from lipflow.report.run_results import read_all
    from lipflow.report.table import markdown, summarise

    out, table, figures = arguments.out, arguments.markdown, arguments.figures
    _require_file("--out", out, "report.html")
    if table is not None:
        _require_file("--markdown", table, "report.md")
        if table.resolve() == out.resolve():
            raise ValueError(f"--out {out} and --markdown {table} are one file; give two")
    if figures is not None:
        figure.require_matplotlib()
        if figures.exists() and not figures.is_dir():
            raise ValueError(f"--figures {figures}: that is a file; give a folder")
    folders = tuple(folder_of(run) for run in arguments.runs)
    runs = read_all(folders if arguments.names else _with_runs(folders), arguments.names)  # names go by position
    for run in runs:
        if run.stale:
            print(f"lipflow: {run.name}: {run.missing[-1]}", file=sys.stderr)
    summary = summarise(runs, arguments.radii)
    found = [text for run in runs for text in contradictions(run)]
    write_text(out, page(runs, summary))
    if table is not None:
        write_text(table, markdown(summary, found))
    print_contradictions(found)
    show(summary)
    written = [] if table is None else [table]
    if figures is not None:
        written += figure.save(runs, summary, figures)
    for path in written:
        print(f"wrote {path}")
    print(f"wrote {out}: open it in a browser")
    return 1 if found else 0


def show(summary: "Summary") -> None:
    """Print one table per run, with one row per radius, and one for the networks of the paper; and notes below each."""
    for entry in (*summary.entries, *summary.paper):
        columns = [("radius", "0 (clean)", *summary.epsilons, "average radius")]
        columns += [(line.title, *line.values, line.average) for line in entry.lines]
        title, *rows = zip(*columns, strict=True)
        if not any(line.average for line in entry.lines):
            rows.pop()
        if entry.lines:
            print_table(title, rows, f"{entry.name}: {entry.about}")
        else:
            print(f"{entry.name}: {entry.about}")
        for note in entry.notes:
            print(f"{entry.name}: {note}")


def _with_runs(folders: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return the folders that hold a run, and name the others; if none does, return all, for an error later."""
    runs = tuple(folder for folder in folders if (folder / "run.json").is_file())
    if not runs:
        return folders
    for folder in folders:
        if folder not in runs:
            print(f"lipflow: left out {folder}: it holds no run.json", file=sys.stderr)
    return runs


def _require_file(flag: str, path: Path, example: str) -> None:
    """Raise if a file cannot be written at a path."""
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"{flag} {path}: that is a folder; give a file, such as {path / example}")
