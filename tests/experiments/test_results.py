"""docs/results.md: the page of the stored results."""

import json
from pathlib import Path

import pytest

from experiments.results import page
from experiments.runner import experiments

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    """A folder of results with one, of relaxed at the small scale."""
    (experiment,) = experiments(["relaxed"])
    made = {"commit": "b" * 40, "lipflow": "0", "torch": "2"}
    first = {"clean": 0.5, "images": 100, "seconds": 60.0, "recorded": {**made, "threads": 2, "processor": "P"}}
    second = {**first, "clean": 0.6, "recorded": {**made, "threads": 1, "processor": "Q"}}
    result = {
        "experiment": "relaxed",
        "title": experiment.title,
        "scale": "small",
        "columns": [column._asdict() for column in experiment.columns],
        "published": experiment.published,
        "rows": {"h = 1": [first, second], "h = 0.1": [{"diverged": True}]},
        "claims": [{"text": c.text, "verdict": "seen", "evidence": "why"} for c in experiment.claims],
        "provenance": {"commit": "a" * 40 + "-dirty", "machine": "two cores", "command": "run", "day": "2022-01-01"},
    }
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "relaxed.json").write_text(json.dumps(result))
    return tmp_path


def test_the_page_is_that_of_the_stored_results():
    assert (ROOT / "docs" / "results.md").read_text() == page(ROOT / "experiments" / "results")


def test_the_page_without_results_has_no_verdicts(tmp_path):
    text = page(tmp_path)
    assert "**seen** |" not in text
    assert text.count("- *small scale*: not run") == len(experiments())
    assert "its code is tested on synthetic files only" in text
    assert "S < M < L < XL in clean accuracy. | not run | not run |" in text


def test_the_page_has_our_numbers_beside_the_published_ones(folder):
    text = page(folder)
    assert "| h = 1 | 55.0 ± 7.1 | – | – | 2 |" in text
    assert "| *h = 1, published* | 85.1 | 61.45 | – | |" in text
    assert "| h = 0.1 | – | – | – | 1 |" in text
    assert "**seen** | not run |" in text
    assert "trained at commit bbbbbbbbbbbb, lipflow 0, torch 2, with 1 thread or 2 threads a run on P and Q;" in text
    assert "written at commit aaaaaaaaaaaa-dirty on 2022-01-01, two cores, `run`." in text


def test_the_page_has_one_result_for_all_scales_of_an_experiment_without_runs(tmp_path):
    (experiment,) = experiments(["architectures"])
    text = page(ROOT / "experiments" / "results", [experiment])
    assert "**seen** | **seen** |" in text
    assert "scale*: not run" not in text
    assert "scale*: not run" in page(tmp_path, [experiment])


def test_the_page_has_no_smoke_runs(folder):
    (folder / "small").rename(folder / "smoke")
    assert page(folder) == page(folder / "nothing")
