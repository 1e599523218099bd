"""Mutants: mistakes that make certificates unsound. Each is put into a copy of the source, and some test must fail.

python tests/mutants.py            all of them, and a table for docs/mutants.md
python tests/mutants.py slack std  those with one of these words in their name

tests/mutants.txt states them: a call of pytest, and mistakes that its tests must notice, each with its file in
src/lipflow, its name, and the text that is replaced (-) by another (+), or removed.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MUTANT = re.compile(r"^(\S+): (.+)\n((?: {4}.*\n)+)", re.MULTILINE)
EDIT = re.compile(r"((?: {4}- .*\n)+)((?: {4}\+ .*\n)*)")


class Edit(NamedTuple):
    """One replacement in a file of src/lipflow; the old text must occur exactly once."""

    file: str
    old: str
    new: str


class Mutant(NamedTuple):
    """A mistake, its edits, and arguments of pytest that select the tests that must fail."""

    name: str
    edits: list[Edit]
    tests: list[str]


def read(text: str) -> list[Mutant]:
    mutants: dict[str, Mutant] = {}
    for group in text.split("\n\n"):
        tests = shlex.split(group.splitlines()[0])[1:]
        for file, name, edits in MUTANT.findall(f"{group}\n"):
            mutant = mutants.setdefault(name, Mutant(name, [], tests))
            mutant.edits.extend(Edit(file, _unmarked(old), _unmarked(new)) for old, new in EDIT.findall(edits))
    return list(mutants.values())


def _unmarked(lines: str) -> str:
    return "\n".join(line[6:] for line in lines.splitlines())


MUTANTS = read((ROOT / "tests" / "mutants.txt").read_text())


class Result(NamedTuple):
    """The first test that failed on a mutant; None if the mutant survived."""

    mutant: str
    red: str | None
    seconds: float


def main(words: list[str]) -> int:
    """Run the mutants whose name contains one of the words; return 1 if one survives."""
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        scratch = Path(folder)
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, scratch / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", scratch)
        results, green = [], []
        for mutant in chosen:
            results.append(_run(scratch, mutant, green))
            print(f"{'survived' if results[-1].red is None else 'killed':9}{mutant.name}", file=sys.stderr, flush=True)
    print(table(results))
    return int(any(result.red is None for result in results) or not results)


def _run(scratch: Path, mutant: Mutant, green: list[list[str]]) -> Result:
    """Check that the tests pass on the source, and return the first that fails on the mutant."""
    start = time.monotonic()
    if mutant.tests not in green:
        before = _pytest(scratch, mutant.tests)
        if before is not None:
            raise SystemExit(f"{mutant.name}: {before} is red without any mutation")
        green.append(mutant.tests)
    files = {edit.file: scratch / "src" / "lipflow" / edit.file for edit in mutant.edits}
    originals = {file: path.read_text() for file, path in files.items()}
    try:
        for edit in mutant.edits:
            text = files[edit.file].read_text()
            if text.count(edit.old) != 1:
                raise SystemExit(f"{mutant.name}: {edit.file} has {text.count(edit.old)} places like {edit.old!r}")
            files[edit.file].write_text(text.replace(edit.old, edit.new))
        red = _pytest(scratch, mutant.tests)
    finally:
        for file, text in originals.items():
            files[file].write_text(text)
    return Result(mutant.name, red, time.monotonic() - start)


def _pytest(scratch: Path, arguments: list[str]) -> str | None:
    """The first test that fails, or None if all pass. It is an error if no test runs."""
    environment = dict(os.environ, PYTHONPATH=str(scratch / "src"), PYTHONDONTWRITEBYTECODE="1")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tb=no", "-rfE", *arguments]
    done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    red = re.search(r"^FAILED (\S+?::.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode == 1 and red is None:
        raise SystemExit(f"pytest {' '.join(arguments)} did not run:\n{done.stdout}{done.stderr}")
    return red.group(1) if red else None


def table(results: list[Result]) -> str:
    """The results as a table in Markdown."""
    lines = [
        f"| {r.mutant} | {'**survived**' if r.red is None else f'`{r.red}`'} | {r.seconds:.0f} s |" for r in results
    ]
    killed = sum(r.red is not None for r in results)
    head = ["| mutant | first test that turned red | time |", "|---|---|---|"]
    return "\n".join([*head, *lines, "", f"{killed} of {len(results)} mutants killed."])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
