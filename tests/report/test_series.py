"""The data of the charts: exact radii, and a bin for every image."""

import base64
import json
import math
from dataclasses import replace

import numpy as np

from lipflow.report.page import embed
from lipflow.report.run_results import read
from lipflow.report.series import BINS, epsilon_reach, histogram, payload, smooth, thin
from lipflow.report.table import summarise


def test_payload_has_the_radii_exactly(original):
    run = read(original, "tiny")
    assert run.certificate is not None
    [values] = json.loads(embed(payload([run], summarise([run]))))["runs"]
    sent = np.frombuffer(base64.b64decode(values["radii"]), dtype="<f8")
    assert np.array_equal(sent, np.sort(run.certificate.radius[run.certificate.right]))
    assert [point[0] for point in values["attacked"]] == ["0", "0.1", "0.25", "0.5"]


def test_every_image_is_in_a_bin_of_a_finite_axis(original):
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


def test_smooth_averages_finite_losses():
    assert smooth([(1, math.nan), (2, 4.0), (3, math.inf), (4, 2.0)]) == [(2, 4.0), (4, 2.0)]
    assert smooth([]) == []
    means = smooth([(i, float(i)) for i in range(1000)])
    assert (len(means), means[-1][0]) == (60, 999)
    assert thin(list(range(1000)), 10)[::9] == [0, 999]
