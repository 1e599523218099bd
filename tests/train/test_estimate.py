"""Estimated certified accuracy, against a loop over images."""

import math

import pytest
import torch

import lipflow
from lipflow.data import load, to_unit
from lipflow.train.distributed import Ranks
from lipflow.train.estimate import estimate, lipschitz_estimate

ALONE = Ranks(0, 1, torch.device("cpu"))
RADII = ("0.001", "0.01", "0.05")


@pytest.mark.parametrize("sizes", [{}, {"lln": True}, {"std": 0.25}, {"h": 3.0}])
def test_it_counts_what_a_loop_counts(sizes):
    torch.manual_seed(0)
    network = lipflow.build("cpl-digits", depth=1, channels=16, pool=2, depth_linear=2, features=16, **sizes)
    split = load("digits").validation
    before = {k: v.clone() for k, v in network.state_dict().items()}
    found = estimate(network, split, RADII, 77, ALONE)
    assert network.training
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())

    logits = network.eval()(to_unit(split.images)).double()
    constants = network.head.pair_bounds() * lipschitz_estimate(network)
    counts = [0] * 4
    for f, y in zip(logits.tolist(), split.labels.tolist(), strict=True):
        r = min((f[y] - f[j]) / float(constants[y, j]) for j in range(10) if j != y)
        for i, threshold in enumerate((0, 0.001, 0.01, 0.05)):
            counts[i] += r > threshold
    assert (found.images, found.clean) == (300, counts[0] / 300)
    assert list(found.certified.values()) == pytest.approx([c / 300 for c in counts[1:]], abs=1.1 / 300)
    assert found.score == found.certified["0.001"]
    assert 0 < counts[3] < counts[0] < 300


def test_the_constant_before_the_head():
    torch.manual_seed(0)
    sizes = dict(depth=1, channels=16, pool=2, depth_linear=1, features=16)
    assert lipschitz_estimate(lipflow.build("cpl-digits", **sizes)) == 1
    assert lipschitz_estimate(lipflow.build("cpl-digits", std=0.25, **sizes)) == 4
    assert lipschitz_estimate(lipflow.build("cpl-digits", h=0.1, **sizes)) == 1
    relaxed = lipflow.build("cpl-digits", h=20.0, **sizes)
    bound = lipflow.lipschitz_bound(relaxed).lipschitz
    assert 1 < lipschitz_estimate(relaxed) <= bound
    assert math.isclose(lipschitz_estimate(relaxed), bound, rel_tol=0.05)
