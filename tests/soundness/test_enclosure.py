"""Enclosure: programs stay within E of the exact map, computed in rationals, for every kind of layer.

L, reaches and pair bounds are never below the true values: for layers, for single primitives, and for graphs with
shared vertices.
"""

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import permutations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lipflow
from lipflow import check
from lipflow.graph import Graph
from lipflow.graph.file import describe
from lipflow.node import Vertex
from lipflow.operators import ConvOperator, DenseOperator
from lipflow.operators.certified import CertifiedOperator, certified_operator
from lipflow.primitives import (
    KINDS,
    NONLINEARITIES,
    Affine,
    AvgPool,
    Constant,
    Descent,
    Gather,
    GroupSort,
    Householder,
    Input,
    MaxPool,
    Pointwise,
    Primitive,
    Proximal,
    Scale,
    Sum,
    TruncatedExponential,
)
from tests import contract
from tests.contract import FREEZABLE
from tests.soundness import exact, graphs
from tests.soundness.forging import certificate, changed, claims_of, derived, rejected, sign
from tests.soundness.graphs import MODULES, Draw, Shape, points, random_graph, rebuilt, wired

ROOT = Path(__file__).parents[2]
CLOSE = 1e-9  # relative error of float64 Jacobians


def _within(frozen: lipflow.Frozen, x: Tensor, network: check.Network | None = None) -> bool:
    """Whether lipflow, and the checker if it is given, are within E of the exact map."""
    programs = [lambda x: frozen(x), *([lambda x: network.values(x.numpy())[-1]] if network else [])]
    true, bound = exact.of(frozen)(exact.rational(x)), Fraction(frozen.rounding) + exact.NEGLIGIBLE
    return all(exact.square(exact.rational(run(x[None])[0]) - true) <= bound**2 for run in programs)


def _reaches_hold(frozen: lipflow.Frozen, count: int = 20) -> None:
    """No value has a norm above its reach in the ledger, inside of the domain and at its corners."""
    for row, value in zip(frozen.ledger, frozen.graph.values(points(frozen, count)), strict=True):
        assert float(value.flatten(1).norm(dim=1).max()) <= row.reach, row


def test_every_primitive_has_both_twins_and_cases():
    """In `check.py`, in `exact.py`, and for each value of its parameters in SMALL."""
    primitives = [triple(make(Draw(torch.Generator().manual_seed(0))), shapes).exact for make, shapes in SMALL.values()]
    assert {*check.KINDS} == {*KINDS} == {"input", *exact.RUN}
    assert {"input", *(p.kind for p in primitives)} == {*KINDS}
    operators = {(p.op["kind"], p.op["adjoint"]) for p in primitives if hasattr(p, "op")}
    assert operators == {*product(["matrix", "convolution"], [False, True]), ("fourier", False)}
    geometries = [p.op["geometry"] for p in primitives if hasattr(p, "op") and p.op["kind"] == "convolution"]
    for (kind, parameter), values in PARAMETERS.items():
        assert values <= {getattr(p, parameter) for p in primitives if p.kind == kind}, (kind, parameter)
    for kind in ("affine", "descent", "proximal"):
        assert {p.bias is None for p in primitives if p.kind == kind} == {True, False}
    assert {g["padding_mode"] for g in geometries} == {"zeros", "circular"}
    for parameter in ("stride", "dilation", "groups"):
        assert any(g[parameter] not in (1, [1, 1]) for g in geometries), parameter


def test_the_exact_maps_are_independent():
    """They are computed without lipflow and torch, from the file of a network."""
    code = "import sys; from tests.soundness import exact; assert not {'lipflow', 'torch'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# Whole networks, over the box


SMALL_NETWORKS = ["cpl dense", "cpl conv", "proximal dense", "soc conv", "mirrored", "cayley conv"]
OVER = [
    *((name, (0.0, 1.0)) for name in FREEZABLE),
    *((name, domain) for domain in ((-1.0, 1.0), (-1e6, 3.0)) for name in SMALL_NETWORKS),
]


@pytest.mark.parametrize(("name", "domain"), OVER, ids=str)
def test_layers_stay_within_their_bound(name, domain):
    """At a point inside of the domain, at a corner, and at bytes."""
    shape = contract.LAYERS[name].shape
    frozen = lipflow.freeze(nn.Sequential(contract.make(name, trained=True), nn.Flatten()), shape, domain)
    assert frozen.domain == domain
    bytes_ = torch.randint(256, shape, generator=torch.Generator().manual_seed(0)).to(torch.float64) / 255
    images = [*points(frozen, 2)]
    if domain == (0.0, 1.0):  # exact iterations take long
        images = images[:1] if graphs.primitives(frozen, "proximal") else [*images, bytes_]
    network = derived(frozen)[0]
    assert all(_within(frozen, x, network) for x in images)


def test_a_reflection_is_within_its_bound_of_the_exact_solution():
    """The exact map of Midpoint is the solution: a longer exact iteration must stay within E, too."""
    layer = lipflow.Flow(lipflow.ConvexPotential(lipflow.DenseWeight(3, 4)), lipflow.Midpoint(2.0))
    frozen = lipflow.freeze(nn.Sequential(layer).double(), in_shape=(3,))
    x = torch.rand(3, dtype=torch.float64)
    short, long = exact.off(frozen, x), exact.off(frozen, x, longer=4)
    assert short < long <= Fraction(frozen.rounding) ** 2


def test_the_trained_network_stays_within_its_bound(trained):
    off, bound = exact.off(trained.frozen, trained.x[0]), trained.frozen.rounding
    print(f"|executed - exact| = {math.sqrt(off):.3g}, E = {bound:.3g}")
    assert off <= Fraction(bound) ** 2
    assert bound < 1e6 * math.sqrt(off), "the bound is too loose"


def test_errors_are_carried_on_by_the_constants_of_later_layers():
    """1e6 + x - 1e6 loses digits, and a layer of norm 1000 multiplies the error by 1000."""
    layers = [nn.Linear(2, 2) for _ in range(3)]
    for layer, gain, bias in zip(layers, (1.0, 1.0, 1000.0), (1e6, -1e6, 0.0), strict=True):
        layer.weight = nn.Parameter(gain * torch.eye(2))
        layer.bias = nn.Parameter(torch.full((2,), bias))
    first, second, last = layers
    frozen = lipflow.freeze(nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last), in_shape=(2,))
    x = torch.tensor([0.3, 0.7], dtype=torch.float64)
    off = exact.off(frozen, x)
    assert off <= Fraction(frozen.rounding) ** 2
    assert math.sqrt(off) > sum(row.rounding for row in frozen.ledger), "the example does not test the constants"


@pytest.mark.parametrize("domain", [(0.0, 1.0), (-20.0, 3.0)], ids=str)
@pytest.mark.parametrize("name", FREEZABLE)
def test_reaches_of_layers_hold_over_the_domain(name, domain):
    layers = lipflow.blocks.Normalize(0.5), contract.make(name, trained=True), nn.Flatten()
    _reaches_hold(lipflow.freeze(nn.Sequential(*layers), contract.LAYERS[name].shape, domain))


def test_reaches_include_rounding():
    """x + 2⁵² - 2⁵² is computed as 0 at the centre ½ and as 1 at the corner 1, though L·r = ½."""
    bias = Constant(torch.full((1,), 2.0**52, dtype=torch.float64))
    steps = (bias, ()), (Sum([1.0, 1.0]), (0, 1)), (Sum([1.0, -1.0]), (2, 1))
    frozen = wired((1,), *steps)
    assert frozen(torch.tensor([[0.5], [1.0]])).flatten().tolist() == [0.0, 1.0]
    assert frozen.ledger[-1].reach >= 1


def test_a_bias_counts_at_every_position():
    """One bias on 16 × 16 pixels, with the largest possible rounding error: x + 2⁵² loses up to ½."""
    layer = nn.Conv2d(1, 1, 1).double()
    layer.weight = nn.Parameter(torch.ones(1, 1, 1, 1, dtype=torch.float64))
    layer.bias = nn.Parameter(torch.full((1,), 2.0**52, dtype=torch.float64))
    frozen = lipflow.freeze(nn.Sequential(layer, nn.Flatten()), in_shape=(1, 16, 16))
    assert exact.off(frozen, torch.full((1, 16, 16), 0.499, dtype=torch.float64)) <= Fraction(frozen.rounding) ** 2


# Each primitive by itself, on inputs of known norm: the bound holds and is not too loose


def _dense(rows: int, columns: int, g: Draw, scale: float = 1.0) -> CertifiedOperator:
    return certified_operator(DenseOperator(scale * g.normal(rows, columns)))


def _conv(shape: Shape, g: Draw, in_size: tuple[int, int], **geometry) -> CertifiedOperator:
    return certified_operator(ConvOperator(g.normal(*shape), in_size, **geometry))


def _affine(op: CertifiedOperator, g: Draw, bias: float = 1.0) -> Affine:
    return Affine(op, bias * g.normal(op.out_shape[0]))


def _descent(op: CertifiedOperator, g: Draw, name: str = "relu", bias: float = 1.0) -> Descent:
    h = 2 / op.norm**2 * (1 - 2.0**-30)
    return Descent(op, bias * g.normal(op.out_shape[0]), NONLINEARITIES[name], h)


def _proximal(op: CertifiedOperator, g: Draw, reflect: bool, bias: bool = True, sigma: str = "relu") -> Proximal:
    tau = 2 / (2 + op.norm**2) * (1 - 2.0**-30)
    return Proximal(op, g.normal(op.out_shape[0]) if bias else None, NONLINEARITIES[sigma], 1.0, tau, 20, reflect)


def _gather(index: Sequence, *sizes: int) -> Gather:
    return Gather(torch.tensor(index), list(sizes))


Make = Callable[[Draw], Primitive]
Case = tuple[Make, tuple[Shape, ...]]  # a primitive, and the shapes of its inputs
SMALL: dict[str, Case] = {
    "affine, 1 × 1": (lambda g: _affine(_dense(1, 1, g), g), ((1,),)),
    "affine, 2 × 3": (lambda g: _affine(_dense(2, 3, g), g), ((3,),)),
    "affine, no bias": (lambda g: Affine(_dense(2, 3, g), None), ((3,),)),
    "affine, tiny": (lambda g: Affine(_dense(2, 3, g, 1e-320), torch.zeros(2, dtype=torch.float64)), ((3,),)),
    "affine, huge bias": (lambda g: _affine(_dense(2, 3, g), g, 1e9), ((3,),)),
    "affine, convolution": (lambda g: _affine(_conv((2, 1, 2, 2), g, (2, 3)), g), ((1, 2, 3),)),
    "affine, dilated, grouped": (
        lambda g: _affine(_conv((4, 1, 2, 2), g, (3, 4), padding=1, dilation=2, groups=2), g),
        ((2, 3, 4),),
    ),
    "affine, circular, strided": (
        lambda g: _affine(_conv((2, 1, 3, 2), g, (3, 4), stride=2, padding_mode="circular"), g),
        ((1, 3, 4),),
    ),
    "affine, few outputs": (lambda g: _affine(_conv((1, 3, 2, 1), g, (2, 2)), g), ((3, 2, 2),)),
    "affine, many inputs": (lambda g: _affine(_conv((2, 7, 2, 1), g, (2, 2)), g), ((7, 2, 2),)),
    "affine, many outputs": (lambda g: _affine(_conv((7, 2, 2, 1), g, (2, 2)), g), ((2, 2, 2),)),
    "affine, transposed matrix": (lambda g: _affine(_dense(3, 2, g).certified_adjoint(), g), ((3,),)),
    "affine, transposed": (
        lambda g: _affine(_conv((2, 3, 2, 2), g, (4, 3), padding=0, stride=2).certified_adjoint(), g),
        ((2, 2, 1),),
    ),
    "affine, transposed, circular": (
        lambda g: Affine(_conv((2, 1, 3, 2), g, (2, 2), padding=2, padding_mode="circular").certified_adjoint(), None),
        ((2, 4, 5),),
    ),
    "affine, Fourier": (lambda g: Affine(graphs.fourier(g, (2, 2, 3)), None), ((2, 2, 3),)),
    "affine, Fourier, biased": (lambda g: _affine(graphs.fourier(g, (1, 2, 2)), g), ((1, 2, 2),)),
    "affine, Fourier, one pixel": (lambda g: Affine(graphs.fourier(g, (1, 1, 1)), None), ((1, 1, 1),)),
    "descent, 1 × 1": (lambda g: _descent(_dense(1, 1, g), g), ((1,),)),
    "descent, no bias": (lambda g: replace(_descent(_dense(3, 2, g), g), bias=None), ((2,),)),
    "descent, hardtanh": (lambda g: _descent(_dense(3, 2, g), g, "hardtanh"), ((2,),)),
    "descent, huge bias": (lambda g: _descent(_dense(3, 2, g), g, bias=1e9), ((2,),)),
    "descent, small weights": (lambda g: _descent(_dense(3, 2, g, 1e-150), g, bias=1e-150), ((2,),)),
    "descent, large weights": (lambda g: _descent(_dense(3, 2, g, 1e100), g, bias=1e100), ((2,),)),
    "descent, convolution": (lambda g: _descent(_conv((2, 1, 3, 3), g, (3, 2)), g), ((1, 3, 2),)),
    "descent, transposed": (
        lambda g: _descent(_conv((1, 2, 2, 2), g, (4, 3), padding=0).certified_adjoint(), g),
        ((1, 3, 2),),
    ),
    "descent, circular": (
        lambda g: _descent(_conv((2, 1, 3, 2), g, (2, 2), padding=2, padding_mode="circular"), g),
        ((1, 2, 2),),
    ),
    "descent, strided": (lambda g: _descent(_conv((1, 2, 3, 2), g, (4, 3), stride=(2, 3)), g), ((2, 4, 3),)),
    "descent, dilated, grouped": (
        lambda g: _descent(_conv((4, 1, 2, 2), g, (3, 3), padding=0, dilation=2, groups=2), g),
        ((2, 3, 3),),
    ),
    "descent, relaxed": (lambda g: replace(d := _descent(_dense(3, 2, g), g), h=1.6 * d.h), ((2,),)),
    "proximal": (lambda g: _proximal(_dense(3, 2, g), g, False), ((2,),)),
    "proximal, no bias": (lambda g: _proximal(_dense(3, 2, g), g, False, bias=False), ((2,),)),
    "proximal, reflected": (lambda g: _proximal(_dense(3, 2, g), g, True), ((2,),)),
    "proximal, hardtanh": (lambda g: _proximal(_dense(3, 2, g), g, False, sigma="hardtanh"), ((2,),)),
    "proximal, convolution": (lambda g: _proximal(_conv((2, 1, 2, 2), g, (2, 2), padding=0), g, False), ((1, 2, 2),)),
    "series": (lambda g: TruncatedExponential(graphs.skew(g, (3,)), 0.7, 6), ((3,),)),
    "series, 2 terms": (lambda g: TruncatedExponential(graphs.skew(g, (3,)), 0.7, 2), ((3,),)),
    "series, 1 term": (lambda g: TruncatedExponential(graphs.skew(g, (3,)), 0.7, 1), ((3,),)),
    "series, convolution": (lambda g: TruncatedExponential(graphs.skew(g, (2, 2, 3)), 0.7, 6), ((2, 2, 3),)),
    "constant": (lambda g: Constant(g.normal(2, 3)), ()),
    "gather": (lambda g: _gather([[2, 0], [-1, 1]], 3), ((3,),)),
    "gather, in order": (lambda g: _gather([[0, 1, 2, 3]], 4), ((2, 2),)),
    "gather, space to depth": (
        lambda g: Gather(torch.nn.functional.pixel_unshuffle(torch.arange(8).reshape(1, 2, 4), 2), [8]),
        ((1, 2, 4),),
    ),
    "gather, repeated": (lambda g: _gather([0, 2, 2, -1, 2, 1], 3), ((3,),)),
    "gather, of three": (lambda g: _gather([[4, 0], [2, 3], [5, -1]], 3, 1, 2), ((3,), (1,), (2, 1))),
    "gather, repeated, of two": (lambda g: _gather([3, 3, 0, 1, 3, 1, -1, 0, 3], 2, 3), ((2,), (3,))),
    "gather, of one of two": (lambda g: _gather([3, 2], 2, 2), ((2,), (2,))),
    "sum": (lambda g: Sum([1.0, 1.0]), ((3,), (3,))),
    "sum, odd": (lambda g: Sum([0.3, -1.7, 1 / 3, 1.0]), ((2, 1, 2),) * 4),
    "sum, powers of two": (lambda g: Sum([0.5, -4.0, 1.0]), ((3,),) * 3),
    "sum, one term": (lambda g: Sum([-0.1]), ((3,),)),
    "sum, of nothing": (lambda g: Sum([0.0, 0.7]), ((3,), (3,))),
    "scale, by channel": (lambda g: Scale(3 * g.normal(2)), ((2, 2, 1),)),
    "scale, by entry": (lambda g: Scale(g.normal(2, 1, 3)), ((2, 1, 3),)),
    "scale, of a vector": (lambda g: Scale(1e-3 * g.normal(4)), ((4,),)),
    "pointwise, relu": (lambda g: Pointwise("relu"), ((3,),)),
    "pointwise, abs": (lambda g: Pointwise("abs"), ((3, 1),)),
    "pointwise, hardtanh": (lambda g: Pointwise("hardtanh"), ((3,),)),
    "group_sort": (lambda g: GroupSort(2), ((4,),)),
    "group_sort, by three": (lambda g: GroupSort(3), ((6, 1, 2),)),
    "householder": (lambda g: graphs.householder(g, (2,)), ((2,),)),
    "householder, of images": (lambda g: graphs.householder(g, (4,)), ((4, 2, 1),)),
    "householder, not of unit length": (lambda g: Householder(g.normal(2), g.normal(2)), ((4,),)),
    "avg_pool": (lambda g: AvgPool((2, 2), 2.0), ((1, 2, 3),)),
    "avg_pool, thirds": (lambda g: AvgPool((3, 3), 9.0), ((1, 3, 3),)),
    "avg_pool, rows": (lambda g: AvgPool((1, 3), 0.7), ((2, 2, 4),)),
    "max_pool": (lambda g: MaxPool((2, 2), (1, 1), (1, 0), (1, 1)), ((1, 3, 3),)),
    "max_pool, dilated, strided": (lambda g: MaxPool((3, 2), (1, 2), (1, 1), (1, 2)), ((2, 4, 4),)),
}
PARAMETERS = {  # values that SMALL must have
    ("descent", "sigma"): {"relu", "hardtanh"},
    ("proximal", "sigma"): {"relu", "hardtanh"},
    ("proximal", "reflect"): {True, False},
    ("pointwise", "name"): {*check.POINTWISE},
    ("series", "terms"): {1, 2, 6},
    ("group_sort", "group"): {2, 3},
}
EXACT = {"constant", "gather", "pointwise", "group_sort", "max_pool"}  # kinds that do not round
# Iterations that stop early, underflow, and the identity.
LOOSE = {"proximal, reflected", "affine, tiny", "descent, small weights", "series, 1 term"}
LOOSENESS = 1000.0  # the greatest ratio of any other bound to the worst error found


class Triple(NamedTuple):
    """A primitive of lipflow, of the checker, and in exact arithmetic; the last two as a file describes it."""

    ours: Primitive
    checkers: check.Primitive
    exact: Any


def triple(p: Primitive, shapes: Sequence[Shape]) -> Triple:
    inputs = tuple(Vertex(Input(shape), (), shape, "") for shape in shapes)
    description, tensors = describe(Graph((*inputs, Vertex(p, inputs, p.out_shape(*shapes), ""))), (0.0, 1.0))
    description, arrays = json.loads(json.dumps(description)), {name: t.numpy() for name, t in tensors.items()}
    op = getattr(p, "op", None)
    claim = op.proof if isinstance(op, CertifiedOperator) else {}
    twin = check.KINDS[p.kind](description["primitives"][-1], arrays, claim, p.kind)
    return Triple(p, twin, exact.Network(description, arrays).primitives[-1])


SCALES = 1.0, None, 1e-303, 1e60  # of inputs; None: random powers of ten


def worst_ratio(name: str, trials: int) -> float:
    """The greatest ‖computed - exact‖ / bound found, in both programs, which must not exceed 1."""
    make, shapes = SMALL[name]
    g = Draw(torch.Generator().manual_seed(len(name)))
    worst = 0.0
    for trial in range(trials):
        p, twin, true = triple(make(g), shapes)
        scales = [SCALES[trial % 4] or 10.0 ** (3 * g.normal().item()) for _ in shapes]
        xs = [scale * g.normal(2, *shape) for scale, shape in zip(scales, shapes, strict=True)]
        rows = [[exact.rational(row) for row in x] for x in xs]
        reaches = [max(exact.root(exact.square(row)) for row in x) for x in rows]
        computed = p.run(*xs)
        entries = max(t[0].numel() for t in (computed, *xs))
        values = computed, twin.run(*(x.numpy() for x in xs))
        bounds = p.rounding(entries, *reaches), twin.error(entries, *reaches)
        for i in range(len(computed)):
            right = exact.run(true, *(x[i] for x in rows))
            for value, bound in zip(values, bounds, strict=True):
                off = exact.square(exact.rational(value[i]) - right)
                bound += exact.NEGLIGIBLE * (p.kind == "proximal" or "Fourier" in name)
                assert off <= bound**2, f"{name}: off by {math.sqrt(off)}, above {float(bound)}"
                worst = max(worst, math.sqrt(off / bound**2) if bound else 0.0)
    return worst


@pytest.mark.parametrize("name", SMALL)
def test_rounding_error_of_a_primitive_is_within_its_bound(name):
    worst = worst_ratio(name, 40)
    print(f"{name}: the worst error is {worst:.3g} of its bound")
    if SMALL[name][0](Draw(torch.Generator())).kind in EXACT:
        assert worst == 0
    elif name not in LOOSE:
        assert worst > 1 / LOOSENESS


@pytest.mark.campaign
@pytest.mark.parametrize("name", SMALL)
def test_rounding_error_of_a_primitive_is_within_its_bound_in_a_campaign(name):
    print(f"{name}: the worst error is {worst_ratio(name, 1000):.3g} of its bound")


ATTAINED = {"affine", "gather", "sum", "scale", "avg_pool"}  # kinds whose constants are those of a linear map
NOT_ATTAINED = ("tiny", "circular", "Fourier")  # in the names of those whose norm bounds are above the SVD


def _greatest_steps(jacobians: list[np.ndarray], distances: Sequence[float], g: Draw) -> list[np.ndarray]:
    """δₖ with ‖δₖ‖ = dₖ for which ‖Σ Jₖδₖ‖ is the greatest found by gradient ascent from 5 starts."""
    best, found = -1.0, []
    for _ in range(5):
        steps = [g.normal(j.shape[1]).numpy() for j in jacobians]
        for _ in range(300):
            steps = [d * s / max(np.linalg.norm(s), 1e-300) for d, s in zip(distances, steps, strict=True)]
            total = np.sum([j @ s for j, s in zip(jacobians, steps, strict=True)], 0)
            if np.linalg.norm(total) > best:
                best, found = np.linalg.norm(total), steps
            steps = [j.T @ total + 1e-12 * s for j, s in zip(jacobians, steps, strict=True)]
    return found


@pytest.mark.parametrize("name", SMALL)
def test_lipschitz_of_a_primitive_is_an_upper_bound(name):
    """In both programs, for the exact derivatives and different distances; linear primitives attain it."""
    make, shapes = SMALL[name]
    g = Draw(torch.Generator().manual_seed(len(name)))
    for trial in range(4):
        p, twin, true = triple(make(g), shapes)
        if not shapes:
            assert p.lipschitz(_norm) == twin.lipschitz() == 0
            continue
        reflected = p.kind == "proximal" and true.reflect  # its constant is that of the solution
        slack = Fraction(1, 2**20 if reflected else 2**100) if p.kind == "proximal" else Fraction(0)
        xs = [exact.rational(3 * g.normal(*shape)) for shape in shapes]
        jacobians = exact.jacobians(lambda *xs, p=true, n=10 if reflected else 1: exact.run(p, *xs, longer=n), *xs)

        def bound(*distances: Fraction, p=p, twin=twin, slack=slack) -> Fraction:
            return min(Fraction(p.lipschitz(_norm, *distances)), Fraction(twin.lipschitz(*distances))) * (1 + slack)

        if len(shapes) == 1:
            assert exact.bounds_squared_norm(exact.exact(bound(Fraction(1))) ** 2, jacobians[0])
        distances = [[1.0] * 4, [0.3, 2.0, 1.0, 5.0]][trial % 2][: len(shapes)]
        steps = [exact.rational(step) for step in _greatest_steps(list(map(exact.floats, jacobians)), distances, g)]
        greatest = exact.square(np.sum([j @ step for j, step in zip(jacobians, steps, strict=True)], 0))
        limit = bound(*(exact.root(exact.square(step)) for step in steps))
        assert greatest <= limit**2, f"{name}: {math.sqrt(greatest)} is above {float(limit)}"
        if p.kind in ATTAINED and not any(word in name for word in NOT_ATTAINED):
            assert greatest >= limit**2 * (1 - Fraction(1, 5000)), f"{name}: {float(limit)} is not attained"


def _norm(op) -> float:
    return op.norm


# Pairs of classes, and modules with branches


def _jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The Jacobian at one input  # (classes, entries)."""
    found = torch.autograd.functional.jacobian(lambda v: function(v[None])[0], x)
    assert isinstance(found, Tensor)
    return found.flatten(1)


def _constants_hold(frozen: lipflow.Frozen, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """The norms of Jacobians are at most L, and the distances of two rows at most the bound of the pair."""
    for one in x:
        rows = _jacobian(function, one)
        assert float(torch.linalg.matrix_norm(rows, 2)) <= frozen.lipschitz * (1 + CLOSE)
        apart = torch.stack([(rows - row).norm(dim=1) for row in rows])
        assert bool((apart <= frozen.pair_bounds * (1 + CLOSE)).all()), f"{apart} is above {frozen.pair_bounds}"


@pytest.mark.parametrize("seed", range(40))
def test_pair_bounds_of_matrices_scales_sums_and_gathers_are_the_true_constants(seed):
    """Up to rounding, as rows are carried through all of them to the input."""
    frozen = random_graph(seed, graphs.EXACT_ROWS)
    (rows,) = exact.jacobians(exact.of(frozen), exact.rational(points(frozen, 2)[0]))
    for i, j in permutations(range(3), 2):
        true, bound = exact.square(rows[i] - rows[j]), Fraction(frozen.pair_bounds[i, j].item())
        assert true <= bound**2 <= true * (1 + Fraction(1, 10**8)) + Fraction(1, 10**20)


@pytest.mark.parametrize("name", [*MODULES, *range(40)])
def test_modules_with_branches_agree_with_their_frozen_networks(name):
    """And the constants hold for the module itself."""
    module, shape = graphs.module(name)
    for domain in ((0.0, 1.0), (-5.0, 2.0)):
        frozen = lipflow.freeze(module, shape, domain)
        x = points(frozen, 6)
        torch.testing.assert_close(frozen(x), module(x), rtol=CLOSE, atol=CLOSE)
        _reaches_hold(frozen)
        _constants_hold(frozen, module, x)
        assert all(_within(frozen, one) for one in x[[0, -1]])


def test_pair_bounds_include_the_rounding_of_rows():
    """The rows w·A and a permutation of the same products differ by rounding only."""
    g = Draw(torch.Generator().manual_seed(0))
    for size in (1.0, 1e-40):
        w, a, order = size * g.normal(1, 6), size * g.normal(6, 6), torch.tensor([3, 1, 5, 0, 2, 4])
        matrices = [graphs.matrix(m) for m in (a, a[order], w, w[:, order] * (1 + 2.0**-52))]
        places = (1,), (1,), (2,), (3,)
        steps = (Pointwise("relu"), (0,)), *zip(matrices, places, strict=True), (_gather([0, 1], 1, 1), (4, 5))
        frozen = wired((6,), *steps)
        rows = [exact.rational(m.op.weight) for m in matrices]
        true = exact.square(rows[2] @ rows[0] - rows[3] @ rows[1])
        assert Fraction(frozen.pair_bounds[0, 1].item()) ** 2 >= true > 0


CANCELLING = {  # x + 2⁻⁶⁰x - x, whose row is computed as 0
    "sum": ((Sum([1.0, 2.0**-60, -1.0]), (0, 0, 0)), (Gather(torch.tensor([0, -1]), [1]), (1,))),
    "gather": (
        (Gather(torch.tensor([0, 0, 0]), [1]), (0,)),
        (graphs.matrix(torch.tensor([[1.0, 2.0**-60, -1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)), (1,)),
    ),
}


@pytest.mark.parametrize("name", CANCELLING)
def test_pair_bounds_include_the_rounding_of_sums_of_rows(name, tmp_path):
    """In both programs."""
    frozen = wired((1,), *CANCELLING[name])
    assert frozen.pair_bounds[0, 1] >= 2.0**-60
    certificate(tmp_path, frozen, points(frozen, 2))
    assert not rejected(tmp_path)
    sign(tmp_path, changed(claims_of(tmp_path), ("pair_bounds", 0, 1), lambda bound: 2.0**-61))
    assert "pair bound" in rejected(tmp_path)


@pytest.mark.parametrize("flush", [False, True])
def test_pair_bounds_include_underflow_of_rows(flush):
    """Products of 2⁻¹⁰²³ in 99 columns may be flushed to 0, and act on features that are 2⁸⁹⁰-Lipschitz."""
    first = torch.full((2, 100), 2.0**-520, dtype=torch.float64)
    first[1], first[:, 0] = -first[1], 2.0**-490
    last = 2.0**-503 * torch.eye(2, dtype=torch.float64)
    torch.set_flush_denormal(flush)  # has no effect on some processors
    big = Scale(torch.full((100,), 2.0**890, dtype=torch.float64))
    frozen = graphs.chain((100,), big, Pointwise("relu"), graphs.matrix(first), graphs.matrix(last))
    torch.set_flush_denormal(False)
    rows = exact.rational(last) @ exact.rational(first)
    true = exact.square(rows[0] - rows[1]) * Fraction(2) ** (2 * 890)
    assert Fraction(frozen.pair_bounds[0, 1].item()) ** 2 >= true


def test_scores_that_do_not_depend_on_the_images_have_the_constant_0():
    frozen = wired((3,), (Constant(torch.tensor([1.0, 3.0], dtype=torch.float64)), ()))
    assert frozen.lipschitz == 0
    assert frozen(torch.rand(4, 3)).tolist() == [[1.0, 3.0]] * 4
    assert len(lipflow.certify(frozen, torch.rand(4, 3))) == 4


# The same map, computed in another order, gives the same scores within 2E


def _permuted(frozen: lipflow.Frozen, seed: int) -> lipflow.Frozen:
    """The same map with permuted hidden units, so that sums have another order."""
    generator = torch.Generator().manual_seed(seed)

    def permute(p: Primitive) -> Primitive:
        if not isinstance(p, Descent):
            return p
        order, op = torch.randperm(p.op.out_shape[0], generator=generator), p.op.op
        return replace(p, op=certified_operator(op.with_weight(op.weight[order])), bias=p.bias[order])

    return rebuilt(frozen, permute)


def test_scores_computed_in_other_orders_are_within_2E(trained):
    frozen, x = trained.frozen, trained.x[:40]
    together = frozen(x)
    singly = torch.cat([frozen(one[None]) for one in x])
    torch.set_num_threads(2)
    threads = frozen(x)
    torch.set_num_threads(1)
    last = frozen(x.contiguous(memory_format=torch.channels_last))
    permuted = [_permuted(frozen, seed)(x) for seed in range(3)]
    turned = frozen(x.flip(0)).flip(0)
    moves = [float((together - other).norm(dim=1).max()) for other in (singly, threads, last, turned, *permuted)]
    assert max(moves) <= 2 * frozen.rounding
    assert max(moves) > 0, "all orders were the same"


def test_frozen_networks_share_no_weights_with_live_ones(trained):
    live = copy.deepcopy(trained.live)
    frozen = lipflow.freeze(live)
    before, digest = frozen(trained.x[:3]), frozen.digest
    with torch.no_grad():
        for tensor in (*live.parameters(), *live.buffers()):
            tensor.mul_(3).add_(1)
    assert torch.equal(frozen(trained.x[:3]), before)
    assert frozen.digest == digest
