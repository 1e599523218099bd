"""Enclosure: what runs is within E of the exact map, for every kind of layer; against rationals, not tolerances."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

import lipflow
from lipflow.frozen import PRIMITIVES, Primitive
from lipflow.frozen import primitive as prim
from lipflow.frozen.linear import Map
from lipflow.operators import Conv2d, Dense
from lipflow.rounding import sqrt_up
from tests import contract
from tests.frozen.test_network import FREEZABLE
from tests.soundness import exact


def _off(frozen: lipflow.Frozen, x: Tensor, longer: int = 1) -> Fraction:
    """‖executed - exact‖² on one input."""
    computed = exact.rational(frozen(x[None])[0])
    return exact.fraction(exact.square(computed - exact.network(frozen, exact.rational(x), longer)))


def test_every_primitive_has_an_exact_twin():
    assert {*exact.RUN, "mirror", "mean"} == set(PRIMITIVES)


# Whole networks, over the box


@pytest.mark.parametrize("name", FREEZABLE)
def test_networks_stay_within_their_bound(name):
    shape = contract.LAYERS[name].shape
    frozen = lipflow.freeze(nn.Sequential(contract.make(name, trained=True), nn.Flatten()), in_shape=shape)
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    bytes_ = torch.randint(256, shape, generator=generator).to(torch.float64) / 255
    allowed = (Fraction(frozen.rounding) + exact.NEGLIGIBLE) ** 2
    iterated = any(p.kind == "proximal" for p in frozen.primitives)
    for x in (uniform,) if iterated else (uniform, bytes_, uniform.round()):
        assert _off(frozen, x) <= allowed, name


def test_a_reflection_is_close_to_the_solution_itself():
    """The Midpoint's exact map is the solved one: running the exact iteration longer must not leave E either."""
    torch.manual_seed(0)
    layer = lipflow.Flow(lipflow.ConvexPotential(lipflow.DenseWeight(3, 4)), lipflow.Midpoint(2.0))
    frozen = lipflow.freeze(nn.Sequential(layer).double(), in_shape=(3,))
    x = torch.rand(3, dtype=torch.float64)
    short, long = _off(frozen, x), _off(frozen, x, longer=4)
    assert short < long <= Fraction(frozen.rounding) ** 2


def test_the_trained_network_stays_within_its_bound(trained):
    off, bound = _off(trained.frozen, trained.x[0]), trained.frozen.rounding
    print(f"|executed - exact| = {math.sqrt(off):.3g}, E = {bound:.3g}")
    assert off <= Fraction(bound) ** 2
    assert bound < 1e6 * math.sqrt(off), "a bound that loose says nothing"


def test_errors_are_carried_on_by_the_constants_of_later_layers():
    """1e6 + x - 1e6 loses digits, and a layer of norm 1000 makes the loss a thousand times as large."""
    layers = [nn.Linear(2, 2) for _ in range(3)]
    for layer, gain, bias in zip(layers, (1.0, 1.0, 1000.0), (1e6, -1e6, 0.0), strict=True):
        layer.weight = nn.Parameter(gain * torch.eye(2))
        layer.bias = nn.Parameter(torch.full((2,), bias))
    frozen = lipflow.freeze(nn.Sequential(*layers), in_shape=(2,))
    x = torch.tensor([0.3, 0.7], dtype=torch.float64)
    off = _off(frozen, x)
    assert off <= Fraction(frozen.rounding) ** 2
    assert math.sqrt(off) > sum(row.rounding for row in frozen.ledger), "the example does not show what it should"


@pytest.mark.parametrize("name", FREEZABLE)
def test_no_layer_is_fed_more_than_it_is_told(name):
    """The norms that errors are priced at hold over the whole box, at its corners too, and not at its centre only."""
    shape = contract.LAYERS[name].shape
    layers = lipflow.blocks.Center(0.5), contract.make(name, trained=True), nn.Flatten()
    frozen = lipflow.freeze(nn.Sequential(*layers), in_shape=shape)
    x = torch.rand(20, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[10:] = x[10:].round()
    for p, row in zip(frozen.primitives, frozen.ledger, strict=True):
        assert float(x.flatten(1).norm(dim=1).max()) <= row.reach, p.kind
        x = p(x)


def test_a_bias_counts_at_more_than_one_position():
    """One bias on 16 × 16 pixels, each of which rounds by as much as it can: x + 2⁵² loses up to a half."""
    layer = nn.Conv2d(1, 1, 1).double()
    layer.weight = nn.Parameter(torch.ones(1, 1, 1, 1, dtype=torch.float64))
    layer.bias = nn.Parameter(torch.full((1,), 2.0**52, dtype=torch.float64))
    frozen = lipflow.freeze(nn.Sequential(layer, nn.Flatten()), in_shape=(1, 16, 16))
    assert _off(frozen, torch.full((1, 16, 16), 0.499, dtype=torch.float64)) <= Fraction(frozen.rounding) ** 2


# Each primitive by itself, on inputs of known norm: the bound holds, and it is no fantasy


def _dense(rows: int, columns: int, g: torch.Generator, scale: float = 1.0) -> Map:
    return Map.of(Dense(scale * torch.randn(rows, columns, generator=g, dtype=torch.float64)))


def _conv(shape: tuple[int, ...], g: torch.Generator, in_size: tuple[int, int], **geometry) -> Map:
    return Map.of(Conv2d(torch.randn(shape, generator=g, dtype=torch.float64), in_size, **geometry))


def _vector(n: int, g: torch.Generator, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(n, generator=g, dtype=torch.float64)


def _descent(w: Map, g: torch.Generator, name: str = "relu", bias: float = 1.0) -> prim.Descent:
    h = 2 / w.norm**2 * (1 - 2.0**-30)
    return prim.Descent(w, _vector(w.op.out_shape[0], g, bias), h, name)


def _proximal(w: Map, g: torch.Generator, reflect: bool) -> prim.Proximal:
    tau = 2 / (2 + w.norm**2) * (1 - 2.0**-30)
    return prim.Proximal(w, _vector(w.op.out_shape[0], g), 1.0, "relu", tau, 20, reflect)


def _skew(g: torch.Generator) -> Map:
    m = torch.randn(3, 3, generator=g, dtype=torch.float64)
    return Map.of(Dense((m - m.T) / 2))


def _spectral(height: int, width: int, channels: int, g: torch.Generator) -> Primitive:
    shape = (height, width // 2 + 1, channels, channels)
    real, imaginary = (torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(2))
    return PRIMITIVES["spectral"](real, imaginary, width)


def _center(g: torch.Generator) -> prim.Center:
    return prim.Center(_vector(2, g), 1 / torch.rand(2, generator=g, dtype=torch.float64))


def _householder(g: torch.Generator) -> prim.Householder:
    angle = _vector(1, g, 3.0)
    return prim.Householder(angle.sin(), angle.cos())


Make = Callable[[torch.Generator], Primitive]
SMALL: dict[str, tuple[Make, tuple[int, ...]]] = {
    "affine, 1 × 1": (lambda g: prim.Affine(_dense(1, 1, g), _vector(1, g)), (1,)),
    "affine, 2 × 3": (lambda g: prim.Affine(_dense(2, 3, g), _vector(2, g)), (3,)),
    "affine, tiny": (lambda g: prim.Affine(_dense(2, 3, g, 1e-320), torch.zeros(2, dtype=torch.float64)), (3,)),
    "affine, huge bias": (lambda g: prim.Affine(_dense(2, 3, g), _vector(2, g, 1e9)), (3,)),
    "affine, convolution": (lambda g: prim.Affine(_conv((2, 1, 2, 2), g, (2, 3)), _vector(2, g)), (1, 2, 3)),
    "affine, few outputs": (lambda g: prim.Affine(_conv((1, 3, 2, 1), g, (2, 2)), _vector(1, g)), (3, 2, 2)),
    "affine, many inputs": (lambda g: prim.Affine(_conv((2, 7, 2, 1), g, (2, 2)), _vector(2, g)), (7, 2, 2)),
    "affine, many outputs": (lambda g: prim.Affine(_conv((7, 2, 2, 1), g, (2, 2)), _vector(7, g)), (2, 2, 2)),
    "descent, 1 × 1": (lambda g: _descent(_dense(1, 1, g), g), (1,)),
    "descent, hardtanh": (lambda g: _descent(_dense(3, 2, g), g, "hardtanh"), (2,)),
    "descent, huge bias": (lambda g: _descent(_dense(3, 2, g), g, bias=1e9), (2,)),
    "descent, small weights": (lambda g: _descent(_dense(3, 2, g, 1e-150), g, bias=1e-150), (2,)),
    "descent, large weights": (lambda g: _descent(_dense(3, 2, g, 1e100), g, bias=1e100), (2,)),
    "descent, convolution": (lambda g: _descent(_conv((2, 1, 3, 3), g, (3, 2)), g), (1, 3, 2)),
    "descent, circular": (
        lambda g: _descent(_conv((2, 1, 3, 2), g, (2, 2), padding=2, padding_mode="circular"), g),
        (1, 2, 2),
    ),
    "descent, strided": (lambda g: _descent(_conv((1, 2, 3, 2), g, (4, 3), stride=(2, 3)), g), (2, 4, 3)),
    "proximal": (lambda g: _proximal(_dense(3, 2, g), g, False), (2,)),
    "proximal, reflected": (lambda g: _proximal(_dense(3, 2, g), g, True), (2,)),
    "series": (lambda g: prim.Series(_skew(g), 0.7, 6), (3,)),
    "series, 2 terms": (lambda g: prim.Series(_skew(g), 0.7, 2), (3,)),
    "spectral": (lambda g: _spectral(2, 3, 2, g), (2, 2, 3)),
    "spectral, one pixel": (lambda g: _spectral(1, 1, 1, g), (1, 1, 1)),
    "center": (_center, (2, 1, 1)),
    "pointwise": (lambda g: prim.Pointwise("relu"), (3,)),
    "group_sort": (lambda g: prim.GroupSort(2), (4,)),
    "householder": (_householder, (2,)),
    "pad": (lambda g: prim.PadChannels(3), (2, 1, 1)),
    "avg_pool": (lambda g: prim.AvgPool(2), (1, 2, 3)),
    "avg_pool, thirds": (lambda g: prim.AvgPool(3), (1, 3, 3)),
    "max_pool": (lambda g: prim.MaxPool([2, 2], [1, 1], [1, 0], [1, 1]), (1, 3, 3)),
    "space_to_depth": (lambda g: prim.SpaceToDepth(2), (1, 2, 4)),
    "flatten": (lambda g: prim.Flatten(), (2, 2, 1)),
    "truncate": (lambda g: prim.Truncate(2), (3,)),
    "mirror": (lambda g: prim.Mirror(), (2, 1, 3)),
    "mean": (lambda g: prim.Mean(), (3,)),
}
EXACT = {"pointwise", "group_sort", "pad", "max_pool", "space_to_depth", "flatten", "truncate", "mirror"}
LOOSE = {"proximal, reflected", "affine, tiny", "descent, small weights"}  # they price what is unsolved, or underflow
LOOSENESS = 1000.0  # no other bound is further than this above the worst error met


def worst_ratio(name: str, trials: int) -> float:
    """The greatest ‖executed - exact‖ / error(‖x‖) met, which must not exceed 1."""
    make, shape = SMALL[name]
    generator = torch.Generator().manual_seed(len(name))
    worst = 0.0
    for trial in range(trials):
        p = make(generator)
        scale = 10.0 ** (3 * torch.randn((), generator=generator).item()) if trial % 2 else 1.0
        x = scale * torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        rows = [exact.rational(row) for row in x]
        reach = sqrt_up(max(exact.fraction(exact.square(row)) for row in rows))
        y = p(x)
        pairs = zip(y, exact.rows(p, rows), strict=True)
        off = max(exact.fraction(exact.square(exact.rational(found) - right)) for found, right in pairs)
        entries = max(x[0].numel(), y[0].numel())
        bound = p.error(reach, entries) + exact.NEGLIGIBLE * (p.kind in ("proximal", "spectral"))
        assert off <= bound**2, f"{name}: off by {math.sqrt(off)}, above {float(bound)}"
        worst = max(worst, math.sqrt(off) / float(bound) if bound else 0.0)
    return worst


@pytest.mark.parametrize("name", SMALL)
def test_a_primitive_errs_by_no_more_than_it_says(name):
    worst = worst_ratio(name, 40)
    print(f"{name}: the worst error is {worst:.3g} of its bound")
    if name not in EXACT | LOOSE:
        assert worst > 1 / LOOSENESS


@pytest.mark.campaign
@pytest.mark.parametrize("name", SMALL)
def test_a_primitive_errs_by_no_more_than_it_says_at_length(name):
    print(f"{name}: the worst error is {worst_ratio(name, 3000):.3g} of its bound")


def test_every_kind_is_tried_by_itself():
    assert {make(torch.Generator()).kind for make, _ in SMALL.values()} == set(PRIMITIVES)


# The same network run in other ways moves by at most 2E


def _moved(frozen: lipflow.Frozen, a: Tensor, b: Tensor) -> float:
    """How far two runs are apart, in units of 2E."""
    return float((a - b).norm(dim=1).max()) / (2 * frozen.rounding)


def _permuted(frozen: lipflow.Frozen, seed: int) -> lipflow.Frozen:
    """The same map, its hidden units in another order, so that sums are taken in another order too."""
    generator = torch.Generator().manual_seed(seed)

    def permute(p: Primitive) -> Primitive:
        if not isinstance(p, prim.Descent):
            return p
        order = torch.randperm(len(p.bias), generator=generator)
        op = p.map.op
        held = Map.of(op.with_kernel(op.kernel[order]) if isinstance(op, Conv2d) else Dense(op.weight[order]))
        return replace(p, map=held, bias=p.bias[order])

    return lipflow.Frozen([permute(p) for p in frozen.primitives], frozen.in_shape)


def test_other_ways_to_run_it(trained):
    frozen, x = trained.frozen, trained.x[:40]
    together = frozen(x)
    singly = torch.cat([frozen(one[None]) for one in x])
    torch.set_num_threads(2)
    try:
        threads = frozen(x)
    finally:
        torch.set_num_threads(1)
    last = frozen(x.contiguous(memory_format=torch.channels_last))
    permuted = [_permuted(frozen, seed)(x) for seed in range(3)]
    turned = frozen(x.flip(0)).flip(0)
    moves = [_moved(frozen, together, other) for other in (singly, threads, last, turned, *permuted)]
    print("moved by", ", ".join(f"{move:.2g}" for move in moves), "of 2E")
    assert max(moves) <= 1
    assert max(moves) > 0, "nothing was run in another way"


def test_copies_share_nothing_with_the_live_network(trained):
    live = copy.deepcopy(trained.live)
    frozen = lipflow.freeze(live)
    before = frozen(trained.x[:3])
    with torch.no_grad():
        for tensor in (*live.parameters(), *live.buffers()):
            tensor.mul_(3).add_(1)
    assert torch.equal(frozen(trained.x[:3]), before)
    frozen.require_untouched()
