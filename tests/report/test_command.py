"""`lipflow report`: what it writes, prints and refuses."""

import json
import re

import pytest

from lipflow import cli
from tests.report.conftest import change_json


def report(*words: object) -> int:
    return cli.main(["report", *map(str, words)])


def test_report_writes_the_page_the_table_and_the_figures(original, run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (run / "attack.json").unlink()
    out, markdown, figures = (tmp_path / name for name in ("r.html", "r.md", "figures"))
    words = ["--out", out, "--markdown", markdown, "--figures", figures, "--radii", "0.1", "0.5"]
    assert report(original, run, "--names", "whole", "[b]part", *words) == 0
    printed = capsys.readouterr().out
    assert "whole: cpl-digits on digits, seed 0" in printed
    assert "[b]part: not attacked yet: lipflow attack" in printed
    assert printed.endswith(f"wrote {out}: open it in a browser\n")
    cells = [line.split("│")[1].strip() for line in printed.splitlines() if "│" in line]
    assert cells[:4] == ["0 (clean)", "0.1", "0.5", "average radius"]
    assert out.read_text().startswith("<!doctype html>")
    assert "| **whole** | certified |" in markdown.read_text()
    assert (figures / "accuracy.pdf").is_file()


def test_a_contradiction_has_exit_code_1(run, tmp_path, capsys):
    robust = json.loads((run / "attack.json").read_text())["robust"]
    change_json(run / "attack.json", robust={eps: [False] * len(flags) for eps, flags in robust.items()})
    out, markdown = tmp_path / "r.html", tmp_path / "r.md"
    assert report(run, "--out", out, "--markdown", markdown) == 1
    assert "CONTRADICTION: tiny: " in capsys.readouterr().err
    assert all("Contradiction" in path.read_text() for path in (out, markdown))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "give the folders"),
        ("RUN RUN", "two runs are called 'tiny'"),
        ("RUN RUN --names a a", "two runs are called 'a'"),
        ("OUT", "OUT holds no run"),
        ("RUN OUT/nowhere", "there is no folder OUT/nowhere"),
        ("RUN OUT --names a b", "OUT holds no run"),
        ("RUN --out OUT/no/r.html", "--out OUT/no/r.html: there is no folder OUT/no"),
        ("RUN --out OUT", "--out OUT: that is a folder; give a file, such as OUT/report.html"),
        ("RUN --markdown OUT", "--markdown OUT: that is a folder; give a file, such as OUT/report.md"),
        ("RUN --markdown OUT/no/r.md", "--markdown OUT/no/r.md: there is no folder OUT/no"),
        ("RUN --out OUT/r --markdown OUT/../o/r", "are one file"),
        ("RUN --figures RUN/run.json", "that is a file"),
        ("RUN --radii wide", "not 'wide'"),
        ("RUN --radii 1e400", "not '1e400'"),
        ("RUN --names a b", "1 runs, 2 names"),
    ],
)
def test_a_mistake_is_answered_in_one_line_before_any_work(original, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "o").mkdir()

    def replaced(text: str) -> str:
        return text.replace("RUN", str(original)).replace("OUT", str(tmp_path / "o"))

    assert report(*map(replaced, words.split())) == 2
    out, err = capsys.readouterr()
    assert not out
    assert re.fullmatch(rf"lipflow: .*{re.escape(replaced(message))}.*\n", err)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_folders_without_a_run_are_left_out(original, tmp_path, capsys):
    """As in `lipflow report runs/*`."""
    (tmp_path / "other").mkdir()
    (tmp_path / "notes.txt").touch()
    assert report(tmp_path / "notes.txt", original, tmp_path / "other", "--out", tmp_path / "r.html") == 0
    out, err = capsys.readouterr()
    assert "tiny: cpl-digits on digits" in out
    assert [line.split(":")[1] for line in err.splitlines()] == [
        f" left out {tmp_path / name}" for name in ("notes.txt", "other")
    ]


def test_an_attack_on_another_certificate_is_left_out(run, tmp_path, capsys):
    change_json(run / "attack.json", certificate="of another one", steps="not read")
    assert report(run, "--out", tmp_path / "r.html") == 0
    out, err = capsys.readouterr()
    message = "attack.json is of another certificate and is not shown"
    assert err == f"lipflow: tiny: {message}: lipflow attack {run}\n"
    assert "under attack" not in out
    page = (tmp_path / "r.html").read_text()
    assert message in page
    assert "Nothing was compared</b>: tiny (its attack is of another certificate)" in page
