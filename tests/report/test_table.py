"""The summary: the numbers of the files, dashes where nothing was measured, the paper's networks below."""

import json
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from lipflow.report.run_results import read
from lipflow.report.table import DASH, escape, markdown, merge, percent, summarise
from lipflow.train.run import Run
from tests.report.conftest import change_claims, change_examples, change_rows, rows


def lines_of(summary):
    """The lines of the first run, by their kinds."""
    return {line.kind: line for line in summary.entries[0].lines}


def test_summary_has_the_numbers_of_the_files(original):
    """An attack on some images has a line of the certified accuracy of the same images beside it."""
    summary = summarise([read(original, "tiny")], ["0.1", "0.3", "0.5"])
    held, attack = rows(original), json.loads((original / "attack.json").read_text())
    right = held["label"] == held["truth"]
    flags = np.array([right, *(right & (held["radius"] > eps) for eps in (0.1, 0.3, 0.5))])
    lines = lines_of(summary)
    assert lines["certified"].values == tuple(f"{row.mean():.2%}" for row in flags)
    assert lines["certified"].average == f"{(held['radius'] * right).mean():.4f}"
    assert lines["part"].values == tuple(f"{row.mean():.2%}" for row in flags[:, :40])
    clean, small, large = (
        f"{sum(row) / 40:.2%}" for row in (attack["clean"], *map(attack["robust"].get, ("0.1", "0.5")))
    )
    assert lines["attacked"].values == (clean, small, DASH, large)
    assert lines["part"].title == "certified, first 40 images"
    assert lines["attacked"].title == "under attack, first 40 images"


def test_summary_has_no_line_of_a_part_if_all_images_were_attacked(run):
    change_rows(run, **{name: column[:40] for name, column in rows(run).items()})
    with np.load(run / "attack.npz") as found:
        change_examples(run, index=found["index"] % 40)
    titles = {kind: line.title for kind, line in lines_of(summarise([read(run, "tiny")])).items()}
    assert titles == {"certified": "certified", "attacked": "under attack"}


def test_radii_are_merged_by_value(original):
    assert summarise([read(original, "tiny")]).epsilons == ("0.1", "36/255", "0.25", "0.5", "1")
    assert merge(["1/2", "0.25", "0.5", "0", "1/4"]) == ["0.25", "1/2"]
    assert [Fraction(eps) for eps in merge(["1", "36/255"])] == [Fraction(36, 255), 1]


def change_run(results, **values):
    return replace(results, record=replace(results.record, run=replace(results.record.run, **values)))


def remark(entry) -> str:
    return next((text for text in entry.remarks if text.startswith("not the published run")), "")


def test_the_paper_stands_below_the_runs_once(original):
    tiny = read(original, "tiny")
    assert summarise([tiny]).published == ()
    recipe = replace(tiny.record.run.recipe, epochs=20, batch_size=256)
    changed = change_run(tiny, model="cpl-s", data="cifar10", model_args={}, recipe=recipe)
    summary = summarise([changed, replace(changed, name="again")], ["36/255", "0.5", "24/85"])
    (line,) = summary.published
    assert (line.title, line.values) == ("CPL-S on cifar10, certified", ("75.6%", "62.3%", "46.9%", DASH))
    assert "Table 2" in line.note
    assert "published" not in lines_of(summary)
    assert markdown(summary).count("75.6%") == 1
    assert "--epochs 20 (published: 200)" in remark(summary.entries[0])
    assert "--validation-images by default (published: 0)" in remark(summary.entries[0])
    assert not any(flag in remark(summary.entries[0]) for flag in ("--seed", "--threads", "--radii"))


def test_a_run_with_a_fixed_step_is_compared_with_the_relaxed_networks(original):
    relaxed = change_run(read(original, "tiny"), model="cpl-s", data="cifar10", model_args={"depth": 1, "h": 0.1})
    summary = summarise([relaxed], ["36/255", "72/255"])
    (line,) = summary.published
    assert (line.title, line.values) == ("CPL with h = 0.1 on cifar10, under PGD", ("82.23%", "62.99%", DASH))
    assert "h=0.1" in remark(summary.entries[0])


@pytest.mark.parametrize("images", [0, None])
def test_the_published_run_has_no_remark(original, images):
    """The paper trains on all images, so holding some out is a difference."""
    published = replace(Run.of("cpl-s", "cifar10"), validation_images=images, seed=3)
    found = read(original, "tiny")
    (entry,) = summarise([replace(found, record=replace(found.record, run=published))]).entries
    assert bool(remark(entry)) == (images is None)


def test_markdown_has_cells_for_runs_in_any_state(run):
    one = read(run, "a|b")
    (run / "attack.json").unlink()
    two = read(run, "second")
    (run / "certificate.json").unlink()
    text = markdown(summarise([one, two, read(run, "third")]), ["a: broken <b>"])
    assert text.startswith("> **Contradiction**: a: broken &lt;b&gt;\n")
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in table} == {table[0].count("|")}
    assert "| **a\\|b** | certified |" in text
    assert table[-1].startswith("| **third** | |")


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("<script>", "&lt;script&gt;"),
        ("a|b\nc", "a\\|b c"),
        ("[x](http://y)", "\\[x\\](http://y)"),
        ("![i](j) `k` *l*", "\\!\\[i\\](j) \\`k\\` \\*l\\*"),
    ],
)
def test_escape_leaves_no_markup(name, escaped):
    assert escape(name) == escaped


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(49_999 / 50_000, "99.99%"), (1 / 50_000, "0.01%"), (1.0, "100.00%"), (0.0, "0.00%"), (29 / 32, "90.63%")],
)
def test_percent_keeps_0_and_100_for_none_and_all(fraction, text):
    assert percent(fraction) == text


@pytest.mark.parametrize(
    ("split", "network", "of", "images"),
    [
        ("test", "final", "", "test images"),
        ("", "", "", "images"),
        ("validation", "best", ", validation images, best by validation", "validation images, best by validation"),
    ],
)
def test_lines_name_the_split_and_the_network(run, split, network, of, images):
    (run / "attack.json").unlink()
    change_claims(run, split=split, network=network)
    certified = lines_of(summarise([read(run, "tiny")]))["certified"]
    assert (certified.title, certified.note) == (f"certified{of}", f"60 {images}")
