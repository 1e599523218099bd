"""docs/fast.md, the page of certified accuracy per minute, and the runs behind it."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from experiments import fast
from experiments.fast_page import finished
from experiments.scale import CERTIFIED_RADII
from lipflow import cli
from lipflow.commands.train import chosen
from lipflow.report.published import EPSILONS
from lipflow.train.loop import train
from lipflow.train.recipe import CPL_FAST
from tests.train.tiny import tiny

ROOT = Path(__file__).parents[2]
EMPTY = {row.title: [] for row in fast.ROWS}
RECORDED = {"commit": "a" * 40, "lipflow": "0", "torch": "0", "threads": 2, "processor": "P"}


def one(clean: float, certified: float, **more) -> dict:
    accuracies = {
        "clean": clean,
        "certified": dict.fromkeys(CERTIFIED_RADII, certified),
        "on_the_way": [[30.0, clean, certified]],
    }
    return {"seconds": 1500.0, "epochs": 3.14, "steps": 1000, "recorded": RECORDED, **accuracies, **more}


def test_the_table_has_means_spreads_and_rows_that_were_not_run():
    lost = {"run": "x", "diverged": True}
    rows = EMPTY | {"cpl-fast, 30m": [one(0.7, 0.5), one(0.72, 0.54)]}
    page = fast.text_of(rows | {"soc-10, 30m": [lost]})
    assert "| cpl-fast, 30m | 2 of 3 | 25.0 | 3.14 | 71.0 ± 1.4 | 52.0 ± 2.8 | 52.0 ± 2.8 | 52.0 ± 2.8 |" in page
    assert page.count("not run") == len(fast.ROWS) - 2
    assert "| soc-10, 30m | diverged |" in page
    assert "| *CPL-S, published* | | | 200 | *75.6* | *62.3* | *46.9* | *32.2* |" in page
    assert "| *CPL-S, published* | | | 200 | *44.0* | *29.9* | *19.1* | *11.0* |" in page.split("## CIFAR-100")[1]
    assert "Trained at commit aaaaaaaaaaaa, lipflow 0, torch 0, with 2 threads a run on P." in page
    assert {line.count("|") for line in page.splitlines() if line.startswith("|")} == {9}
    assert "| 2 of 3, 1 diverged |" in fast.text_of(rows | {"cpl-fast, 30m": [one(0.7, 0.5), one(0.7, 0.5), lost]})
    assert "| cpl-fast, 30m | 3 |" in fast.text_of(rows | {"cpl-fast, 30m": [one(0.7, 0.5)] * 3})


def test_the_page_has_accuracy_under_attack_and_certified_accuracy_of_the_same_images():
    attacked = {"attacked_images": 50, "attacked": {"36/255": 0.6}, "certified_of_attacked": {"36/255": 0.55}}
    auto = {"epsilon": "36/255", "images": 20, "clean": 0.7, "standing": 0.58, "certified": 0.56}
    page = fast.text_of(EMPTY | {"cpl-fast, 2h": [one(0.7, 0.5, run="r", autoattack=auto, **attacked)]})
    assert "- `r` under L2-PGD, first 50 test images: 60.0 at 36/255 (certified 55.0)." in page
    assert "- `r` under AutoAttack, first 20 test images: 58.0 at 36/255 (certified 56.0, clean 70.0)." in page


def test_known_keeps_the_stored_numbers_of_runs_on_other_machines(tmp_path):
    runs = [replace(run, out=tmp_path / run.folder.name) for run in fast.ROWS[0].runs(None)]
    stored = [{"run": "cpl-fast-30m-2"}, {"run": "cpl-fast-30m-0"}, {"run": "another"}]
    assert [result["run"] for result in fast.known(runs, stored)] == ["cpl-fast-30m-0", "cpl-fast-30m-2"]


def test_known_raises_on_another_run_in_the_folder_of_a_row(tmp_path, monkeypatch):
    run = replace(tiny(tmp_path / "r", epochs=1), certify_validation=0)
    train(run)
    monkeypatch.setattr(fast, "measured", lambda run: {"run": run.folder.name})
    assert fast.known([run], []) == [{"run": "r"}]
    with pytest.raises(ValueError, match=r"--seed 7 \(the run has 0\)"):
        fast.known([replace(run, seed=7)], [])


def test_the_page_and_the_readme_have_the_stored_numbers():
    stored = json.loads((ROOT / fast.RESULT).read_text())
    assert (ROOT / fast.PAGE).read_text() == fast.text_of(stored["rows"], stored["shipped"])
    readme = (ROOT / "README.md").read_text()
    for title, runs in stored["rows"].items():
        if runs and title != "cpl-fast, 2h":  # the README has the later recipe for two hours
            every = [[run["clean"], *(run["certified"][eps] for eps in EPSILONS)] for run in finished(runs)]
            means = " | ".join(f"{100 * mean(column):.1f}" for column in zip(*every, strict=True))
            assert f" | {means} |" in readme
    assert (
        f"certifies **{100 * stored['shipped']['cpl-fast-cifar10']['certified']['36/255']:.1f}%** of the test images"
        in readme
    )


def test_the_commands_of_the_page_are_the_runs(capsys):
    commands = [line.split()[2:] for line in fast.text_of(EMPTY).splitlines() if line.startswith("    lipflow train")]
    ours = [row.runs(None)[0] for row in fast.ROWS if row.model == "cpl-fast"]
    for words, run in zip(commands, ours, strict=True):
        assert replace(chosen(cli.parse("train", words)), out=run.out) == run
    assert ours[0].recipe == CPL_FAST
    runs = [run for row in fast.ROWS for run in row.runs(None)]
    assert 0 not in {run.validation_images for run in runs}, "recipes are compared on held-out images"
    assert len({run.folder for run in runs}) == len(runs)
    assert fast.main(["--list"]) == 0
    assert "cayley-kw3-30m-0" in capsys.readouterr().out
