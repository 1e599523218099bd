"""`fold`: constants against exact answers, and pairs of classes."""

import math
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lipflow
from lipflow import LoweringError
from lipflow.graph import certified, fold, lower
from lipflow.graph.fold import box, row_distances
from lipflow.operators import norm_bound
from tests.graph.test_rules import constant
from tests.operators.geometry import affine_matrix
from tests.soundness.graphs import Calls


def folded(function):
    return fold(lower(Calls(function), (4,)), norm_bound)


def ten_averages(x):
    """Each (x + f(x))/2 has L ≤ 1. A sum over its 2¹⁰ paths would take too long."""
    for _ in range(10):
        x = (x + torch.relu(x)) / 2
    return x


SHARED = {
    "three terms": (lambda x: x + torch.relu(x) + x.abs(), 3),
    "ten averages": (ten_averages, 1),
    "side by side": (lambda x: torch.cat([x, torch.relu(x)], 1), math.sqrt(2)),
    "side by side, twice": (lambda x: torch.cat([x, x, torch.relu(x)], 1), math.sqrt(3)),
    "beside constants": (lambda x: torch.cat([torch.relu(x), constant(1, 3).expand(len(x), -1).to(x.dtype)], 1), 1),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_values_count_once_for_each_use(name):
    function, lipschitz = SHARED[name]
    assert folded(function).lipschitz == pytest.approx(lipschitz, rel=1e-9)


# Pairs of classes


def exact_pairs(matrix: torch.Tensor) -> torch.Tensor:
    return torch.cdist(matrix, matrix, compute_mode="donot_use_mm_for_euclid_dist")


HEADS = {
    "matrix": lambda x: F.linear(x, constant(5, 4), constant(5)),
    "truncation": lambda x: x[:, [2, 0, 1]],
    "zeros": lambda x: F.pad(x, (0, 1)),
    "scaled": lambda x: 3 * F.linear(x, constant(5, 4)) * constant(5),
    "mean over mirror images": lambda x: (F.linear(x, constant(3, 4)) + F.linear(x.flip(1), constant(3, 4))) / 2,
    "by two ways": lambda x: F.linear(torch.cat([x, -2 * x], 1), constant(3, 8)),
    "a matrix that widens and one that narrows": lambda x: F.linear(F.linear(x, constant(9, 4)), constant(3, 9)),
    "cancelling": lambda x: F.linear(x, constant(3, 4)) - x[:, :3] + x[:, 1:],
    "repeated": lambda x: x[:, [0, 0, 1]] + x[:, [1, 2, 2]],
}


@pytest.mark.parametrize("name", HEADS)
def test_pairs_of_a_linear_network_are_exact(name):
    exact, found = exact_pairs(affine_matrix(HEADS[name], (4,))), folded(HEADS[name]).pairs
    assert bool((found >= exact * (1 - 1e-13)).all())
    assert bool((found <= exact * (1 + 1e-8) + 1e-12).all())


NONLINEAR = {
    "scaled": (lambda x: torch.relu(3 * x), 3),
    "sum": (lambda x: (torch.relu(x) + x.abs()) / 2, 1),
    "shifted": (lambda x: torch.relu(x) + constant(4), 1),
}


@pytest.mark.parametrize("name", NONLINEAR)
def test_pairs_are_row_distances_times_the_constant_of_the_features(name):
    features, factor = NONLINEAR[name]
    found = folded(lambda x: F.linear(features(x), constant(5, 4))).pairs
    torch.testing.assert_close(found, factor * exact_pairs(constant(5, 4)), rtol=1e-8, atol=0)


@pytest.mark.parametrize("scale", [1.0, 1e-170, 1e-300, 1e150, 1e300])
def test_row_distances_are_above_the_exact_ones_and_tight(scale):
    rows = scale * torch.randn(5, 7, dtype=torch.float64)
    rows[1] = rows[0]
    rows[1, 3] += rows[0, 3].abs() * 1e-13
    rows[2, :5] = 0
    for a, distances in zip(rows.tolist(), row_distances(rows).tolist(), strict=True):
        for b, found in zip(rows.tolist(), distances, strict=True):
            exact = sum((Fraction(p) - Fraction(q)) ** 2 for p, q in zip(a, b, strict=True))
            assert Fraction(found) ** 2 >= exact
            if exact > Fraction(scale) ** 2 / 100:
                assert Fraction(found) ** 2 <= exact * (1 + Fraction(1, 10**12))


def test_row_distances_of_zeros_of_nan_and_of_squares_that_underflow():
    near = torch.tensor([[1.0, 0.0, 1e-170], [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert float(row_distances(near)[0, 1]) >= 1e-170
    assert not bool((row_distances(torch.zeros(3, 4, dtype=torch.float64)) > 1e-100).any())
    with pytest.raises(ValueError, match="NaN or infinite"):
        row_distances(torch.tensor([[math.nan], [0.0]]))


# Domains and networks


@pytest.mark.parametrize("domain", [(0.0, 1.0), (-3.0, 0.1), (0.1, 0.3), (1e-300, 1e270)])
def test_a_box_lies_in_its_ball(domain):
    centre, radius = box(domain, (3, 2))
    for corner in domain:
        assert 6 * (Fraction(corner) - Fraction(centre)) ** 2 <= radius**2


def test_numbers_beyond_float64_are_refused():
    linear = nn.Linear(2, 2)
    linear.weight = nn.Parameter(1e150 * torch.eye(2, dtype=torch.float64))
    with pytest.raises(LoweringError, match="infinite values on random images"):
        lipflow.freeze(nn.Sequential(*[linear, nn.ReLU()] * 8), in_shape=(2,))


def test_estimates_are_below_bounds_and_a_certified_graph_computes_the_same():
    network = lipflow.build("cpl-digits", lln=True, h=1.5)
    graph = lower(network, network.in_shape, live=True)
    below, above = fold(graph, lipflow.norm_estimate), fold(graph, norm_bound)
    assert below.lipschitz <= above.lipschitz
    assert bool((below.pairs <= above.pairs).all())
    x = torch.rand(3, *network.in_shape, dtype=torch.float64)
    torch.testing.assert_close(certified(graph).run(x), graph.run(x), rtol=1e-12, atol=1e-12)
