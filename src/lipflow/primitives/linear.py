"""Affine primitives: sums, scales, matrices, convolutions, averages."""

import math
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from lipflow.operators import LinearOperator
from lipflow.operators.certified import CertifiedOperator
from lipflow.operators.operator import add_bias
from lipflow.primitives.primitive import Norm, Primitive, no_operator, require, require_affine, require_shape
from lipflow.rounding import TINY, U, gamma, in_range, is_power_of_two, norm_up, sqrt_up
from lipflow.shapes import Shape


@dataclass(frozen=True, eq=False)
class Affine(Primitive):
    """Wx + b, with b along the rows of a matrix or the output channels of a convolution, or without b."""

    kind = "affine"
    reason = "certified norm"
    op: LinearOperator
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        require_affine(self, self.op, self.bias)

    def out_shape(self, *shapes: Shape) -> Shape:
        require_shape(shapes == (self.op.in_shape,), self, *shapes)
        return self.op.out_shape

    def run(self, *xs: Tensor) -> Tensor:
        return add_bias(self.op(xs[0]), self.bias)

    def lipschitz(self, norm: Norm, *distances: Fraction) -> Fraction:
        return Fraction(norm(self.op)) * distances[0]

    def rounding(self, entries: int, *reaches: Fraction) -> Fraction:
        """The errors of the product, and of the addition of b."""
        return affine_error(self.op, self.bias, reaches[0])


def bias_norm(op: LinearOperator, bias: Tensor | None) -> Fraction:
    """At least the norm of b, repeated at all positions of the output."""
    if bias is None:
        return Fraction(0)
    return Fraction(norm_up(bias)) * sqrt_up(Fraction(math.prod(op.out_shape) // len(bias)))


def affine_error(op: LinearOperator, bias: Tensor | None, reach: Fraction) -> Fraction:
    """At least ‖fl(Wx + b) - (Wx + b)‖ for ‖x‖ ≤ reach, in certified arithmetic."""
    assert isinstance(op, CertifiedOperator)
    product = op.apply_error(reach)
    if bias is None:
        return product
    total = Fraction(op.norm) * reach + product + bias_norm(op, bias)
    return in_range(product + U * total + op.entries * TINY)


@dataclass(frozen=True, eq=False)
class Sum(Primitive):
    """c₁x₁ + c₂x₂ + …, of inputs of one shape. L = Σ |cᵢ|Lᵢ."""

    kind = "sum"
    reason = "sum of |coefficients|"
    coefficients: list[float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "coefficients", [float(c) for c in self.coefficients])
        fine = all(math.isfinite(c) and (c == 0 or abs(c) >= TINY) for c in self.coefficients)
        require(len(self.coefficients) >= 1 and fine, self)

    def out_shape(self, *shapes: Shape) -> Shape:
        require_shape(len(shapes) == len(self.coefficients) and len(set(shapes)) == 1, self, *shapes)
        return shapes[0]

    def run(self, *xs: Tensor) -> Tensor:
        terms = (x if c == 1 else -x if c == -1 else c * x for c, x in zip(self.coefficients, xs, strict=True))
        total = next(terms)
        for term in terms:
            total = total + term
        return total

    def lipschitz(self, norm: Norm, *distances: Fraction) -> Fraction:
        terms = zip(self.coefficients, distances, strict=True)
        return sum((abs(Fraction(c)) * d for c, d in terms), Fraction(0))

    def rounding(self, entries: int, *reaches: Fraction) -> Fraction:
        """Each of n terms is multiplied once, without rounding for powers of two, and added at most n - 1 times."""
        roundings = len(reaches) - 1 + (not all(map(is_power_of_two, self.coefficients)))
        size = self.lipschitz(no_operator, *reaches)
        return gamma(roundings) * size + len(reaches) * entries * TINY

    @property
    def size(self) -> str:
        return " + ".join(f"{c:.4g}·x{i}" for i, c in enumerate(self.coefficients, 1))


@dataclass(frozen=True, eq=False)
class Scale(Primitive):
    """Each channel, or each entry, times a factor. L is the greatest |factor|."""

    kind = "scale"
    reason = "greatest factor"
    factor: Tensor  # (channels,), or the shape of an input

    def out_shape(self, *shapes: Shape) -> Shape:
        fits = len(shapes) == 1 and len(shapes[0]) >= 1 and self.factor.numel() > 0
        require_shape(fits and tuple(self.factor.shape) in (shapes[0], shapes[0][:1]), self, *shapes)
        return shapes[0]

    def run(self, *xs: Tensor) -> Tensor:
        (x,) = xs
        factor = self.factor.to(x.dtype)
        return x * (factor if factor.ndim == x.ndim - 1 else factor.reshape(-1, *[1] * (x.ndim - 2)))

    def lipschitz(self, norm: Norm, *distances: Fraction) -> Fraction:
        return Fraction(float(self.factor.abs().max())) * distances[0]

    def rounding(self, entries: int, *reaches: Fraction) -> Fraction:
        return U * self.lipschitz(no_operator, *reaches) + entries * TINY


@dataclass(frozen=True, eq=False)
class AvgPool(Primitive):
    """The sum over each window, over a divisor. Windows do not overlap, and entries after the last one are dropped.

    L = √(ab)/divisor for windows of a × b, as the rows of its matrix are orthogonal and have this norm.
    """

    kind = "avg_pool"
    reason = "√(entries of a window)/divisor, as its rows are orthogonal"
    window: tuple[int, int]
    divisor: float

    def __post_init__(self) -> None:
        fine = len(self.window) == 2 and all(type(n) is int and n >= 1 for n in self.window)
        require(fine and TINY <= self.divisor < math.inf, self)

    def out_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        fits = len(shape) == 3 and self.window[0] <= shape[1] and self.window[1] <= shape[2]
        require_shape(fits, self, shape)
        return shape[0], shape[1] // self.window[0], shape[2] // self.window[1]

    def run(self, *xs: Tensor) -> Tensor:
        (x,), (a, b) = xs, self.window
        x = x[:, :, : x.shape[2] // a * a, : x.shape[3] // b * b]
        return x.unflatten(3, (-1, b)).unflatten(2, (-1, a)).sum((3, 5)) / self.divisor

    def lipschitz(self, norm: Norm, *distances: Fraction) -> Fraction:
        return sqrt_up(Fraction(math.prod(self.window))) / Fraction(self.divisor) * distances[0]

    def rounding(self, entries: int, *reaches: Fraction) -> Fraction:
        """ab - 1 additions and a division: γ_ab times the norm of the average of |x|, which is at most L‖x‖."""
        size = self.lipschitz(no_operator, *reaches)
        underflow = entries * TINY * (1 + math.prod(self.window) / Fraction(self.divisor))
        return gamma(math.prod(self.window)) * size + underflow
