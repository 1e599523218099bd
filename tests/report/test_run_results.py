"""Reading a run: all that is there, clear words on what is not, and no trust in a stranger's folder."""

import json
import math
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from lipflow.report.run_results import read, read_all
from tests.report.conftest import change_claims, change_examples, change_json, change_rows, rows


def test_read_reads_all_of_a_run(original, run):
    found = read(original, "tiny")
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
    assert len(held.ledger) == len(json.loads((original / "certificate.json").read_text())["primitives"])
    i = int(np.flatnonzero(held.right & (held.radius > 0))[0])
    assert not held.certified(Fraction(held.radius[i]))[i]
    assert held.certified(Fraction(held.radius[i]) - Fraction(1, 10**30))[i]
    first = held.first(40)  # the images that were attacked
    assert len(first.right) == len(first.images) == len(first.logits) == 40
    assert np.array_equal(first.radius, held.radius[:40])
    assert replace(found, certificate=first).part == 0
    with (run / "log.jsonl").open("a") as file:
        file.write('{"kind": "ste')  # a log that is being written
    assert read(run, "tiny").losses == found.losses


@pytest.mark.parametrize(
    ("gone", "missing"),
    [
        (["attack.json"], ["not attacked yet: lipflow attack"]),
        (["attack.json", "certificate.json"], ["no certificate yet: lipflow certify", "not attacked yet"]),
        (["certificate.json"], ["no certificate yet", "not attacked yet"]),
        (["model.safetensors", "log.jsonl"], ["training has not ended: lipflow train"]),
    ],
)
def test_what_is_missing_is_said(run, gone, missing):
    for name in gone:
        (run / name).unlink()
    found = read(run, "tiny").missing
    assert len(found) == len(missing)
    assert all(said in text for said, text in zip(missing, found, strict=True))


def test_an_attack_on_another_certificate_counts_as_none(run):
    said = json.loads((run / "attack.json").read_text())
    change_json(run / "attack.json", certificate="of another one", steps="not looked at")
    found = read(run, "tiny")
    assert (found.outcome, found.stale, found.part) == (None, True, 0)
    assert found.missing == [f"attack.json is of another certificate and is not shown: lipflow attack {run}"]
    del said["certificate"]  # without a digest it is held against the labels
    (run / "attack.json").write_text(json.dumps(said))
    assert read(run, "tiny").outcome is not None
    said["clean"][0] = not said["clean"][0]
    (run / "attack.json").write_text(json.dumps(said))
    assert read(run, "tiny").stale


def _write(name, text):
    return lambda folder: (folder / name).write_text(text)


def _shorter(folder):
    change_rows(folder, radius=rows(folder)["radius"][:-1])


def _pickled(folder):
    change_rows(folder, radius=np.array([{}] * 60, dtype=object))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_write("run.json", "{"), "run.json is not a record of a run"),
        (_write("certificate.json", "{"), "certificate.json cannot be read: it is not JSON"),
        (_write("certificate.json", "[1]"), "certificate.json cannot be read: it is not a JSON object"),
        (_write("certificate.json", '{"schema": 1}'), "it has schema 1, of another version of lipflow; certify"),
        (_write("certificate.json", "{}"), "it has schema None, of another version of lipflow; certify"),
        (_write("certificate.json", "[" * 100_000), "certificate.json cannot be read: it is not JSON"),
        (lambda f: change_json(f / "certificate.json", lipschitz=0.5), "its digest is wrong"),
        (lambda f: change_claims(f, lipschitz="1"), "lipschitz is not a number: '1'"),
        (lambda f: change_claims(f, files=3), "files is not a JSON object"),
        (lambda f: change_claims(f, split=3), "split and network are not strings"),
        (lambda f: change_claims(f, network=["final"]), "split and network are not strings"),
        (lambda f: change_claims(f, primitives={}), "primitives and vertices are not lists"),
        (lambda f: change_claims(f, vertices=3), "primitives and vertices are not lists"),
        (lambda f: change_claims(f, primitives=[3]), "a primitive is not a JSON object"),
        (lambda f: change_claims(f, primitives=[]), "a vertex has no primitive of the list"),
        (lambda f: change_claims(f, vertices=[3]), "a vertex is not a JSON object"),
        (lambda f: change_claims(f, vertices=[{"kind": 1}]), "kind, name, size and how of a vertex are not strings"),
        (lambda f: (f / "certified.npz").unlink(), "certified.npz is missing"),
        (
            lambda f: (f / "certified.npz").write_bytes(b"PK"),
            "certified.npz cannot be read: it was changed after it was written",
        ),
        (_shorter, "its columns differ in length"),
        (_pickled, "certified.npz cannot be read: Object arrays cannot be loaded"),
        (lambda f: change_rows(f, radius=-rows(f)["radius"] - 1), "a radius is negative or NaN"),
        (lambda f: change_rows(f, radius=np.full(60, np.nan)), "a radius is negative or NaN"),
        (lambda f: change_rows(f, label=rows(f)["label"] + 99), "a label is not one of the classes"),
        (lambda f: change_rows(f, label=rows(f)["radius"]), "labels are not integers"),
        (lambda f: change_rows(f, truth=np.array(1)), "an array has no rows"),
        (lambda f: change_rows(f, images=rows(f)["images"][:, 0]), "images are not (n, channels, height, width)"),
        (lambda f: change_rows(f, images=rows(f)["images"] / 7.0), "images are uint8, or floats in [0, 1]"),
        (_write("attack.json", "nothing"), "attack.json cannot be read: it is not JSON"),
        (lambda f: change_json(f / "attack.json", clean=[1] * 40), "a list has values that are not true or false"),
        (
            lambda f: change_json(f / "attack.json", clean=[True] * 61),
            "its list of right labels is not that of the certificate",
        ),
        (lambda f: change_json(f / "attack.json", clean=[], robust={"1": []}), "it attacks no image"),
        (lambda f: change_json(f / "attack.json", robust={}), "it attacks at no radius"),
        (lambda f: change_json(f / "attack.json", robust={"1": [True]}), "its lists differ in length"),
        (lambda f: change_json(f / "attack.json", robust={"<b>": [True] * 40}), "a radius is a number"),
        (lambda f: change_json(f / "attack.json", robust={"1e400": [True] * 40}), "a radius is at most 1000000"),
        (lambda f: change_json(f / "attack.json", steps="ten"), "steps is not an integer of at least 0: 'ten'"),
        (lambda f: change_json(f / "attack.json", steps=math.inf), "steps is not an integer of at least 0: inf"),
        (lambda f: change_json(f / "attack.json", steps=math.nan), "steps is not an integer of at least 0: nan"),
        (lambda f: change_json(f / "attack.json", restarts=-1), "restarts is not an integer of at least 0: -1"),
        (
            lambda f: (f / "attack.npz").write_bytes(b""),
            "attack.npz cannot be read: it was changed after it was written",
        ),
        (lambda f: change_examples(f, index=np.arange(6) + 60), "an index is not a row of the certificate"),
        (lambda f: change_examples(f, inside=np.zeros((6, 3, 8, 8))), "the images of inside have another shape"),
        (lambda f: change_examples(f, found=np.zeros(6)), "found has the wrong type"),
        (lambda f: change_examples(f, nearest_distance=np.full(6, np.inf)), "nearest_distance is not a distance"),
        (_write("run.json", "[" * 100_000), "run.json is not a record of a run"),
        (_write("log.jsonl", "{}\nnot json\n{}\n"), "log.jsonl cannot be read: it is not JSON"),
        (_write("log.jsonl", '{"kind": "step", "step": 1, "loss": "low"}\n'), "loss is not a number: 'low'"),
    ],
)
def test_damage_is_named(run, damage, said):
    damage(run)
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        read(run, "tiny")
    assert str(run) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names(original, run):
    assert [r.name for r in read_all((original,), ())] == ["tiny"]
    assert [r.name for r in read_all((original, run), ("a", "b"))] == ["a", "b"]
    for folders, names, said in (
        ((original, run), (), "two runs are called 'tiny'"),
        ((run, run), (), "two runs are called 'tiny'"),
        ((original, run), ("a", "a"), "two runs are called 'a'"),
        ((original,), ("a", "b"), "1 runs, 2 names"),
        ((), (), "give the folders of one or more runs"),
        ((run / "nowhere",), (), "holds no run"),
        ((Path(run) / "run.json",), (), "holds no run"),
    ):
        with pytest.raises(ValueError, match=said):
            read_all(folders, names)
