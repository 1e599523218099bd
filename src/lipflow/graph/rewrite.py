"""Rewrites: several vertices joined to one with a better bound. Proofs: docs/soundness.md, "Rewrites".

A rewrite takes a vertex and returns another one, which computes the same up to the rounding of stored numbers, or None.
A frozen network is defined by the numbers it stores, so this rounding is not an error of a certificate. `probe`
compares the rewritten graph with the network.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lipflow.graph.graph import Builder, in_order
from lipflow.node import Vertex
from lipflow.operators import Adjoint, ConvOperator, DenseOperator, FourierMultiplier, LinearOperator
from lipflow.primitives import NONLINEARITIES, Affine, AvgPool, Constant, Descent, Gather, Pointwise, Scale, Sum

SAME_TOLERANCE = 1e-12  # relative: numbers that differ by less are the same up to rounding


def rewrite(builder: Builder) -> Callable[[Vertex], Vertex]:
    """The function from a vertex to its rewritten form."""
    new: dict[Vertex, Vertex] = {}

    def rewritten(vertex: Vertex) -> Vertex:
        for v in in_order(builder.start, [vertex]):
            if v not in new:
                new[v] = simplified(builder, v, tuple(new[i] for i in v.inputs))
        return new[vertex]

    return rewritten


def simplified(builder: Builder, vertex: Vertex, inputs: tuple[Vertex, ...]) -> Vertex:
    """A vertex on rewritten inputs, rewritten until no rewrite applies."""
    result = builder.vertex(vertex.primitive, *inputs, name=vertex.name)
    while True:
        better = next((r for r in (rule(builder, result) for rule in REWRITES) if r is not None), None)
        if better is None:
            return result
        result = better


# Padding before a convolution


def join_padding(builder: Builder, v: Vertex) -> Vertex | None:
    """A convolution without padding after a Gather that pads is a convolution with padding."""
    p = v.primitive
    if not (isinstance(p, Affine) and isinstance(p.op, ConvOperator)):
        return None
    op, inner, gather = p.op, v.inputs[0], v.inputs[0].primitive
    if not isinstance(gather, Gather) or any(axis.before or axis.after for axis in (op.rows, op.columns)):
        return None
    index = gather.index
    for mode, (rows, columns) in (("zeros", _inside(index)), ("circular", _period(index))):
        core = index[:, rows, columns]
        taken = core[core >= 0]
        if core.shape == index.shape or len(taken.unique()) < len(taken):
            continue
        sides = [(s.start, n - s.stop) for s, n in zip((rows, columns), index.shape[1:], strict=True)]
        size, steps = (core.shape[1], core.shape[2]), [(a.stride, a.dilation) for a in (op.rows, op.columns)]
        stride, dilation = zip(*steps, strict=True)
        padded = ConvOperator(op.kernel, size, (sides[0], sides[1]), mode, stride, dilation, op.groups)
        source = builder.gather(core, inner.inputs, inner.name)
        return builder.vertex(Affine(padded, p.bias), source, name=v.name)
    return None


def _inside(index: Tensor) -> tuple[slice, slice]:
    """The rows and columns between borders of zeros."""
    inside = (index >= 0).any(0)
    rows, columns = inside.any(1).nonzero(), inside.any(0).nonzero()
    if not len(rows):
        return slice(0, index.shape[1]), slice(0, index.shape[2])
    return slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1)


def _period(index: Tensor) -> tuple[slice, slice]:
    """The first rows and columns, of which the others are repetitions."""
    _, height, width = index.shape
    rows = next(n for n in range(1, height + 1) if torch.equal(index[:, n:], index[:, : height - n]))
    columns = next(n for n in range(1, width + 1) if torch.equal(index[..., n:], index[..., : width - n]))
    return slice(0, rows), slice(0, columns)


# Scales and shifts before or after a matrix or a convolution


def scale_and_shift(v: Vertex) -> tuple[Vertex, Tensor, Tensor | None] | None:
    """(x, factor, shift) with v = factor·x + shift, where a factor of a Sum is one number; None for other vertices."""
    p = v.primitive
    if isinstance(p, Scale):
        return v.inputs[0], p.factor, None
    if not isinstance(p, Sum) or len(v.inputs) > 2:
        return None
    terms = list(zip(v.inputs, p.coefficients, strict=True))
    constants = [c * x.primitive.value for x, c in terms if isinstance(x.primitive, Constant)]
    others = [(x, torch.tensor(c, dtype=torch.float64)) for x, c in terms if not isinstance(x.primitive, Constant)]
    if len(others) != 1:
        return None
    (x, factor), *_ = others
    return x, factor, constants[0] if constants else None


def join_after(builder: Builder, v: Vertex) -> Vertex | None:
    """A scale or shift by channel after Wx + b is W'x + b'; a factor after an average changes its divisor."""
    if (parsed := scale_and_shift(v)) is None:
        return None
    inner, factor, shift = parsed
    q = inner.primitive
    if isinstance(q, AvgPool) and isinstance(v.primitive, Sum) and shift is None:
        c = float(factor)
        exact = c > 0 and q.divisor / c * c == q.divisor and q.divisor / c >= 2.0**-500
        return builder.vertex(AvgPool(q.window, q.divisor / c), *inner.inputs, name=v.name) if exact else None
    if shift is not None and (shift := by_channel(shift)) is None:
        return None
    if not isinstance(q, Affine) or (op := scaled_rows(q.op, factor)) is None:
        return None
    bias = None if q.bias is None else q.bias * factor
    return builder.vertex(Affine(op, add(bias, shift)), *inner.inputs, name=v.name)


def join_before(builder: Builder, v: Vertex) -> Vertex | None:
    """A scale or shift by channel before Wx + b is W'x + b'; a shift only if borders do not change its image."""
    p = v.primitive
    if not isinstance(p, Affine) or (parsed := scale_and_shift(v.inputs[0])) is None:
        return None
    source, factor, shift = parsed
    if shift is None:
        op = scaled_columns(p.op, factor)
        return None if op is None else builder.vertex(Affine(op, p.bias), source, name=v.name)
    if not isinstance(source.primitive, Scale | Affine):
        return None  # no further rewrite would apply, and inputs that are not centred have larger rounding errors
    if (shift := by_channel(p.op(shift[None])[0])) is None:
        return None
    rest = builder.sum([(float(factor), source)], v.inputs[0].name)
    return builder.vertex(Affine(p.op, add(p.bias, shift)), rest, name=v.name)


def add(bias: Tensor | None, shift: Tensor | None) -> Tensor | None:
    """The sum of two biases, which may be absent."""
    if bias is None or shift is None:
        return shift if bias is None else bias
    return bias + shift


def by_channel(value: Tensor) -> Tensor | None:
    """The value of each channel, if it is the same at all positions, up to rounding."""
    flat = value.reshape(len(value), -1)
    spread, largest = float((flat - flat[:, :1]).abs().max()), float(flat.abs().max())
    return flat[:, 0].clone() if spread <= SAME_TOLERANCE * largest else None


def scaled_rows(op: LinearOperator, factor: Tensor) -> LinearOperator | None:
    """diag(factor)·W, with one factor, or one for each output channel."""
    if factor.ndim == 0:
        return op.with_weight(op.weight * factor)
    if factor.ndim != 1 or len(factor) != op.out_shape[0]:
        return None
    if isinstance(op, Adjoint):
        transposed = scaled_columns(op.op, factor)
        return None if transposed is None else Adjoint(transposed)
    if isinstance(op, DenseOperator | FourierMultiplier):
        return op.with_weight(op.weight * factor[:, None])
    return op.with_weight(op.weight * factor[:, None, None, None]) if isinstance(op, ConvOperator) else None


def scaled_columns(op: LinearOperator, factor: Tensor) -> LinearOperator | None:
    """W·diag(factor), with one factor, or one for each input channel."""
    if factor.ndim == 0:
        return op.with_weight(op.weight * factor)
    if factor.ndim != 1 or len(factor) != op.in_shape[0]:
        return None
    if isinstance(op, Adjoint):
        transposed = scaled_rows(op.op, factor)
        return None if transposed is None else Adjoint(transposed)
    if isinstance(op, ConvOperator):
        blocks = op.kernel.unflatten(0, (op.groups, -1)) * factor.reshape(op.groups, 1, -1, 1, 1)
        return op.with_weight(blocks.flatten(0, 1))
    return op.with_weight(op.weight * factor) if isinstance(op, DenseOperator | FourierMultiplier) else None


# Matrices after matrices, and the identity plus an operator


def join_matrices(builder: Builder, v: Vertex) -> Vertex | None:
    """A matrix after a matrix is one matrix, if the product has no more entries than the two have."""
    p, inner = v.primitive, v.inputs[0] if v.inputs else v
    q = inner.primitive
    if not (isinstance(p, Affine) and isinstance(q, Affine)):
        return None
    if not (isinstance(p.op, DenseOperator) and isinstance(q.op, DenseOperator)):
        return None
    after, before = p.op.weight, q.op.weight
    if len(after) * before.shape[1] > after.numel() + before.numel():
        return None
    bias = add(None if q.bias is None else after @ q.bias, p.bias)
    return builder.vertex(Affine(DenseOperator(after @ before), bias), *inner.inputs, name=v.name)


def join_identity(builder: Builder, v: Vertex) -> Vertex | None:
    """a·x + c(Wx + b) is one operator, aI + cW: a convolution has the identity in its middle tap."""
    p = v.primitive
    if not (isinstance(p, Sum) and len(v.inputs) == 2):
        return None
    for x, y, a, c in in_either_order(v, p):
        q = y.primitive
        if isinstance(q, Affine) and y.inputs == (x,) and (op := _plus_identity(q.op, a, c)) is not None:
            return builder.vertex(Affine(op, None if q.bias is None else c * q.bias), x, name=v.name)
    return None


def in_either_order(v: Vertex, p: Sum) -> Iterator[tuple[Vertex, Vertex, float, float]]:
    """(x, y, a, c) with a·x + c·y, for both orders of the terms of a sum."""
    (x, y), (a, c) = v.inputs, p.coefficients
    yield x, y, a, c
    yield y, x, c, a


def _plus_identity(op: LinearOperator, a: float, c: float) -> LinearOperator | None:
    if op.in_shape != op.out_shape:
        return None
    if isinstance(op, DenseOperator):
        return DenseOperator(c * op.weight + a * torch.eye(len(op.weight), dtype=op.weight.dtype))
    if not isinstance(op, ConvOperator):
        return None
    if not all(axis.is_centred and axis.kernel % 2 for axis in (op.rows, op.columns)):
        return None
    kernel, grouped = c * op.kernel, op.kernel.shape[1]
    channels = torch.arange(len(kernel))
    kernel[channels, channels % grouped, kernel.shape[2] // 2, kernel.shape[3] // 2] += a
    return op.with_weight(kernel)


# Steps down a convex potential


def recognise_descent(builder: Builder, v: Vertex) -> Vertex | None:
    """x - Wᵀ(t·σ(Wx + b)), with a tᵢ ≥ 0 for each unit i, is a descent of Σ tᵢφ(wᵢ·x + bᵢ), which is convex.

    If t is the same for all units it is the step size. Otherwise, for relu, t·relu(y) = √t·relu(√t·y) joins √t to W.
    """
    p = v.primitive
    if not (isinstance(p, Sum) and len(v.inputs) == 2):
        return None
    for x, y, a, c in in_either_order(v, p):
        if a != 1 or not isinstance(second := y.primitive, Affine):
            continue
        sigma = y.inputs[0]
        if not (isinstance(sigma.primitive, Pointwise) and sigma.primitive.name in NONLINEARITIES):
            continue
        first = sigma.inputs[0]
        if not (isinstance(first.primitive, Affine) and first.inputs == (x,)):
            continue
        op, bias = first.primitive.op, first.primitive.bias
        ratios = adjoint_ratios(second.op, op)
        if ratios is None or bool((-c * ratios < 0).any()):
            continue
        t, name = -c * ratios, sigma.primitive.name
        if bool((t == 0).all()):
            continue
        if bool((t - t[0]).abs().max() <= SAME_TOLERANCE * t[0].abs()):
            step = Descent(op, bias, NONLINEARITIES[name], float(t[0]))
        elif name == "relu" and (rooted := scaled_rows(op, t.sqrt())) is not None:
            step = Descent(rooted, None if bias is None else bias * t.sqrt(), NONLINEARITIES[name], 1.0)
        else:
            continue
        result = builder.vertex(step, x, name=v.name)
        if second.bias is None or not bool(second.bias.any()):
            return result
        shift = second.bias.reshape(-1, *[1] * (len(x.shape) - 1)).expand(x.shape).contiguous()
        return builder.sum([(1.0, result), (c, builder.constant(shift))], v.name)
    return None


def adjoint_ratios(back: LinearOperator, op: LinearOperator) -> Tensor | None:
    """t with back = Wᵀ·diag(t), one number for each output channel of W; None if there is no such t."""
    if back.in_shape != op.out_shape or back.out_shape != op.in_shape:
        return None
    if isinstance(op, DenseOperator) and isinstance(back, DenseOperator):
        theirs = back.weight.T
    elif isinstance(op, ConvOperator) and isinstance(back, Adjoint) and back.op.geometry == op.geometry:
        theirs = back.weight
    elif isinstance(op, ConvOperator) and isinstance(back, ConvOperator) and _has_adjoint_geometry(back, op):
        theirs = back.adjoint_kernel
    else:
        return None
    theirs, ours = theirs.flatten(1), op.weight.flatten(1)
    squares = (ours * ours).sum(1)
    ratios = (theirs * ours).sum(1) / torch.where(squares > 0, squares, torch.ones_like(squares))
    off = (theirs - ratios[:, None] * ours).norm(dim=1)
    return ratios if bool((off <= SAME_TOLERANCE * theirs.norm(dim=1).max()).all()) else None


def _has_adjoint_geometry(back: ConvOperator, op: ConvOperator) -> bool:
    """Whether a convolution has the geometry of the adjoint of `op`: stride 1, and the complementary padding."""
    axes = zip((back.rows, back.columns), (op.rows, op.columns), strict=True)
    return (
        back.padding_mode == op.padding_mode == "zeros"
        and back.groups == op.groups
        and back.adjoint_kernel.shape == op.kernel.shape
        and all(
            a.stride == b.stride == 1
            and a.dilation == b.dilation
            and (a.before, a.after) == (b.extent - 1 - b.before, b.extent - 1 - b.after)
            for a, b in axes
        )
    )


REWRITES = (join_padding, recognise_descent, join_after, join_identity, join_before, join_matrices)
