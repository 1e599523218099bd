"""The page of certified accuracy per minute, from numbers: what is not run is said, and nothing is made up."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from experiments import fast
from experiments.fast_page import finished
from experiments.scale import GRID
from lipflow import cli
from lipflow.commands.train import chosen
from lipflow.report.published import EPSILONS
from lipflow.train.loop import train
from lipflow.train.recipe import CPL_FAST
from tests.train.tiny import tiny

ROOT = Path(__file__).parents[2]


def one(clean: float, certified: float) -> dict:
    return {
        "seconds": 1500.0,
        "recorded": {"commit": "a" * 40, "lipflow": "0", "torch": "0", "threads": 2, "processor": "P"},
        "clean": clean,
        "certified": dict.fromkeys(GRID, certified),
        "epochs": 3.14,
        "steps": 1000,
        "on_the_way": [[1.0, 0.3, 0.2], [30.0, clean, certified]],
    }


def test_the_table_has_means_and_spreads_and_says_what_was_not_run():
    lost = {"run": "x", "diverged": True}
    rows = {row.title: [] for row in fast.ROWS} | {"cpl-fast, 30m": [one(0.7, 0.5), one(0.72, 0.54)]}
    page = fast.told(rows | {"soc-10, 30m": [lost]})
    assert "| cpl-fast, 30m | 2 of 3 | 25.0 | 3.14 | 71.0 ± 1.4 | 52.0 ± 2.8 | 52.0 ± 2.8 | 52.0 ± 2.8 |" in page
    assert page.count("not run") == len(fast.ROWS) - 2
    assert "| soc-10, 30m | diverged |" in page
    assert "| *CPL-S, published* | | | 200 | *75.6* | *62.3* | *46.9* | *32.2* |" in page
    assert "Trained at commit aaaaaaaaaaaa, lipflow 0, torch 0, with 2 threads a run on P." in page
    columns = {line.count("|") for line in page.splitlines() if line.startswith("|")}
    assert columns == {9}
    assert "| 2 of 3, 1 diverged |" in fast.told(rows | {"cpl-fast, 30m": [one(0.7, 0.5), one(0.7, 0.5), lost]})
    assert "| cpl-fast, 30m | 3 |" in fast.told(rows | {"cpl-fast, 30m": [one(0.7, 0.5)] * 3})


def test_attacks_stand_beside_what_is_certified_of_the_same_images():
    attacked = {"attacked_images": 50, "attacked": {"36/255": 0.6}, "certified_of_attacked": {"36/255": 0.55}}
    auto = {"epsilon": "36/255", "images": 20, "clean": 0.7, "standing": 0.58, "certified": 0.56}
    rows = {row.title: [] for row in fast.ROWS} | {
        "cpl-fast, 2h": [{**one(0.7, 0.5), "run": "r", **attacked, "autoattack": auto}]
    }
    page = fast.told(rows)
    assert "- `r` under L2-PGD, first 50 test images: 60.0 at 36/255 (certified 55.0)." in page
    assert "- `r` under AutoAttack, first 20 test images: 58.0 at 36/255 (certified 56.0, clean 70.0)." in page


def test_the_figure_has_every_row(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    legends = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *_, **__: legends.append(self.axes[0]))
    fast.draw({row.title: [one(0.7, 0.5)] * row.seeds for row in fast.ROWS}, tmp_path / "fast.png")
    assert legends[0].get_legend_handles_labels()[1] == [row.title for row in fast.ROWS]


def test_what_was_written_down_stays_where_its_run_is_not_here(tmp_path):
    runs = [replace(run, out=tmp_path / run.folder.name) for run in fast.ROWS[0].runs(None)]
    stored = [{"run": "cpl-fast-30m-2"}, {"run": "cpl-fast-30m-0"}, {"run": "another"}]
    assert [result["run"] for result in fast.known(runs, stored)] == ["cpl-fast-30m-0", "cpl-fast-30m-2"]
    assert fast.known(runs, []) == []


def test_the_page_and_the_readme_are_of_the_stored_numbers():
    stored = json.loads((ROOT / fast.RESULT).read_text())
    assert (ROOT / fast.PAGE).read_text() == fast.told(stored["rows"], stored["shipped"])
    readme = (ROOT / "README.md").read_text()
    told = {
        "**cpl-fast, 30 minutes on two cores**": "cpl-fast, 30m",
        "**cpl-fast, two hours on two cores**": "cpl-fast, 2h, erased",
        "CPL-S by its own recipe, 30 minutes on two cores": "cpl-s, 30m",
        "Cayley (KW3) by its own recipe, 30 minutes on two cores": "cayley-kw3, 30m",
        "SOC-10 by its own recipe, 30 minutes on two cores": "soc-10, 30m",
    }
    for words, title in told.items():
        runs = finished(stored["rows"][title])
        if not runs:
            assert f"| {words} |" not in readme
            continue
        every = [[run["clean"], *(run["certified"][eps] for eps in EPSILONS)] for run in runs]
        means = " | ".join(f"{100 * mean(column):.1f}" for column in zip(*every, strict=True))
        assert f"| {words} | {means} |" in readme
    assert f"certifies **{100 * stored['shipped']['certified']['36/255']:.1f}%** of the test images" in readme


def test_runs_are_the_commands_that_the_page_shows(capsys):
    runs = [run for row in fast.ROWS for run in row.runs(None)]
    assert [run.folder.name for run in runs][:2] == ["cpl-fast-30m-0", "cpl-fast-30m-1"]
    page = fast.told({row.title: [] for row in fast.ROWS})
    commands = [line.strip().split() for line in page.splitlines() if line.startswith("    lipflow train")]
    ours = [row.runs(None)[0] for row in fast.ROWS if row.model == "cpl-fast"]
    assert len(commands) == len(ours)
    for (_, _, *words), run in zip(commands, ours, strict=True):
        asked = chosen(cli.parse("train", words))
        assert replace(asked, out=run.out) == run
    assert runs[0].recipe == CPL_FAST
    assert 0 not in {run.validation_images for run in runs}, "images are held out, so that recipes can be compared"
    assert len({run.folder for run in runs}) == len(runs)
    assert fast.main(["--list"]) == 0
    assert "cayley-kw3-30m-0" in capsys.readouterr().out


def test_another_run_in_the_folder_of_a_row_is_not_published(tmp_path, monkeypatch):
    run = replace(tiny(tmp_path / "r", epochs=1), certify_validation=0)
    train(run)
    monkeypatch.setattr(fast, "measured", lambda run: {"run": run.folder.name})
    assert fast.known([run], []) == [{"run": "r"}]
    with pytest.raises(ValueError, match=r"holds another run than its row: --seed 7 \(the run has 0\); move it"):
        fast.known([replace(run, seed=7)], [])
