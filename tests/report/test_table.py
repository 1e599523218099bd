"""The summary: numbers that a reader can recompute, dashes where nothing was measured, the paper beside it."""

import json
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from lipflow.report.run_results import read
from lipflow.report.table import DASH, escape, images_of, markdown, merge, percent, summarise
from lipflow.train.run import Run
from tests.report.conftest import change_claims, change_examples, change_rows, rows


def _line(summary, kind):
    return next(line for line in summary.entries[0].lines if line.kind == kind)


def test_the_numbers_are_those_of_the_files(original):
    summary = summarise([read(original, "tiny")], ["0.1", "0.3"])
    held, attack = rows(original), json.loads((original / "attack.json").read_text())
    right = held["label"] == held["truth"]
    at = [right, right & (held["radius"] > 0.1), right & (held["radius"] > 0.3)]
    assert _line(summary, "certified").values == tuple(f"{flags.mean():.2%}" for flags in at)
    assert _line(summary, "certified").average == f"{(held['radius'] * right).mean():.4f}"
    clean, standing = (f"{sum(flags) / 40:.2%}" for flags in (attack["clean"], attack["robust"]["0.1"]))
    assert _line(summary, "attacked").values == (clean, standing, DASH)
    assert _line(summary, "attacked").title == "under attack, first 40 images"


def test_an_attack_on_some_images_stands_beside_what_is_certified_of_the_same(original):
    """certified ≤ attacked ≤ clean can be seen, whatever all the other images are like."""
    held, eps = rows(original), ["0.1", "0.25", "0.5"]
    summary = summarise([read(original, "tiny")], eps)
    part, attacked = _line(summary, "part"), _line(summary, "attacked")
    right = (held["label"] == held["truth"])[:40]
    at = [right, *(right & (held["radius"][:40] > float(e)) for e in eps)]
    assert part.values == tuple(f"{flags.mean():.2%}" for flags in at)
    certified, standing = ([float(v.rstrip("%")) for v in line.values] for line in (part, attacked))
    assert certified[0] == standing[0]
    assert all(a <= b <= standing[0] for a, b in zip(certified, standing, strict=True))
    for text in ("certified, first 40 images", "under attack, first 40 images"):
        assert f"| {text} |" in markdown(summary)


def test_an_attack_on_all_images_needs_no_such_line(run):
    change_rows(run, **{name: column[:40] for name, column in rows(run).items()})
    with np.load(run / "attack.npz") as found:
        change_examples(run, index=found["index"] % 40)
    lines = summarise([read(run, "tiny")]).entries[0].lines
    assert [(line.kind, line.title) for line in lines] == [("certified", "certified"), ("attacked", "under attack")]


def test_radii_are_all_that_the_runs_speak_of(original):
    assert summarise([read(original, "tiny")]).epsilons == ("0.1", "36/255", "0.25", "0.5", "1")
    assert merge(["1/2", "0.25", "0.5", "0", "1/4"]) == ["0.25", "1/2"]
    assert [Fraction(eps) for eps in merge(["1", "36/255"])] == [Fraction(36, 255), 1]


def _as_published(folder, model_args=None, **recipe):
    said = json.loads((folder / "run.json").read_text())
    said["run"] |= {"model": "cpl-s", "data": "cifar10", "model_args": model_args or {}}
    said["run"]["recipe"] |= recipe
    (folder / "run.json").write_text(json.dumps(said))


def test_the_paper_stands_apart_and_once(run):
    """Its networks are no runs: two runs of one model have one row of it, among neither's lines."""
    assert summarise([read(run, "tiny")]).published == ()
    _as_published(run, epochs=20, batch_size=256)
    summary = summarise([read(run, "tiny"), read(run, "again")], ["36/255", "0.5", "24/85"])
    (line,) = summary.published
    assert (line.title, line.values) == ("CPL-S on cifar10, certified", ("75.6%", "62.3%", "46.9%", DASH))
    assert "Table 2" in line.note
    assert not any(line.kind == "published" for entry in summary.entries for line in entry.lines)
    assert markdown(summary).count("75.6%") == 1
    remark = next(text for text in summary.entries[0].remarks if text.startswith("not the published run"))
    assert "--epochs 20 (published: 200)" in remark
    assert "--validation-images by default (published: 0)" in remark
    for flag in ("--seed", "--threads", "--radii"):
        assert flag not in remark


def test_a_relaxed_run_goes_with_no_certified_row(run):
    _as_published(run, model_args={"depth": 1, "h": 0.1})
    summary = summarise([read(run, "tiny")], ["36/255", "72/255"])
    (line,) = summary.published
    assert (line.title, line.values) == ("CPL with h = 0.1 on cifar10, under PGD", ("82.23%", "62.99%", DASH))
    remark = next(text for text in summary.entries[0].remarks if text.startswith("not the published run"))
    assert "h=0.1" in remark


def test_markdown(run):
    one = read(run, "a|b")
    (run / "attack.json").unlink()
    two = read(run, "second")
    (run / "certificate.json").unlink()
    three = read(run, "third")
    text = markdown(summarise([one, two, three]), ["a: broken <b>"])
    lines = text.splitlines()
    assert lines[0] == "> **Contradiction**: a: broken &lt;b&gt;"
    table = [line for line in lines if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in table} == {table[0].count("|")}
    assert "| **a\\|b** | certified |" in text
    assert "no certificate yet: lipflow certify" in text
    assert table[-1].startswith("| **third** | |")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("<script>", "&lt;script&gt;"),
        ("a|b\nc", "a\\|b c"),
        ("[x](http://y)", "\\[x\\](http://y)"),
        ("![i](j) `k` *l*", "\\!\\[i\\](j) \\`k\\` \\*l\\*"),
    ],
)
def test_names_are_no_markup(name, said):
    assert escape(name) == said


@pytest.mark.parametrize(
    ("count", "of", "text"),
    [
        (49_999, 50_000, "99.99%"),
        (1, 50_000, "0.01%"),
        (50_000, 50_000, "100.00%"),
        (0, 50_000, "0.00%"),
        (29, 32, "90.63%"),
        (295, 300, "98.33%"),
        (1, 3, "33.33%"),
    ],
)
def test_all_is_all_and_none_is_none(count, of, text):
    assert percent(count / of) == text


def test_images_are_named_by_their_split(run):
    held = read(run, "tiny").certificate
    assert held is not None
    assert images_of(held) == "60 test images"
    assert images_of(replace(held, split="validation", network="best")) == "60 validation images, best by validation"
    assert images_of(replace(held, split="")) == "60 images"
    (run / "attack.json").unlink()
    change_claims(run, split="validation")
    certified = _line(summarise([read(run, "tiny")]), "certified")
    assert (certified.title, certified.note) == ("certified, validation images", "60 validation images")


def test_the_published_run_has_no_remark(run):
    """The paper trains on all images: to hold some out is a difference, and not to do so is none."""
    published = replace(Run.of("cpl-s", "cifar10"), validation_images=0, seed=3)
    found = read(run, "tiny")
    for told, expected in ((published, 0), (replace(published, validation_images=None), 1)):
        (entry,) = summarise([replace(found, record=replace(found.record, run=told))]).entries
        assert sum(text.startswith("not the published run") for text in entry.remarks) == expected
