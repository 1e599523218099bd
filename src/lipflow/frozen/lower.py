"""Lowering: a live module becomes a list of primitives, in float64, with its norms bounded once."""

import copy
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lipflow import blocks
from lipflow.blocks.cayley import FourierMultiplier
from lipflow.bound import (
    INSTEAD,
    Assume,
    Lipschitz,
    Shape,
    called,
    in_order,
    operator_of,
    require_plain,
    require_vectors,
    shape_of,
)
from lipflow.flows import Flow
from lipflow.flows import cell as cells
from lipflow.flows.field import Convex, ConvexPotential, Skew
from lipflow.flows.resolvent import resolvent
from lipflow.frozen import primitive
from lipflow.frozen.linear import Map, require_known
from lipflow.frozen.primitive import Primitive
from lipflow.frozen.spectral import spectral
from lipflow.models import Network
from lipflow.operators import Conv2d, Dense, LinearOperator
from lipflow.rounding import TINY, down

Lowered = Iterator[Primitive]
Module = TypeVar("Module", bound=nn.Module)


def shape_for(model: nn.Module, in_shape: Shape | None) -> Shape:
    """The shape of one input of a model: its own if it was built for one, or the one that is given."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"freeze takes a network, such as lipflow.load(name), not {type(model).__name__}: {model!r}")
    shape = in_shape if in_shape is not None else (model.in_shape if isinstance(model, Network) else None)
    if shape is None:
        raise ValueError("freeze needs the shape of one input: freeze(model, in_shape=(channels, height, width))")
    shape = shape_of(shape)
    if isinstance(model, Network) and shape != model.in_shape:
        raise ValueError(f"this network was built for {model.in_shape}, not {shape}")
    return shape


def lower(module: nn.Module, shape: Shape, name: str) -> Lowered:
    """The primitives of a module on inputs of a shape; what cannot be run in certified arithmetic is refused."""
    kind = type(module)
    if kind not in _CONTAINERS and kind not in _LOWER:
        raise TypeError(_refuse(module, name))
    require_plain(module, name)
    if kind in _CONTAINERS:
        for child, inner in _CONTAINERS[kind](module):
            place = f"{name}.{child}" if name else child
            for p in [inner] if isinstance(inner, Primitive) else lower(inner, shape, place):
                shape = out_shape(p, shape, place)
                yield p
        return
    try:
        yield from _LOWER[kind](module, shape)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name or kind.__name__}: {error}") from error


def out_shape(p: Primitive, shape: Shape, place: str) -> Shape:
    """The shape after a primitive, by running it on zeros."""
    reason = ""
    try:
        if p.fits(shape):
            return tuple(p(torch.zeros(2, *shape, dtype=torch.float64)).shape[1:])
    except (RuntimeError, IndexError) as error:
        reason = f": {error}"
    raise ValueError(f"at {place}: {p.kind} ({p.shape}) does not take an input of shape {shape}{reason}")


def _refuse(module: nn.Module, name: str) -> str:
    what = called(module, name)
    if isinstance(module, Assume):
        inner = type(module.module).__name__
        return f"{what}: freeze cannot run {inner} in certified arithmetic, so a word is not enough"
    if isinstance(module, Lipschitz):
        return f"{what}: freeze runs the layers it knows the rounding of, and this is not one of them"
    if type(module) is nn.PixelShuffle:
        return f"{what} has a bound, and freeze has no primitive for it yet; for nn.PixelUnshuffle, its inverse, it has"
    if type(module) in INSTEAD or type(module).__module__.startswith("torch.nn"):
        return f"{what} declares no Lipschitz bound; {INSTEAD.get(type(module), 'use a layer of lipflow')}"
    return f"{what} declares no Lipschitz bound, and freeze does not look into it; pass the nn.Sequential inside of it"


def _flow(layer: Flow, shape: Shape) -> Lowered:
    yield from _cell(layer.step.cell(layer.field), shape)


def _cell(cell: cells.Cell, shape: Shape) -> Lowered:
    if type(cell) not in _CELLS:
        raise TypeError(f"{type(cell).__name__} steps cannot be frozen yet")
    yield from _CELLS[type(cell)](cell, shape)


def _both(cell: cells.Both, shape: Shape) -> Lowered:
    yield from _cell(cell.first, shape)
    yield from _cell(cell.second, shape)


def _descent(cell: cells.Descent, shape: Shape) -> Lowered:
    """h = 2/(s·B²), rounded down, against the certified norm B; a fixed h stays as it is."""
    held, bias, name = _potential(cell.field, shape)
    yield primitive.Descent(held, bias, step_size(held.norm) if cell.h is None else cell.h, name)


def _proximal(cell: cells.Proximal, shape: Shape) -> Lowered:
    """Gradient steps of τ = 2/(2 + ℓ), rounded down, until at most UNSOLVED of ‖x - z*‖ is left."""
    held, bias, name = _potential(cell.field, shape)
    tau = down(2 / (2 + Fraction(cell.h) * Fraction(held.norm) ** 2))
    iterations = max(1, math.ceil(math.log(cells.UNSOLVED) / math.log1p(-tau))) if tau < 1 else 1
    if iterations > primitive.MOST_STEPS:
        raise ValueError(f"h‖W‖² = {cell.h * held.norm**2:.3g} would take {iterations} steps to solve; use a smaller h")
    yield primitive.Proximal(held, bias, cell.h, name, tau, iterations, cell.reflect)


def _potential(field: Convex, shape: Shape) -> tuple[Map, Tensor, str]:
    """W, b and the name of σ, where all of them can be run in certified arithmetic."""
    if type(field) is not ConvexPotential:
        raise TypeError(f"the gradient of a {type(field).__name__} is a module of yours, which freeze cannot run")
    if field.sigma_name not in primitive.SIGMA:
        raise TypeError(f"σ = {field.sigma_name} rounds in ways that no bound here covers; relu and hardtanh are exact")
    held = Map.of(field.weight.operator(shape))
    return held, _bias(field.bias, held.op.out_shape[0]), field.sigma_name


def step_size(norm: float) -> float:
    """The greatest float64 h with h·norm² ≤ 2; a map of norm 0, or too small or too large for one, does not move: 0."""
    if norm == 0:
        return 0.0
    h = Fraction(2) / Fraction(norm) ** 2
    return down(h) if TINY <= h < 2**1000 else 0.0


def _series(cell: cells.Series, shape: Shape) -> Lowered:
    """A, made in float64, is skew to the last bit."""
    yield primitive.Series(Map.of(_skew(cell.field, shape)), cell.h, cell.terms)


def _skew(field: Skew, shape: Shape) -> LinearOperator:
    if type(field) is not Skew:
        raise TypeError(f"a {type(field).__name__} is a field of yours, which freeze cannot run")
    op = _double(field).operator(shape)
    require_known(op)
    return op


def _rational(cell: cells.Rational, shape: Shape) -> Lowered:
    """A dense Cayley layer is one matrix, a convolution one at each frequency: norms are certified as executed."""
    with torch.no_grad():
        op = _skew(cell.field, shape)
        matrices = resolvent(op, cell.alpha, cell.beta)
    if isinstance(op, Dense):
        yield primitive.Affine(Map.of(Dense(matrices)), torch.zeros(len(matrices), dtype=torch.float64))
        return
    groups, h, w, c, _ = matrices.shape
    joined = matrices.new_zeros(h, w, groups, c, groups, c)
    joined.diagonal(dim1=2, dim2=4).copy_(matrices.permute(1, 2, 3, 4, 0))
    yield spectral(joined.reshape(h, w, groups * c, groups * c), shape[2])


def _affine(block: blocks.Affine, shape: Shape) -> Lowered:
    """W as evaluation makes it, in float64: a matrix, a kernel, or a matrix at each frequency and then the bias."""
    with torch.no_grad():
        op = _double(block.weight).operator(shape)
    bias = _bias(block.bias, block.weight.channels[1])
    if type(op) is FourierMultiplier:
        yield spectral(op.matrices, shape[2])
        yield primitive.Center(-bias, torch.ones_like(bias))
    else:
        yield primitive.Affine(Map.of(op), bias)


def _double(module: Module) -> Module:
    """A copy that computes in float64 what the module does in evaluation."""
    return copy.deepcopy(module).to("cpu", torch.float64).eval()


def _linear(module: nn.Linear, shape: Shape) -> Lowered:
    require_vectors(shape, "nn.Linear")
    held = Map.of(Dense(module.weight))
    yield primitive.Affine(held, _bias(module.bias, module.out_features))


def _convolution(module: nn.Conv2d, shape: Shape) -> Lowered:
    held = Map.of(operator_of(module, shape[-2:]))
    yield primitive.Affine(held, _bias(module.bias, module.out_channels))


def _lln(head: blocks.LastLayerNormalization, shape: Shape) -> Lowered:
    weight = head.weight.detach().to("cpu", torch.float64)
    lengths = torch.linalg.vector_norm(weight, dim=1, keepdim=True)
    rows = weight / torch.where(lengths > 0, lengths, torch.ones_like(lengths))
    yield primitive.Affine(Map.of(Dense(rows)), _bias(head.bias, head.classes))


def _center(block: blocks.Center, shape: Shape) -> Lowered:
    mean = _held(block.mean).expand(shape[0]).clone()
    scale = torch.ones_like(mean) if block.std is None else 1 / _held(block.std).expand(shape[0])
    yield primitive.Center(mean, scale)


def _shift(block: blocks.Shift, shape: Shape) -> Lowered:
    bias = _bias(block.bias, len(block.bias))
    yield primitive.Center(-bias, torch.ones_like(bias))


def _householder(block: blocks.Householder, shape: Shape) -> Lowered:
    half = _held(block.theta) / 2
    yield primitive.Householder(half.sin(), half.cos())


def _max_pool(module: nn.MaxPool2d, shape: Shape) -> Lowered:
    if module.ceil_mode or module.return_indices:
        raise ValueError("max pooling is frozen without ceil_mode and return_indices")
    yield primitive.MaxPool(*(_pair(v) for v in (module.kernel_size, module.stride, module.padding, module.dilation)))


def _pair(value: int | tuple[int, ...]) -> list[int]:
    return [value, value] if isinstance(value, int) else [value[0], value[1]]


def _avg_pool(module: nn.AvgPool2d, shape: Shape) -> Lowered:
    """A plain average is a convolution of each channel with a constant kernel."""
    kernel, stride = _pair(module.kernel_size), _pair(module.stride)
    if module.ceil_mode or module.divisor_override is not None:
        raise ValueError("average pooling is frozen without ceil_mode and divisor_override")
    if not module.count_include_pad and _pair(module.padding) != [0, 0]:
        raise ValueError("average pooling is frozen with its padding counted")
    weight = torch.full((shape[0], 1, *kernel), 1 / (kernel[0] * kernel[1]), dtype=torch.float64)
    padding = _pair(module.padding)
    op = Conv2d(weight, (shape[1], shape[2]), (padding[0], padding[1]), stride=(stride[0], stride[1]), groups=shape[0])
    yield primitive.Affine(Map.of(op), torch.zeros(shape[0], dtype=torch.float64))


def _pool(size: int) -> primitive.MaxPool:
    return primitive.MaxPool([size, size], [size, size], [0, 0], [1, 1])


def _flatten(module: nn.Flatten, shape: Shape) -> Lowered:
    if (module.start_dim, module.end_dim) != (1, -1):
        raise ValueError("nn.Flatten must keep the batch and flatten the rest")
    yield primitive.Flatten()


def _held(t: Tensor) -> Tensor:
    return t.detach().to("cpu", torch.float64)


def _bias(bias: Tensor | None, rows: int) -> Tensor:
    if bias is None:
        return torch.zeros(rows, dtype=torch.float64)
    if not bool(torch.isfinite(bias).all()):
        raise ValueError("the bias has NaN or infinite entries")
    return _held(bias).clone()


_CELLS: dict[type, Callable[[Any, Shape], Lowered]] = {
    cells.Descent: _descent,
    cells.Proximal: _proximal,
    cells.Series: _series,
    cells.Rational: _rational,
    cells.Both: _both,
}

_LOWER: dict[type, Callable[[Any, Shape], Lowered]] = {
    Flow: _flow,
    blocks.Affine: _affine,
    blocks.Center: _center,
    blocks.Shift: _shift,
    blocks.PadChannels: lambda m, _: iter([primitive.PadChannels(m.channels)]),
    blocks.TakeChannels: lambda m, _: iter([primitive.Truncate(m.channels)]),
    blocks.AvgPool: lambda m, _: iter([primitive.AvgPool(m.size)]),
    blocks.MaxPool: lambda m, _: iter([_pool(m.size)]),
    blocks.SpaceToDepth: lambda m, _: iter([primitive.SpaceToDepth(m.block)]),
    blocks.Flatten: lambda m, _: iter([primitive.Flatten()]),
    blocks.GroupSort: lambda m, _: iter([primitive.GroupSort(m.group)]),
    blocks.Householder: _householder,
    blocks.Abs: lambda m, _: iter([primitive.Pointwise("abs")]),
    blocks.Truncate: lambda m, _: iter([primitive.Truncate(m.classes)]),
    blocks.LastLayerNormalization: _lln,
    nn.ReLU: lambda m, _: iter([primitive.Pointwise("relu")]),
    nn.Identity: lambda m, _: iter([]),
    nn.Flatten: _flatten,
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.PixelUnshuffle: lambda m, _: iter([primitive.SpaceToDepth(m.downscale_factor)]),
    nn.MaxPool2d: _max_pool,
    nn.AvgPool2d: _avg_pool,
}

_CONTAINERS: dict[type, Callable[[Any], Any]] = {
    nn.Sequential: in_order,
    Network: lambda m: in_order(m.stages),
    blocks.Mirrored: lambda m: [("", primitive.Mirror()), *in_order(m.inner), ("", primitive.Mean())],
}
