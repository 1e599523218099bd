"""Images on the page: pixels, rounding, and cards for every case."""

from dataclasses import replace

import numpy as np
import pytest

from lipflow.report.gallery import as_bytes, difference, gallery
from lipflow.report.run_results import read
from tests.report.conftest import change_examples, change_rows, rows


def test_as_bytes_keeps_every_pixel():
    pixels = np.arange(48, dtype=np.uint8).reshape(3, 4, 4)
    for image in (pixels, pixels / 255):
        assert np.array_equal(as_bytes(image), pixels.transpose(1, 2, 0))
    assert as_bytes(pixels[:2]).shape == (4, 4)


def test_difference_is_scaled_around_grey():
    before = np.full((1, 2, 2), 0.5)
    after = before.copy()
    after[0, 0, 0] += 0.01
    shown, factor = difference(before, after)
    assert factor == pytest.approx(50)
    assert (shown[0, 0], shown[1, 1]) == (255, 128)
    assert difference(before, before)[1] == 1


def test_radii_are_rounded_down_and_distances_up(run):
    change_rows(run, radius=np.full(60, 0.29996))
    change_examples(run, nearest_distance=np.full(6, 0.29998), inside_distance=np.full(6, 0.29995))
    text = gallery(read(run, "tiny"))
    assert text.count("R = 0.299") == 6
    assert "R = 0.300" not in text
    assert text.count("at 0.300") >= 6


def test_gallery_has_a_card_for_every_case(run):
    found = read(run, "tiny")
    text = gallery(found)
    assert text.count('class="card"') == text.count("the nearest adversarial image found") == 6
    assert "still" in text
    assert "turned into" not in text
    names = tuple(f"<{letter}>" for letter in "abcdefghij")  # of the classes, as stored with the run
    assert ": <b>&lt;" in gallery(replace(found, record=replace(found.record, class_names=names)))
    with np.load(run / "attack.npz") as columns:
        label = rows(run)["label"][columns["index"]]
    change_examples(run, inside_label=(label + 1) % 10)  # contradicts the certificate
    assert gallery(read(run, "tiny")).count('class="panel bad"') == 6
    change_examples(run, found=np.zeros(6, dtype=bool))
    assert gallery(read(run, "tiny")).count("no image with another label was found") == 6
    change_rows(run, radius=rows(run)["radius"] * 0)
    assert gallery(read(run, "tiny")).count("R = 0: no ball is certified") == 6
    (run / "attack.json").unlink()
    assert gallery(read(run, "tiny")).count('class="card"') == 12
    (run / "certificate.json").unlink()
    assert gallery(read(run, "tiny")) == ""
