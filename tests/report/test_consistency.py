"""certified ≤ attacked ≤ clean: a single image that contradicts it is reported."""

import json

import numpy as np
import pytest

from lipflow.report.consistency import compared, contradictions, untested
from lipflow.report.run_results import read
from tests.report.conftest import change_examples, change_json, rows


def change_outcome(folder, image: int, robust: list[bool]) -> None:
    """Set whether an image is robust at each radius of the attack: 0.1, 0.25 and 0.5."""
    columns = json.loads((folder / "attack.json").read_text())["robust"]
    for column, value in zip(columns.values(), robust, strict=True):
        column[image] = value
    change_json(folder / "attack.json", robust=columns)


def test_a_sound_run_has_no_contradiction(original):
    run = read(original, "tiny")
    assert contradictions(run) == []
    assert compared(run) > 10


def test_contradictions_are_found_image_by_image(run):
    held = rows(run)
    right, radius = (held["label"] == held["truth"])[:40], held["radius"][:40]
    image, wrong = int(np.flatnonzero(right & (radius > 0.1))[0]), int(np.flatnonzero(~right)[0])
    change_outcome(run, image, [False, False, False])
    [broken, *others] = contradictions(read(run, "tiny"))
    assert broken.startswith("tiny: 1 image certified at ε = 0.1")
    assert broken.endswith(f"(number {image})")
    change_outcome(run, wrong, [True, False, False])  # the accuracies are as before
    found = contradictions(read(run, "tiny"))
    assert broken in found
    assert len(found) == 2 + len(others)
    assert any(f"wrong label before the attack (number {wrong})" in text for text in found)


def test_an_image_broken_in_a_ball_is_not_robust_in_a_larger_one(run):
    robust = json.loads((run / "attack.json").read_text())["robust"]
    radius = rows(run)["radius"]
    image = next(i for i in range(40) if robust["0.25"][i] and radius[i] < 0.25)
    change_outcome(run, image, [bool(radius[image] > 0.1), False, True])
    assert any("larger ball of 0.5" in text for text in contradictions(read(run, "tiny")))


@pytest.mark.parametrize("kind", ["inside", "nearest"])
def test_contradictions_are_found_in_the_gallery(run, kind):
    with np.load(run / "attack.npz") as columns:
        index, found = columns["index"], columns["found"]
    held = rows(run)
    k = int(held["radius"][index].argmax())
    label, distance = held["label"][index], held["radius"][index] / 2
    label[k] = (label[k] + 1) % 10
    change_examples(run, **{f"{kind}_label": label, f"{kind}_distance": distance, "found": found | (kind == "nearest")})
    [text] = contradictions(read(run, "tiny"))
    assert f"number {index[k]}" in text


def test_untested_says_why_nothing_was_compared(run):
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
