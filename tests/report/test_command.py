"""`lipflow report`: what it writes, prints and refuses."""

import json
import re
from pathlib import Path

import pytest

from lipflow import cli
from tests.report.conftest import change_json


def test_report(original, run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (run / "attack.json").unlink()
    words = ["report", str(original), str(run), "--names", "whole", "[b]part", "--out", str(tmp_path / "r.html")]
    words += ["--markdown", str(tmp_path / "r.md"), "--figures", str(tmp_path / "figures"), "--radii", "0.1", "0.5"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "whole: cpl-digits on digits, seed 0" in said
    assert "[b]part: not attacked yet: lipflow attack" in said
    assert said.endswith(f"wrote {tmp_path / 'r.html'}: open it in a browser\n")
    table = said[said.index("radius") :].splitlines()
    assert [re.split(r"[│┃]", line)[1].strip() for line in table if "│" in line][:4] == [
        "0 (clean)",
        "0.1",
        "0.5",
        "average radius",
    ]
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert "| **whole** | certified |" in (tmp_path / "r.md").read_text()
    assert (tmp_path / "figures" / "accuracy.pdf").is_file()


def test_a_contradiction_is_an_error(run, tmp_path, capsys):
    standing = json.loads((run / "attack.json").read_text())["robust"]
    change_json(run / "attack.json", robust={eps: [False] * len(flags) for eps, flags in standing.items()})
    out = tmp_path / "r.html"
    assert cli.main(["report", str(run), "--out", str(out)]) == 1
    err = capsys.readouterr().err
    assert "CONTRADICTION: tiny: " in err
    assert "yet broken there by an attack" in err
    assert "Contradiction" in out.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["RUN", "RUN"], "two runs are called 'tiny'"),
        (["OUT"], "OUT holds no run: there is no OUT/run.json"),
        (["OUT/nowhere"], "there is no folder OUT/nowhere, here or in runs/"),
        (["RUN", "--out", "OUT/no/r.html"], "--out OUT/no/r.html: there is no folder OUT/no"),
        (["RUN", "--out", "OUT"], "--out OUT: that is a folder"),
        (["RUN", "--markdown", "OUT/no/r.md"], "--markdown OUT/no/r.md: there is no folder OUT/no"),
        (["RUN", "--out", "OUT/r", "--markdown", "OUT/../o/r"], "and --markdown OUT/../o/r are one file; give two"),
        (["RUN", "OUT/nowhere"], "there is no folder OUT/nowhere, here or in runs/"),
        (["RUN", "OUT", "--names", "a", "b"], "OUT holds no run"),
        (["RUN", "--figures", "RUN/run.json"], "RUN/run.json: that is a file; give a folder"),
        (["RUN", "--radii", "wide"], "a radius is a number such as 36/255 or 0.25, not 'wide'"),
        (["RUN", "--radii", "1e400"], "a radius is at most 1000000, its exponent within ±300, not '1e400'"),
        (["RUN", "--names", "a", "b"], "--names takes one name per run: 1 runs, 2 names"),
    ],
)
def test_a_mistake_is_answered_in_one_line(original, tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)

    def place(text: str) -> str:
        return text.replace("RUN", str(original)).replace("OUT", str(tmp_path / "o"))

    (tmp_path / "o").mkdir()
    assert cli.main(["report", *map(place, words)]) == 2
    out, err = capsys.readouterr()
    assert place(said) in err
    assert err.startswith("lipflow: ")
    assert err.count("\n") == 1
    assert not out
    assert [p for p in Path(tmp_path).rglob("*") if p.is_file()] == []


def test_folders_without_a_run_are_passed_over(original, tmp_path, capsys):
    """`lipflow report runs/*`: a folder of other things, or a file, is named and left out."""
    (tmp_path / "other").mkdir()
    (tmp_path / "notes.txt").write_text("")
    words = [str(tmp_path / "notes.txt"), str(original), str(tmp_path / "other")]
    assert cli.main(["report", *words, "--out", str(tmp_path / "r.html")]) == 0
    out, err = capsys.readouterr()
    assert "tiny: cpl-digits on digits" in out
    assert err.splitlines() == [
        f"lipflow: passed over {tmp_path / name}: it holds no run.json" for name in ("notes.txt", "other")
    ]


def test_an_attack_on_another_certificate_is_left_out(run, tmp_path, capsys):
    change_json(run / "attack.json", certificate="of another one")
    assert cli.main(["report", str(run), "--out", str(tmp_path / "r.html")]) == 0
    out, err = capsys.readouterr()
    said = f"tiny: attack.json is of another certificate and is not shown: lipflow attack {run}"
    assert err == f"lipflow: {said}\n"
    assert "under attack" not in out
    page = (tmp_path / "r.html").read_text()
    assert "attack.json is of another certificate and is not shown" in page
    assert "Nothing was compared</b>: tiny (its attack is of another certificate)" in page
