"""Reading the folder of a run: complete, incomplete, or damaged."""

import json
import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from lipflow.report.run_results import read
from tests.report.conftest import change_claims, change_examples, change_json, change_rows, rows


def test_read_reads_all_of_a_run(run):
    with (run / "log.jsonl").open("a") as file:
        file.write('{"kind": "ste')  # a line that is being written
    found = read(run, "tiny")
    held, outcome = found.certificate, found.outcome
    assert held is not None
    assert outcome is not None
    assert outcome.examples is not None
    assert found.ended
    assert not found.missing
    assert len(found.epochs) == 8
    assert found.losses[-1][0] == found.record.steps
    assert (len(held.right), len(outcome), len(outcome.examples.index), found.part) == (60, 40, 6, 40)
    assert list(outcome.robust) == ["0.1", "0.25", "0.5"]
    assert len(held.ledger) == len(json.loads((run / "certificate.json").read_text())["primitives"])
    first = held.first(40)  # the images that were attacked
    assert len(first.right) == len(first.images) == len(first.logits) == 40
    assert np.array_equal(first.radius, held.radius[:40])
    assert replace(found, certificate=first).part == 0

    radius = first.radius[first.right & (first.radius > 0)][0]
    assert first.certified(Fraction(radius)).sum() < first.certified(Fraction(radius) - Fraction(1, 10**30)).sum()


def written(name, text):
    return lambda run: (run / name).write_text(text)


def claimed(**values):
    return lambda run: change_claims(run, **values)


def stored(**columns):
    """Columns of certified.npz that are replaced, as functions of the others."""
    return lambda run: change_rows(run, **{name: column(rows(run)) for name, column in columns.items()})


def attacked(**values):
    return lambda run: change_json(run / "attack.json", **values)


def shown(**columns):
    return lambda run: change_examples(run, **columns)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (written("run.json", "{"), "run.json is not a record of a run"),
        (lambda run: change_json(run / "run.json", plan=[[0, 5]]), "its plan has 5 steps, and not"),
        (written("run.json", "[" * 100_000), "run.json is not a record of a run"),
        (written("log.jsonl", "{}\nnot json\n{}\n"), "log.jsonl cannot be read: it is not JSON"),
        (written("log.jsonl", '{"kind": "step", "step": 1, "loss": "low"}\n'), "loss is not a number: 'low'"),
        (written("certificate.json", "[" * 100_000), "certificate.json cannot be read: it is not JSON"),
        (written("certificate.json", "[1]"), "it is not a JSON object"),
        (written("certificate.json", "{}"), "it has schema None"),
        (lambda run: change_json(run / "certificate.json", lipschitz=0.5), "its digest is wrong"),
        (claimed(lipschitz="1"), "lipschitz is not a number: '1'"),
        (claimed(files=3), "files is not a JSON object"),
        (claimed(split=3), "split and network are not strings"),
        (claimed(primitives={}), "primitives and vertices are not lists"),
        (claimed(primitives=[3]), "a primitive is not a JSON object"),
        (claimed(primitives=[]), "a vertex has no primitive of the list"),
        (claimed(vertices=[3]), "a vertex is not a JSON object"),
        (claimed(vertices=[{"kind": 1}]), "of a vertex are not strings"),
        (lambda run: (run / "certified.npz").unlink(), "certified.npz is missing"),
        (written("certified.npz", "PK"), "certified.npz cannot be read: it was changed"),
        (stored(radius=lambda r: r["radius"][:-1]), "its columns differ in length"),
        (stored(radius=lambda r: np.array([{}] * 60, dtype=object)), "certified.npz cannot be read: Object arrays"),
        (stored(radius=lambda r: -r["radius"] - 1), "a radius is negative or NaN"),
        (stored(radius=lambda r: r["radius"] * np.nan), "a radius is negative or NaN"),
        (stored(label=lambda r: r["label"] + 99), "a label is not one of the classes"),
        (stored(truth=lambda r: r["truth"] - 99), "a label is not one of the classes"),
        (stored(label=lambda r: r["radius"]), "labels are not integers"),
        (stored(truth=lambda r: np.array(1)), "an array has no rows"),
        (stored(images=lambda r: r["images"][:, 0]), "images are not (n, channels, height, width)"),
        (stored(images=lambda r: r["images"] / 7.0), "images are uint8, or floats in [0, 1]"),
        (attacked(clean=[1] * 40), "a list has values that are not true or false"),
        (attacked(clean=[True] * 61), "its list `clean` does not agree with the labels"),
        (attacked(clean=[], robust={"1": []}), "it has no attacked images"),
        (attacked(robust={}), "it has no radii"),
        (attacked(robust={"1": [True]}), "its lists differ in length"),
        (attacked(robust={"<b>": [True] * 40}), "a radius is a number"),
        (attacked(robust={"1e400": [True] * 40}), "a radius is at most 1000000"),
        (attacked(steps="ten"), "steps is not an integer of at least 0: 'ten'"),
        (attacked(restarts=-1), "restarts is not an integer of at least 0: -1"),
        (written("attack.npz", ""), "attack.npz cannot be read: it was changed"),
        (shown(index=np.arange(6) + 60), "an index is not a row of the certificate"),
        (shown(inside=np.zeros((6, 3, 8, 8))), "the images of inside have another shape"),
        (shown(found=np.zeros(6)), "found has the wrong type"),
        (shown(nearest_distance=np.full(6, np.inf)), "nearest_distance is not a distance"),
    ],
)
def test_read_names_the_damage(run, damage, message):
    damage(run)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read(run, "tiny")
    assert str(run) in str(caught.value)
    assert "\n" not in str(caught.value)
