"""Estimated certified accuracy and its constants."""

import pytest
import torch

import lipflow
from lipflow.data import load, to_unit
from lipflow.train.distributed import Ranks
from lipflow.train.evaluate import estimate, pair_estimates

SIZES = dict(depth=1, channels=16, pool=2, depth_linear=1, features=16)


@pytest.mark.parametrize("sizes", [{}, {"lln": True}, {"std": 0.25}, {"h": 3.0}])
def test_estimate_counts_like_a_loop_over_images(sizes):
    network, split = lipflow.build("cpl-digits", **{**SIZES, "depth_linear": 2}, **sizes), load("digits").validation
    before = {k: v.clone() for k, v in network.state_dict().items()}
    found = estimate(network, split, ("0.001", "0.01", "0.05"), 77, Ranks(0, 1, torch.device("cpu")))
    assert network.training
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())

    logits, constants = network.eval()(to_unit(split.images)).double(), pair_estimates(network)
    counts = [0] * 4
    for f, y in zip(logits.tolist(), split.labels.tolist(), strict=True):
        r = min((f[y] - f[j]) / float(constants[y, j]) for j in range(10) if j != y)
        for i, threshold in enumerate((0, 0.001, 0.01, 0.05)):
            counts[i] += r > threshold
    assert (found.images, found.clean) == (300, counts[0] / 300)
    assert list(found.certified.values()) == pytest.approx([c / 300 for c in counts[1:]], abs=1.1 / 300)
    assert found.score == found.certified["0.001"]
    assert 0 < counts[3] < counts[0] < 300


def before_the_head(network: lipflow.Network) -> float:
    """The estimated constant of the layers before the head: pairs of classes over those of the head alone."""
    others = ~torch.eye(network.classes, dtype=torch.bool)
    ratios = pair_estimates(network)[others] / network.head.pair_constants().detach().double()[others]
    assert float(ratios.max()) == pytest.approx(float(ratios.min()), rel=1e-5)
    return float(ratios.max())


@pytest.mark.parametrize("lln", [False, True])
@pytest.mark.parametrize(("sizes", "constant"), [({}, 1), ({"std": 0.25}, 4), ({"h": 0.1}, 1)])
def test_pair_estimates_have_the_constant_of_the_input(lln, sizes, constant):
    network = lipflow.build("cpl-digits", lln=lln, **sizes, **SIZES)
    assert before_the_head(network) == pytest.approx(constant, rel=1e-5)
    torch.testing.assert_close(network.pair_constants(), constant * network.head.pair_constants())


def test_pair_estimates_of_a_relaxed_network_are_near_the_bound():
    network = lipflow.build("cpl-digits", h=20.0, **SIZES)
    bound = lipflow.lipschitz_bound(network).lipschitz
    assert 1 < before_the_head(network) <= bound * (1 + 1e-9)
    assert before_the_head(network) == pytest.approx(bound, rel=0.05)


def test_pair_estimates_beyond_float64_are_infinite():
    """The L of a relaxed network may overflow float64 in training; then nothing is certified."""
    network = lipflow.build("cpl-digits", h=20.0)
    for parameter in network.parameters():
        parameter.data *= 1e30
    pairs = pair_estimates(network)
    assert bool((pairs[~torch.eye(10, dtype=torch.bool)] == torch.inf).all())
    assert not bool(pairs.diagonal().any())
