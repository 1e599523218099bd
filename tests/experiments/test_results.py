"""docs/results.md: in step with the JSON, and honest about what was not run."""

import json
from pathlib import Path

from experiments.results import main, page
from experiments.runner import experiments

ROOT = Path(__file__).parents[2]


def result(scale, verdict="seen"):
    (experiment,) = experiments(["relaxed"])
    judged = {"whose": "the paper's", "verdict": verdict, "evidence": "why"}
    claims = [{"text": c.text, **judged} for c in experiment.claims]
    made = {"commit": "b" * 40, "lipflow": "0", "torch": "2"}
    seeds = [
        {"clean": 0.5, "images": 100, "seconds": 60.0, "recorded": {**made, "threads": 2, "processor": "P"}},
        {"clean": 0.6, "images": 100, "seconds": 60.0, "recorded": {**made, "threads": 1, "processor": "Q"}},
    ]
    return {
        "experiment": "relaxed",
        "title": experiment.title,
        "source": experiment.source,
        "scale": scale,
        "columns": [c._asdict() for c in experiment.columns],
        "published": experiment.published,
        "rows": {"h = 1": seeds, "h = 0.1": [{"diverged": True}]},
        "claims": claims,
        "provenance": {
            "commit": "a" * 40 + "-dirty",
            "torch": "2",
            "machine": "two cores",
            "command": "python -m experiments",
            "day": "2022-01-01",
        },
    }


def put(folder, scale, **more):
    (folder / scale).mkdir(parents=True, exist_ok=True)
    (folder / scale / "relaxed.json").write_text(json.dumps({**result(scale), **more}))


def test_the_page_is_in_step_with_the_results():
    assert (ROOT / "docs" / "results.md").read_text() == page(ROOT / "experiments" / "results")


def test_without_results_nothing_is_claimed(tmp_path):
    text = page(tmp_path)
    assert "**seen** |" not in text
    assert text.count("- *small scale*: not run") == len(experiments())
    assert "its code is tested on synthetic files only" in text
    assert "S < M < L < XL in clean accuracy. | not run | not run |" in text


def test_numbers_stand_beside_the_published_ones(tmp_path):
    put(tmp_path, "small")
    text = page(tmp_path)
    assert "| h = 1 | 55.0 ± 7.1 | – | – | 2 |" in text
    assert "| *h = 1, published* | 85.1 | 61.45 | – | |" in text
    assert "| h = 0.1 | – | – | – | 1 |" in text
    assert "**seen** | not run |" in text
    assert "trained at commit bbbbbbbbbbbb, lipflow 0, torch 2, with 1 thread or 2 threads a run on P and Q;" in text
    assert "written at commit aaaaaaaaaaaa-dirty on 2022-01-01, two cores, `python -m experiments`." in text


def test_what_needs_no_run_is_the_same_at_every_scale(tmp_path):
    (experiment,) = experiments(["architectures"])
    text = page(ROOT / "experiments" / "results", [experiment])
    assert "**seen** | **seen** |" in text
    assert "scale*: not run" not in text
    assert "It needs no training" in text
    assert "scale*: not run" in page(tmp_path, [experiment])


def test_smoke_runs_publish_nothing(tmp_path):
    put(tmp_path, "smoke")
    assert page(tmp_path) == page(tmp_path / "nothing")


def test_the_command_writes_it(tmp_path):
    put(tmp_path / "r", "small")
    assert main(["--results", str(tmp_path / "r"), "--out", str(tmp_path / "docs" / "results.md")]) == 0
    assert (tmp_path / "docs" / "results.md").read_text() == page(tmp_path / "r")
