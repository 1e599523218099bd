"""What the charts draw: exact radii, bins that hold every image, and values that JSON has."""

import base64
import json
import math
from dataclasses import replace

import numpy as np

from lipflow.report.page import embed
from lipflow.report.run_results import read
from lipflow.report.series import BINS, epsilon_reach, histogram, payload, smooth, thin
from lipflow.report.table import summarise


def test_radii_arrive_as_they_are(original):
    run = read(original, "tiny")
    assert run.certificate is not None
    values = json.loads(embed(payload([run], summarise([run]))))
    sent = np.frombuffer(base64.b64decode(values["runs"][0]["radii"]), dtype="<f8")
    assert np.array_equal(sent, np.sort(run.certificate.radius[run.certificate.right]))
    assert [point[0] for point in values["runs"][0]["attacked"]] == ["0", "0.1", "0.25", "0.5"]


def test_every_image_is_in_a_bin_of_an_axis_with_an_end(original):
    run = read(original, "tiny")
    held = run.certificate
    assert held is not None
    reach = epsilon_reach([run], ["1"])
    assert reach >= 1
    for radius in (held.radius, held.radius * 0, held.radius + 1e308):
        right, wrong = histogram(replace(held, radius=radius), reach)
        assert (right.sum(), wrong.sum()) == (held.right.sum(), (~held.right).sum())
        assert len(right) == BINS
    limitless = replace(run, certificate=replace(held, radius=held.radius + 1e308))
    assert epsilon_reach([limitless], ["1"]) <= 9  # the diameter of 8×8 pixels is 8
    for epsilons in ([], ["1e-300"], [f"0.{'0' * 320}1"], ["1000000"]):
        assert 1 <= epsilon_reach([replace(run, certificate=None)], epsilons) <= 1.1e6


def test_losses_that_are_no_numbers_are_left_out():
    assert smooth([(1, math.nan), (2, 4.0), (3, math.inf), (4, 2.0)]) == [(2, 4.0), (4, 2.0)]
    assert smooth([]) == []
    means = smooth([(i, float(i)) for i in range(1000)])
    assert len(means) == 60
    assert means[-1][0] == 999
    assert thin(list(range(1000)), 10)[::9] == [0, 999]
