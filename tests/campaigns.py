"""Results of the campaigns: each campaign writes its row and its source, and the page is made from the rows.

docs/campaigns.json    the rows
docs/campaigns.md      the page; `python tests/campaigns.py` writes it again
"""

import json
import os
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any

from experiments.provenance import provenance, short

ROOT = Path(__file__).resolve().parents[1]
ROWS, PAGE = "campaigns.json", "campaigns.md"
CLIENTS = ("numpy", "foolbox", "pyautoattack", "torchattacks")

TEXT = """\
# Campaigns

Long searches for a wrong certificate: two images with different labels whose exact distance is below the certified
radius of one of them; or a value, of lipflow or of the checker, that differs from the exact one by more than its bound.
`make campaign` runs them, prints the results and writes this page; `make test` runs a smaller search of each kind. Each
search has a control, the same attack where nothing is certified, which must succeed: it shows that the attack is strong
enough.

| campaign | what was done | violations | control |
|---|---|---|---|
{rows}

Where no network is named, it is `cpl-digits`, trained by `tests/soundness/conftest.py` in a few seconds, and the images
are handwritten digits that it was not trained on. Each row holds for the commit that it names; later commits have
passed the smaller searches.

## Sources

{sources}
"""


def folder() -> Path:
    return Path(os.environ.get("LIPFLOW_CAMPAIGNS", ROOT / "docs"))


def write(name: str, test: str, seconds: float, *, done: str, violations: int, control: str) -> None:
    """Write a row of a campaign whose control succeeded, in place of an earlier one, and write the page again."""
    path = folder() / ROWS
    rows = json.loads(path.read_text()) if path.is_file() else {}
    rows[name] = dict(done=done, violations=violations, control=control, source=_source(test, round(seconds)))
    path.write_text(json.dumps(dict(sorted(rows.items())), indent=1, ensure_ascii=False) + "\n")
    (folder() / PAGE).write_text(page(rows))


def page(rows: dict[str, Any]) -> str:
    lines = [f"| {name} | {r['done']} | {r['violations']} | {r['control']} |" for name, r in sorted(rows.items())]
    sources = [f"- **{name}**: {_words(r['source'])}" for name, r in sorted(rows.items())]
    return TEXT.format(rows="\n".join(lines), sources="\n".join(sources))


def _source(test: str, seconds: int) -> dict[str, Any]:
    known = provenance(shlex.join(["pytest", "-m", "campaign", "-k", test, "tests/soundness"]))
    versions = {name: known[name] for name in ("lipflow", "python", "torch")}
    installed = {found.name: found.version for found in metadata.distributions()}
    versions |= {name: installed[name] for name in CLIENTS if name in installed}
    return dict(
        command=known["command"],
        seconds=seconds,
        date=known["day"],
        machine=known["machine"],
        commit=short(known["commit"]),
        versions=versions,
    )


def _words(source: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items())
    return (
        f"`{source['command']}`; {source['seconds']:,} s on {source['machine']}, {source['date']}; "
        f"commit {source['commit']}; {versions}"
    )


if __name__ == "__main__":
    (folder() / PAGE).write_text(page(json.loads((folder() / ROWS).read_text())))
