"""Norm attack: weights on which power iteration underestimates the norm, in stacks that would then expand.

A Convex Potential Layer with all units active is I - h·WᵀW. With h = 2/σ̂² and an estimate σ̂ below the true σ₁ it
stretches the top singular vector by 2(σ₁/σ̂)² - 1 > 1; with the same vector in every layer, by the power of the depth.
Everything is computed in rationals, without tolerances.
"""

import math
from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from flint import fmpq
from torch import Tensor, nn

import lipflow
from lipflow.operators import ConvOperator, DenseOperator, norm_estimate
from lipflow.operators.norm import start_vector
from lipflow.primitives import Descent, Gather
from lipflow.primitives.descent import step_size
from tests.soundness import exact
from tests.soundness.graphs import chain, primitives


def _singular(rows: int, top: Tensor, values: Tensor, seed: int) -> Tensor:
    """A matrix with singular values `values` and the right singular vectors of `top` first  # (rows, columns)."""
    generator = torch.Generator().manual_seed(seed)
    rest = torch.randn(top.shape[0], len(values) - top.shape[1], generator=generator, dtype=torch.float64)
    right = torch.linalg.qr(torch.cat([top, rest], 1)).Q
    left = torch.linalg.qr(torch.randn(rows, len(values), generator=generator, dtype=torch.float64)).Q
    return left @ torch.diag(values) @ right.T


def _hidden(shape: tuple[int, ...]) -> Tensor:
    """A unit vector orthogonal to the start vector of power iteration  # (entries, 1)."""
    start = start_vector(shape, torch.zeros(1, dtype=torch.float64)).flatten()
    other = torch.zeros_like(start)
    other[0], other[1] = -start[1], start[0]
    return (other / other.norm())[:, None]


def _operator(weight: Tensor, shape: tuple[int, ...], **geometry) -> DenseOperator | ConvOperator:
    return DenseOperator(weight) if weight.ndim == 2 else ConvOperator(weight, (shape[1], shape[2]), **geometry)


def _frozen_layer(op: DenseOperator | ConvOperator, centre: Tensor, reach: float) -> Descent:
    """The frozen Convex Potential Layer of a weight, with a bias so that all units are active within `reach` of a
    centre."""
    geometry = {} if isinstance(op, DenseOperator) else dict(padding=((op.rows.before,) * 2, (op.columns.before,) * 2))
    rows = op.weight.shape[0]
    make = lipflow.cpl_dense if isinstance(op, DenseOperator) else lipflow.cpl_conv
    kernel = () if isinstance(op, DenseOperator) else (tuple(op.weight.shape[2:]),)
    layer = make(op.in_shape[0], rows, *kernel, **geometry).double()
    layer.field.weight.weight = nn.Parameter(op.weight)
    p = primitives(lipflow.freeze(nn.Sequential(layer, nn.Flatten()), in_shape=op.in_shape))[0]
    assert isinstance(p, Descent)
    return replace(p, bias=p.op.norm * reach - op(centre).reshape(rows, -1).amin(1) + 1)


def _hidden_dense(seed: int) -> Tensor:
    values = torch.tensor([1.1, *[1.0] * 4, 0.5], dtype=torch.float64)
    return _singular(8, _hidden((6,)), values, seed)


def _hidden_conv(seed: int) -> Tensor:
    """A kernel of the size of the image is a dense matrix, and can have any singular vector."""
    values = torch.tensor([1.1, *[1.0] * 7], dtype=torch.float64)
    return _singular(8, _hidden((2, 3, 3)), values, seed).reshape(8, 2, 3, 3)


def _degenerate_dense(seed: int) -> Tensor:
    """Singular values 1, 1 - 1/4096, 1 - 2/4096, …, too close for 100 iterations."""
    values = 1 - torch.arange(8, dtype=torch.float64) / 4096
    values[1:] -= 1 / 128
    top = torch.full((8, 1), 8**-0.5, dtype=torch.float64)
    return _singular(8, top, values, seed)


def _smooth_conv(seed: int) -> Tensor:
    """A blur: its greatest singular values lie close together below the sum of the kernel."""
    row = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)
    return (row[:, None] * row)[None, None] * 0.3


def _edges_conv(seed: int) -> Tensor:
    """The second difference: a torus of odd side misses the maximum of its symbol, at ω = π."""
    row = torch.tensor([-1.0, 2.0, -1.0], dtype=torch.float64)
    return (row[:, None] * row)[None, None]


STACKS = {
    "hidden, dense": (_hidden_dense, (6,), {}),
    "hidden, convolution": (_hidden_conv, (2, 3, 3), dict(padding=0)),
    "degenerate, dense": (_degenerate_dense, (8,), {}),
    "crowded, convolution": (_smooth_conv, (1, 7, 7), {}),
    "odd torus, convolution": (_edges_conv, (1, 3, 3), {}),
}


@cache
def _steps(name: str, depth: int) -> tuple[lipflow.Frozen, list[fmpq]]:
    """A frozen stack, and its step sizes by 100 power iterations."""
    make, shape, geometry = STACKS[name]
    centre, reach = torch.full((1, *shape), 0.5, dtype=torch.float64), math.sqrt(math.prod(shape)) / 2
    layers, steps = [], []
    for seed in range(depth):
        op = _operator(make(seed), shape, **geometry)
        layers.append(_frozen_layer(op, centre, reach))
        steps.append(exact.exact(2 / norm_estimate(op).item() ** 2))
        centre = layers[-1](centre)
    size = math.prod(shape)
    return chain(shape, *layers, Gather(torch.arange(size), [size])), steps


def _layers(frozen: lipflow.Frozen) -> list:
    """The descents in exact arithmetic."""
    return [p for p in exact.of(frozen).primitives if p.kind == "descent"]


def _stretch(frozen: lipflow.Frozen, steps: list[fmpq], directions: list[Tensor]) -> float:
    """The greatest ‖Jv‖/‖v‖ over some directions, where J = Π(I - h·WᵀW); above 1 only if the exact value is."""
    layers = _layers(frozen)
    worst = Fraction(0)
    for direction in directions:
        v = exact.rational(direction).reshape(frozen.in_shape)
        image = v
        for layer, h in zip(layers, steps, strict=True):
            image = image - h * layer.wt.apply(layer.w.apply(image))
        worst = max(worst, exact.square(image) / exact.square(v))
    rounded = math.sqrt(float(worst))
    return max(rounded, math.nextafter(1.0, 2.0)) if worst > 1 else min(rounded, 1.0)


def _directions(frozen: lipflow.Frozen, steps: list[fmpq]) -> list[Tensor]:
    """The top singular vectors of the stack and of two layers, in float64, and a random direction."""
    matrices = [exact.floats(layer.w.matrix()) for layer in _layers(frozen)]
    total = np.eye(matrices[0].shape[1])
    for w, h in zip(matrices, steps, strict=True):
        total = total - float(exact.fraction(h)) * (w.T @ (w @ total))
    tops = [np.linalg.svd(m)[2][0] for m in (total, matrices[0], matrices[-1])]
    return [torch.from_numpy(top.copy()) for top in tops] + [torch.randn(total.shape[0], dtype=torch.float64)]


@pytest.mark.parametrize("depth", [20, 60])
@pytest.mark.parametrize("name", STACKS)
def test_frozen_stacks_never_expand(name, depth):
    frozen, _ = _steps(name, depth)
    assert frozen.lipschitz == 1.0
    steps = [p.h for p in _layers(frozen)]
    assert _stretch(frozen, steps, _directions(frozen, steps)) <= 1.0


@pytest.mark.parametrize(
    ("name", "factor"), [("hidden, dense", 1e3), ("hidden, convolution", 1e3), ("degenerate, dense", 1.3)]
)
def test_stacks_with_steps_by_power_iteration_expand(name, factor):
    """The attack works: 20 layers with h from 100 power iterations stretch by more than a factor."""
    frozen, steps = _steps(name, 20)
    stretch = _stretch(frozen, steps, _directions(frozen, steps))
    print(f"{name}: 20 layers with h from 100 power iterations stretch by {stretch:.4g}")
    assert stretch > factor


@pytest.mark.parametrize("name", STACKS)
def test_all_units_are_active(name):
    """On the whole box, so that J is the Jacobian of the network."""
    frozen, _ = _steps(name, 60)
    x = torch.rand(10, *frozen.in_shape, dtype=torch.float64).round(decimals=0)
    for p in primitives(frozen, "descent"):
        y = p.op(x)
        assert float((y + p.bias.reshape(-1, *[1] * (y.ndim - 2))).min()) > 0
        x = p(x)


@pytest.mark.parametrize("name", STACKS)
def test_no_direction_is_stretched(name):
    """h·‖W‖² < 2, in rationals."""
    frozen, (estimated,) = _steps(name, 1)
    (p,) = _layers(frozen)
    matrix = p.w.matrix()
    assert exact.bounds_squared_norm(2 / p.h, matrix)
    if name not in ("odd torus, convolution", "crowded, convolution"):  # there 100 iterations converge
        assert not exact.bounds_squared_norm(2 / estimated, matrix)


@pytest.mark.parametrize("norm", [1e-200, 1e-160, 3e-5, 0.1, 0.3, 0.7, 1.0, 1.1, 2**0.5, math.pi, 1e7, 1e150])
def test_the_step_is_rounded_down_and_no_further(norm):
    h = step_size(norm)
    assert Fraction(h) * Fraction(norm) ** 2 <= 2
    assert not h or Fraction(math.nextafter(h, math.inf)) * Fraction(norm) ** 2 > 2


def test_a_norm_follows_its_weights():
    """Freezing again after a change of the weights gives new constants."""
    layer = nn.Linear(3, 3)
    first = lipflow.freeze(nn.Sequential(layer), in_shape=(3,)).lipschitz
    with torch.no_grad():
        layer.weight.mul_(7)
    second = lipflow.freeze(nn.Sequential(layer), in_shape=(3,))
    assert second.lipschitz == pytest.approx(7 * first, rel=1e-5)
    assert second.lipschitz >= float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2)) * (1 - 1e-14)
