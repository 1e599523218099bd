"""Folding: constants against exact answers, pairs of classes, domains, and networks without classes."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import lipflow
from lipflow import LoweringError, lipschitz_bound
from lipflow.graph import certified, fold, lower
from lipflow.graph.fold import box, row_distances
from lipflow.operators import norm_bound
from tests.graph.test_rules import Calls, constant


def folded(function, shape=(4,)):
    return fold(lower(Calls(function), shape), norm_bound)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_a_chain_folds_to_the_product_and_the_weighted_sum(pairs):
    """L = Π Lᵢ and ε = Σ εᵢ Π_{j>i} Lⱼ: small integers are exact in float64."""
    layers = [lipflow.Assume(nn.Identity(), bound=factor, tolerance=error) for factor, error in pairs]
    total = math.prod(factor for factor, _ in pairs)
    error = sum(e * math.prod(factor for factor, _ in pairs[i + 1 :]) for i, (_, e) in enumerate(pairs))
    assert lipschitz_bound(nn.Sequential(*layers), (3,)) == (total, error)


def test_shared_values_count_once_for_each_use():
    assert folded(lambda x: x + torch.relu(x) + x.abs()).lipschitz == 3
    assert folded(lambda x: (torch.relu(x) + x) / 2).lipschitz == 1
    assert folded(lambda x: torch.cat([x, torch.relu(x)], 1)).lipschitz == pytest.approx(math.sqrt(2), rel=1e-9)
    assert folded(lambda x: torch.cat([x, x, torch.relu(x)], 1)).lipschitz == pytest.approx(math.sqrt(3), rel=1e-9)
    assert (
        folded(lambda x: torch.cat([torch.relu(x), constant(2, 3)[:1].expand(len(x), -1).to(x.dtype)], 1)).lipschitz
        == 1
    )


def test_a_residual_network_of_shared_vertices():
    """Each of ten blocks (x + f(x))/2 has L ≤ 1; by paths there are 2¹⁰ of them."""

    def function(x):
        for _ in range(10):
            x = (x + torch.relu(x)) / 2
        return x

    graph = lower(Calls(function), (4,))
    assert len(graph.vertices) == 21
    assert fold(graph, norm_bound).lipschitz == 1


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
    head = HEADS[name]
    matrix = head(torch.eye(4, dtype=torch.float64)) - head(torch.zeros(1, 4, dtype=torch.float64))
    exact, found = exact_pairs(matrix.T), folded(head).pairs
    assert bool((found >= exact * (1 - 1e-13)).all())
    assert bool((found <= exact * (1 + 1e-8) + 1e-12).all())


def test_pairs_before_something_nonlinear_take_its_constant():
    pairs = folded(lambda x: F.linear(torch.relu(3 * x), constant(5, 4))).pairs
    torch.testing.assert_close(pairs, 3 * exact_pairs(constant(5, 4)), rtol=1e-8, atol=0)


def test_pairs_of_a_sum_add_over_its_terms():
    head = constant(3, 4)
    pairs = folded(lambda x: F.linear((torch.relu(x) + x.abs()) / 2, head)).pairs
    torch.testing.assert_close(pairs, exact_pairs(head), rtol=1e-8, atol=0)


def test_constants_do_not_tell_classes_apart():
    pairs = folded(lambda x: torch.relu(x) + constant(4)).pairs
    assert float(pairs[0, 1]) == pytest.approx(math.sqrt(2), rel=1e-9)


def test_rows_of_any_size_have_distances_from_above():
    for scale in (1e-300, 1e-160, 1.0, 1e160, 1e300):
        rows = scale * constant(4, 7)
        found = row_distances(rows)
        for i, j in itertools.product(range(4), range(4)):
            pairs = zip(rows[i].tolist(), rows[j].tolist(), strict=True)
            assert Fraction(float(found[i, j])) ** 2 >= sum((Fraction(a) - Fraction(b)) ** 2 for a, b in pairs)


# Domains


def test_a_box_is_covered_by_its_centre_and_radius():
    for low, high in ((0.0, 1.0), (-3.0, 0.1), (0.1, 0.3), (1e-300, 1e300 / 1e30)):
        centre, radius = box((low, high), (3, 2))
        for corner in (low, high):
            assert 6 * (Fraction(corner) - Fraction(centre)) ** 2 <= radius**2


@pytest.mark.parametrize("domain", [(1.0, 0.0), (0.0, 0.0), (0.0, math.inf), (math.nan, 1.0), (0.0, 1e300)])
def test_what_is_no_domain_is_refused(domain):
    with pytest.raises(ValueError, match="domain is"):
        lipflow.freeze(nn.Linear(3, 2), in_shape=(3,), domain=domain)


def test_certificates_of_another_domain():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
    unit, wide = (lipflow.freeze(model, in_shape=(3,), domain=d) for d in ((0.0, 1.0), (-2.0, 2.0)))
    assert wide.rounding > unit.rounding
    x = torch.tensor([[-1.5, 2.0, 0.3]])
    assert lipflow.certify(wide, x).radius.shape == (1,)
    with pytest.raises(ValueError, match=r"pixels in \[0, 1\]"):
        lipflow.certify(unit, x)
    with pytest.raises(ValueError, match=r"pixels in \[-2, 2\]"):
        lipflow.certify(wide, 2 * x)
    half = lipflow.freeze(model, in_shape=(3,), domain=(0.0, 0.5))
    with pytest.raises(ValueError, match="bytes k are read as k/255"):
        lipflow.certify(half, torch.zeros(1, 3, dtype=torch.uint8))


# Networks that are no classifiers


def test_a_network_without_classes_has_l_and_e():
    frozen = lipflow.freeze(nn.Conv2d(1, 1, 3, padding=1), in_shape=(1, 5, 5))
    assert frozen.classes == 0
    assert frozen(torch.rand(2, 1, 5, 5)).shape == (2, 1, 5, 5)
    assert 0 < frozen.rounding < 1e-13
    with pytest.raises(ValueError, match="certify takes a classifier"):
        lipflow.certify(frozen, torch.rand(2, 1, 5, 5))


def test_numbers_beyond_float64_are_refused():
    layers = [nn.Linear(2, 2) for _ in range(8)]
    for layer in layers:
        layer.weight = nn.Parameter(1e150 * torch.eye(2, dtype=torch.float64))
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
    with pytest.raises(LoweringError, match="not finite"):
        lipflow.freeze(model, in_shape=(2,))


def test_estimates_are_below_bounds():
    torch.manual_seed(0)
    network = lipflow.build("cpl-digits", lln=True, h=1.5)
    graph = lower(network, network.in_shape, live=True)
    below, above = fold(graph, lipflow.norm_estimate), fold(graph, norm_bound)
    assert below.lipschitz <= above.lipschitz
    assert bool((below.pairs <= above.pairs).all())


def test_a_certified_graph_computes_the_same():
    torch.manual_seed(0)
    network = lipflow.build("cpl-digits", h=0.5)
    graph = lower(network, network.in_shape)
    x = torch.rand(3, *network.in_shape, dtype=torch.float64)
    torch.testing.assert_close(certified(graph).run(x), graph.run(x), rtol=1e-12, atol=1e-12)
