"""Primitives that move numbers or select among them, without rounding."""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lipflow.primitives.primitive import Exact, Norm, format_shape, require, require_shape
from lipflow.rounding import SLACK, sqrt_up
from lipflow.shapes import Shape


@dataclass(frozen=True, eq=False)
class Input(Exact):
    """The images that a network is given."""

    kind = "input"
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        require(1 <= len(self.shape) <= 8 and all(type(n) is int and n >= 1 for n in self.shape), self)

    def out_shape(self, *shapes: Shape) -> Shape:
        return self.shape

    def run(self, *xs: Tensor) -> Tensor:
        raise RuntimeError("an input primitive cannot be run: give its value to the graph")

    def lipschitz(self, norm: Norm, *distances: Fraction) -> Fraction:
        return Fraction(0)  # as a function of no inputs

    @property
    def size(self) -> str:
        return format_shape(self.shape)


@dataclass(frozen=True, eq=False)
class Constant(Exact):
    """Numbers that do not depend on the input. L = 0."""

    kind = "constant"
    reason = "0, as it does not depend on the input"
    value: Tensor

    def out_shape(self, *shapes: Shape) -> Shape:
        require_shape(not shapes, self, *shapes)
        return tuple(self.value.shape)

    def run(self, *xs: Tensor) -> Tensor:
        return self.value[None]

    def lipschitz(self, norm: Norm, *distances: Fraction) -> Fraction:
        return Fraction(0)


@dataclass(frozen=True, eq=False)
class Gather(Exact):
    """Entry i of the output is entry index[i] of the inputs, flattened and concatenated; -1 stands for a zero.

    Reshapes, slices, concatenations, padding with zeros and mirror images are gathers. If no entry of input k is taken
    more than m_k times, L = √(Σ m_k·L_k²).
    """

    kind = "gather"
    reason = "√ of how often an entry is taken"
    index: Tensor  # of the output's shape, int64
    sizes: list[int]  # the number of entries of each input

    def __post_init__(self) -> None:
        fine = self.index.dtype == torch.int64 and self.index.numel() > 0 and len(self.sizes) >= 1
        require(fine and all(type(n) is int and n >= 1 for n in self.sizes), self)
        require(bool((self.index >= -1).all()) and int(self.index.max()) < sum(self.sizes), self)

    def out_shape(self, *shapes: Shape) -> Shape:
        require_shape([math.prod(shape) for shape in shapes] == self.sizes, self, *shapes)
        return tuple(self.index.shape)

    def run(self, *xs: Tensor) -> Tensor:
        batch = next((len(x) for x in xs if len(x) != 1), 1)  # a constant has one row for all images
        flat = [x.reshape(len(x), n).expand(batch, n) for x, n in zip(xs, self.sizes, strict=True)]
        if self.is_reshape:
            return flat[0].reshape(batch, *self.index.shape)
        joined = flat[0] if len(flat) == 1 else torch.cat(flat, 1)
        return _Take.apply(joined, self).reshape(batch, *self.index.shape)

    def lipschitz(self, norm: Norm, *distances: Fraction) -> Fraction:
        if len(distances) == 1:
            return _root(self.multiplicities[0]) * distances[0]
        return sqrt_up(sum((m * d * d for m, d in zip(self.multiplicities, distances, strict=True)), Fraction(0)))

    @cached_property
    def is_reshape(self) -> bool:
        """Whether it only reshapes its only input."""
        flat = self.index.flatten()
        return self.sizes == [len(flat)] and torch.equal(flat, torch.arange(len(flat)))

    @cached_property
    def multiplicities(self) -> list[int]:
        """The greatest number of times that an entry of each input is taken."""
        counts = self.index.flatten()[self.index.flatten() >= 0].bincount(minlength=sum(self.sizes))
        return [int(part.max()) for part in counts.split(self.sizes)]

    @cached_property
    def taken(self) -> Tensor:
        """The flat index, with 0 instead of -1."""
        return self.index.flatten().clamp_min(0)

    @cached_property
    def zeros(self) -> Tensor | None:
        """The positions of the zeros, if there are any."""
        zeros = (self.index.flatten() < 0).nonzero()[:, 0]
        return zeros if len(zeros) else None

    @cached_property
    def kept(self) -> tuple[Tensor, Tensor]:
        """The positions that are not zeros, and the entries that they take."""
        positions = (self.index.flatten() >= 0).nonzero()[:, 0]
        return positions, self.taken[positions]


class _Take(torch.autograd.Function):
    """x[:, index], with zeros where the index is -1; autograd would sum the derivatives of the zeros too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, g: Gather) -> Tensor:
        y = x.index_select(1, g.taken)
        return y if g.zeros is None else y.index_fill(1, g.zeros, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Gather], output: Tensor) -> None:
        ctx.gather = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        positions, entries = ctx.gather.kept
        grad = grads[0] if ctx.gather.zeros is None else grads[0].index_select(1, positions)
        return grad.new_zeros(len(grad), sum(ctx.gather.sizes)).index_add(1, entries, grad), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _Take.apply(tangents[0], ctx.gather)


@dataclass(frozen=True, eq=False)
class MaxPool(Exact):
    """The greatest entry of each window. L = √m if an entry is in at most m windows."""

    kind = "max_pool"
    reason = "√ of the greatest number of windows on one entry"
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def __post_init__(self) -> None:
        pairs = (self.kernel, self.stride, self.padding, self.dilation)
        integers = all(len(pair) == 2 and all(type(n) is int for n in pair) for pair in pairs)
        require(integers and min(*self.kernel, *self.stride, *self.dilation) >= 1 and min(self.padding) >= 0, self)
        require(all(2 * p <= k for p, k in zip(self.padding, self.kernel, strict=True)), self)

    def out_shape(self, *shapes: Shape) -> Shape:
        require_shape(len(shapes) == 1 and len(shapes[0]) == 3, self, *shapes)
        channels, *size = shapes[0]
        axes = zip(size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        out = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]
        require_shape(min(out) >= 1, self, *shapes)
        return channels, out[0], out[1]

    def run(self, *xs: Tensor) -> Tensor:
        return F.max_pool2d(xs[0], self.kernel, self.stride, self.padding, self.dilation)

    def lipschitz(self, norm: Norm, *distances: Fraction) -> Fraction:
        return _root(overlap(self.kernel, self.stride, self.dilation)) * distances[0]

    @property
    def size(self) -> str:
        return f"kernel {self.kernel}, stride {self.stride}"


def overlap(kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]) -> int:
    """The greatest number of windows that read one position: per axis ⌈k·gcd(d, s)/s⌉, multiplied."""
    return math.prod(-(-k * math.gcd(d, s) // s) for k, s, d in zip(kernel, stride, dilation, strict=True))


def _root(count: int) -> Fraction:
    """√count, with slack where it is irrational; 0 and 1 are exact."""
    return sqrt_up(Fraction(count)) * (1 + (SLACK if count > 1 else 0))
