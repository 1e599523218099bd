"""Random graphs of all primitives against exact arithmetic: every vertex, in both programs.

The exact maps are rational (tests/soundness/exact.py) and share no code with lipflow and its checker.
"""

import math
import time
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import lipflow
from lipflow import check
from lipflow.graph import fold
from lipflow.node import LoweringError
from lipflow.primitives import KINDS
from tests import campaigns
from tests.soundness import exact, graphs
from tests.soundness.forging import derived
from tests.soundness.graphs import extremes, points, random_graph

FAMILIES = {"all": graphs.ALL, "linear": graphs.LINEAR, "matrices": graphs.EXACT_ROWS}


class Outcome(NamedTuple):
    """Numbers of values that were compared, of those above a tenth of their bound, and of violations."""

    values: int
    large: int
    violations: int
    worst: float  # the greatest error/bound


def enclosure(frozen: lipflow.Frozen, inputs: Tensor) -> Outcome:
    """Compare every value of lipflow and of the checker with the exact one, and its norm with its reach."""
    network, _, errors = derived(frozen)
    stated = [Fraction(k.error) for k in fold(frozen.graph, lambda op: op.norm, frozen.domain, rounding=True).vertices]
    assert stated[-1] == Fraction(frozen.rounding)
    ratios, violations = [], 0
    for x in inputs:
        true = exact.of(frozen).values(exact.rational(x))
        programs = frozen.graph.values(x[None]), network.values(x.numpy()[None])
        for values, bounds in zip(programs, (stated, errors), strict=True):
            for row, value, right, bound in zip(frozen.ledger, values, true, bounds, strict=True):
                found = exact.rational(value[0])
                ratios.append(exact.square(found - right) / (bound + exact.NEGLIGIBLE) ** 2)
                violations += max(exact.square(found), exact.square(right)) > Fraction(row.reach) ** 2
    violations += sum(ratio > 1 for ratio in ratios)
    return Outcome(len(ratios), sum(ratio > Fraction(1, 100) for ratio in ratios), violations, math.sqrt(max(ratios)))


def constants_hold(frozen: lipflow.Frozen, x: Tensor) -> None:
    """L and the pair bounds of both programs are not below the norms of the exact derivatives at a point."""
    network, constants, _ = derived(frozen)
    (rows,) = exact.jacobians(exact.of(frozen), exact.rational(x))
    slack = 1 + Fraction(1, 2**100) * ("proximal" in exact.of(frozen).kinds())  # their iterates are rounded
    least = min(Fraction(frozen.lipschitz), constants[-1]) * slack
    assert exact.bounds_squared_norm(exact.exact(least) ** 2, rows)
    bounds = np.minimum(frozen.pair_bounds.numpy(), network.pair_bounds(constants))
    for i, j in np.argwhere(~np.eye(len(rows), dtype=bool)):
        assert exact.square(rows[i] - rows[j]) <= (Fraction(bounds[i, j]) * slack) ** 2


def inside(frozen: lipflow.Frozen) -> Tensor:
    """A random point, where no activation has a kink."""
    low, high = frozen.domain
    x = torch.rand(frozen.in_shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return low + (high - low) * x


def is_reflected(frozen: lipflow.Frozen) -> bool:
    """Whether a layer has the constant of the solution of an iteration that is cut short."""
    return any(p.kind == "proximal" and p.reflect for p in exact.of(frozen).primitives)


@pytest.mark.parametrize("seed", range(40))
def test_every_vertex_of_a_random_graph_is_within_its_bound(seed):
    """At random points, corners, the centre, zeros and tiny numbers."""
    frozen = random_graph(seed)
    found = enclosure(frozen, torch.cat([points(frozen, 2, seed), extremes(frozen, 2, seed)]))
    assert found.violations == 0
    assert torch.equal(frozen(points(frozen, 1)), [*frozen.graph.values(points(frozen, 1))][-1])
    assert [len(frozen(points(frozen, count))) for count in (0, 9)] == [0, 9]


def test_random_graphs_have_all_primitives():
    kinds = Counter(kind for seed in range(40) for kind in exact.of(random_graph(seed)).kinds())
    assert {*kinds} == {*KINDS} == {*check.KINDS}


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_constants_of_a_random_graph_are_not_below_the_true_ones(family, seed):
    frozen = random_graph(seed, FAMILIES[family])
    if not is_reflected(frozen):
        constants_hold(frozen, inside(frozen))


GRAPHS, POINTS = 2000, 4


@pytest.mark.campaign
def test_enclosure_of_thousands_of_random_graphs():
    start, total, violations, worst, large, refused = time.perf_counter(), 0, 0, 0.0, 0, 0
    for seed in range(1000, 1000 + GRAPHS):
        try:
            frozen = random_graph(seed)
        except LoweringError:  # its numbers may be too large or too small
            refused += 1
            continue
        found = enclosure(frozen, torch.cat([points(frozen, POINTS // 2, seed), extremes(frozen, POINTS // 2, seed)]))
        total, large, violations = total + found.values, large + found.large, violations + found.violations
        worst = max(worst, found.worst)
        if not is_reflected(frozen):
            constants_hold(frozen, inside(frozen))
    assert worst > 0.1, "the bounds are too loose for this search"
    campaigns.write(
        "exact arithmetic",
        "thousands_of_random_graphs",
        time.perf_counter() - start,
        done=f"{GRAPHS - refused:,} random graphs of all primitives (seeds from 1000), in lipflow and in the checker, "
        f"at {POINTS} points each: {total:,} values of vertices against exact rationals, with errors of at most "
        f"{worst:.3g} times their bound; and L and the pair bounds against the exact derivatives at a point",
        violations=violations,
        control=f"{large:,} of the values are off by more than a tenth of their bound",
    )
    assert violations == 0
