"""Estimated certified accuracy, against a loop over images."""

import pytest
import torch

import lipflow
from lipflow.data import load, to_unit
from lipflow.train.distributed import Ranks
from lipflow.train.evaluate import estimate, input_lipschitz, pair_estimates

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
    constants = pair_estimates(network)
    counts = [0] * 4
    for f, y in zip(logits.tolist(), split.labels.tolist(), strict=True):
        r = min((f[y] - f[j]) / float(constants[y, j]) for j in range(10) if j != y)
        for i, threshold in enumerate((0, 0.001, 0.01, 0.05)):
            counts[i] += r > threshold
    assert (found.images, found.clean) == (300, counts[0] / 300)
    assert list(found.certified.values()) == pytest.approx([c / 300 for c in counts[1:]], abs=1.1 / 300)
    assert found.score == found.certified["0.001"]
    assert 0 < counts[3] < counts[0] < 300


SIZES = dict(depth=1, channels=16, pool=2, depth_linear=1, features=16)


def before_the_head(network: lipflow.Network) -> float:
    """The estimated constant of what is before the head: pairs of classes over those of the head alone."""
    others = ~torch.eye(network.classes, dtype=torch.bool)
    ratios = pair_estimates(network)[others] / network.head.pair_constants().detach().double()[others]
    assert float(ratios.max()) == pytest.approx(float(ratios.min()), rel=1e-5)
    return float(ratios.max())


@pytest.mark.parametrize("lln", [False, True])
def test_the_constant_before_the_head(lln):
    torch.manual_seed(0)
    for sizes, constant in (({}, 1), ({"std": 0.25}, 4), ({"h": 0.1}, 1)):
        network = lipflow.build("cpl-digits", lln=lln, **sizes, **SIZES)
        assert before_the_head(network) == pytest.approx(constant, rel=1e-5)
        assert input_lipschitz(network) == (4 if "std" in sizes else 1)


def test_a_relaxed_layer_is_estimated_to_stretch():
    torch.manual_seed(0)
    relaxed = lipflow.build("cpl-digits", h=20.0, **SIZES)
    bound = lipflow.lipschitz_bound(relaxed).lipschitz
    assert 1 < before_the_head(relaxed) <= bound * (1 + 1e-9)
    assert before_the_head(relaxed) == pytest.approx(bound, rel=0.05)


def test_constants_beyond_float64_are_infinite():
    """The L of a relaxed network may overflow float64 in training; nothing is certified then."""
    network = lipflow.build("cpl-digits", h=20.0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter *= 1e30
    pairs = pair_estimates(network)
    assert bool((pairs[~torch.eye(10, dtype=torch.bool)] == torch.inf).all())
    assert not bool(pairs.diagonal().any())
