"""certified ≤ attacked ≤ clean: one image that says otherwise is enough, whatever the averages are."""

import json

import numpy as np
import pytest

from lipflow.report.consistency import compared, contradictions, untested
from lipflow.report.run_results import read
from tests.report.conftest import change_examples, change_json, rows


def _certified(folder, eps: float) -> int:
    held = rows(folder)
    return int(np.flatnonzero((held["label"] == held["truth"]) & (held["radius"] > eps))[0])


def _set(folder, image: int, **outcomes: bool) -> None:
    """outcomes: whether the image stands at 0.1, 0.25, 0.5, as e10, e25, e50."""
    standing = json.loads((folder / "attack.json").read_text())["robust"]
    for name, stands in outcomes.items():
        standing[{"e10": "0.1", "e25": "0.25", "e50": "0.5"}[name]][image] = stands
    change_json(folder / "attack.json", robust=standing)


def test_a_sound_run_has_none(original):
    run = read(original, "tiny")
    assert contradictions(run) == []
    assert compared(run) > 10


def test_an_image_broken_where_it_is_certified(run):
    image = _certified(run, 0.1)
    _set(run, image, e10=False, e25=False, e50=False)
    said = f"tiny: 1 image certified at ε = 0.1, yet broken there by an attack (number {image})"
    assert said in contradictions(read(run, "tiny"))
    # Averages cannot hide it: another image is mended, and the accuracies are as before.
    wrong = int(np.flatnonzero(rows(run)["label"] != rows(run)["truth"])[0])
    _set(run, wrong, e10=True)
    found = contradictions(read(run, "tiny"))
    assert said in found
    assert f"standing at ε = 0.1, yet wrong to begin with (number {wrong})" in " ".join(found)


def test_a_larger_ball_is_not_safer(run):
    standing = json.loads((run / "attack.json").read_text())["robust"]
    held = rows(run)
    image = next(i for i in range(40) if standing["0.25"][i] and held["radius"][i] < 0.25)
    _set(run, image, e10=bool(held["radius"][image] > 0.1), e25=False, e50=True)
    assert any("standing in the larger ball of 0.5" in text for text in contradictions(read(run, "tiny")))


@pytest.mark.parametrize("kind", ["inside", "nearest"])
def test_the_gallery_is_checked_too(run, kind):
    with np.load(run / "attack.npz") as columns:
        index, found = columns["index"], columns["found"]
    held = rows(run)
    k = int(held["radius"][index].argmax())
    label, distance = held["label"][index].copy(), held["radius"][index] / 2
    label[k] = (label[k] + 1) % 10
    columns = {f"{kind}_label": label, f"{kind}_distance": distance}
    change_examples(run, **columns, **({"found": found | True} if kind == "nearest" else {}))
    said = contradictions(read(run, "tiny"))
    assert len(said) == 1
    assert f"number {index[k]}" in said[0]


def test_nothing_to_compare(run):
    assert untested(read(run, "tiny")) == ""
    change_json(run / "attack.json", robust={"1000": [False] * 40})
    assert untested(read(run, "tiny")) == "nothing is certified where it was attacked"
    change_json(run / "attack.json", certificate="x")
    assert untested(read(run, "tiny")) == "its attack is of another certificate"
    (run / "attack.json").unlink()
    alone = read(run, "tiny")
    assert (contradictions(alone), compared(alone), untested(alone)) == ([], 0, "not attacked")
    (run / "certificate.json").unlink()
    assert untested(read(run, "tiny")) == "no certificate"
