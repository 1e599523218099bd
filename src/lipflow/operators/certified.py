"""Linear operators as a frozen network runs them, in float64, with their norms and bounds on their rounding errors.

Backends may convolve by Winograd or FFT, which the error model does not cover (Note [error model]). Here every entry of
Wx is one sum of products, for a matrix and for a convolution; a Fourier multiplier is five such products in a row.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from fractions import Fraction
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from lipflow.operators.columns import convolve, matrix_of
from lipflow.operators.conv import ConvOperator
from lipflow.operators.dense import DenseOperator
from lipflow.operators.fourier import unit_circle
from lipflow.operators.multiplier import FourierMultiplier
from lipflow.operators.norm import norm_certificate
from lipflow.operators.operator import Adjoint, LinearOperator
from lipflow.rounding import SLACK, TINY, U, gamma, in_range, sqrt_up, up

# Bounds the error of an entry of R or G, relative to its amplitude: a cosine within 8u, an amplitude with a division
# and a root, and their product (docs/soundness-spectral.md, section 3).
TRANSFORM_ERROR = 12 * U


class CertifiedOperator(LinearOperator):
    """An operator W with ‖W‖ ≤ `norm`, and bounds on the rounding errors of Wx and Wᵀy."""

    def __init__(self, op: Any, norm: float) -> None:
        """op: a DenseOperator, ConvOperator or FourierMultiplier in float64."""
        self.op, self.norm = op, norm
        self.weight, self.in_shape, self.out_shape = op.weight, op.in_shape, op.out_shape
        self.entries = math.prod(op.in_shape) + math.prod(op.out_shape)  # of one input and one output together

    @abstractmethod
    def apply_error(self, reach: Fraction) -> Fraction:
        """At least ‖fl(Wx) - Wx‖ for ‖x‖ ≤ reach."""

    @abstractmethod
    def adjoint_error(self, reach: Fraction) -> Fraction:
        """At least ‖fl(Wᵀy) - Wᵀy‖ for ‖y‖ ≤ reach."""

    def certified_adjoint(self) -> "CertifiedOperator":
        """Wᵀ with the same constants."""
        return CertifiedAdjoint(self)

    @property
    def proof(self) -> dict[str, Any]:
        """What another program needs to verify the norm, besides the weights."""
        return dict(norm=self.norm)

    def with_weight(self, weight: Tensor) -> LinearOperator:
        """The same map with another weight, not certified."""
        return self.op.with_weight(weight)

    @property
    def geometry(self) -> dict[str, Any]:
        return self.op.geometry


def certified_operator(op: LinearOperator) -> CertifiedOperator:
    """An operator in certified arithmetic: its weights copied to float64, its norm bounded once."""
    if isinstance(op, Adjoint):
        return certified_operator(op.op).certified_adjoint()
    kind = _CERTIFIED.get(type(op))
    if kind is None:
        known = ", ".join(known.__name__ for known in _CERTIFIED)
        raise TypeError(f"freeze takes the operators {known}, not {type(op).__name__}")
    dtype = torch.complex128 if op.weight.is_complex() else torch.float64
    weight = op.weight.detach().to("cpu", dtype).resolve_conj().clone(memory_format=torch.contiguous_format)
    return kind(op.with_weight(weight))


class CertifiedAdjoint(CertifiedOperator):
    """Wᵀ of a certified operator W."""

    def __init__(self, inner: CertifiedOperator) -> None:
        super().__init__(inner.op, inner.norm)
        self.inner, self.in_shape, self.out_shape = inner, inner.out_shape, inner.in_shape

    def certified_adjoint(self) -> CertifiedOperator:
        return self.inner

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner.adjoint(x)

    def adjoint(self, y: Tensor) -> Tensor:
        return self.inner(y)

    def apply_error(self, reach: Fraction) -> Fraction:
        return self.inner.adjoint_error(reach)

    def adjoint_error(self, reach: Fraction) -> Fraction:
        return self.inner.apply_error(reach)

    @property
    def proof(self) -> dict[str, Any]:
        return self.inner.proof

    def with_weight(self, weight: Tensor) -> LinearOperator:
        return Adjoint(self.inner.with_weight(weight))

    @property
    def geometry(self) -> dict[str, Any]:
        return dict(self.inner.geometry, adjoint=True)


class CertifiedProduct(CertifiedOperator):
    """A matrix or a convolution: every entry of Wx and of Wᵀy is one sum of products, with `dots` roundings."""

    def __init__(self, op: DenseOperator | ConvOperator) -> None:
        norm, self.torus = norm_certificate(op)
        super().__init__(op, up(Fraction(norm) * (1 + SLACK)))
        self.spread = spread_bound(op)

    @property
    def proof(self) -> dict[str, Any]:
        return dict(norm=self.norm, torus=[list(side) for side in self.torus])

    @cached_property
    def matrix(self) -> Tensor:
        """The weights in the layout that the products read."""
        return matrix_of(self.op) if isinstance(self.op, ConvOperator) else self.weight

    @property
    def dots(self) -> tuple[int, int]:
        """A bound on the roundings of an entry of Wx, and of Wᵀy (docs/soundness.md, "Local errors").

        A convolution may add its taps to a zero, which is one more, and Wᵀ adds up the copies that padding makes.
        """
        if isinstance(self.op, DenseOperator):
            return self.weight.shape[1], self.weight.shape[0]
        out, grouped, height, width = self.weight.shape
        return grouped * height * width + 1, out // self.op.groups * height * width + 1 + repeats(self.op)

    def apply_error(self, reach: Fraction) -> Fraction:
        return self._error(self.dots[0], reach)

    def adjoint_error(self, reach: Fraction) -> Fraction:
        return self._error(self.dots[1], reach)

    def _error(self, dot: int, reach: Fraction) -> Fraction:
        return in_range(gamma(dot) * Fraction(self.spread) * reach + dot * repeats(self.op) * self.entries * TINY)

    def __call__(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self, True)

    def adjoint(self, y: Tensor) -> Tensor:
        return _Product.apply(y, self, False)


class _Product(torch.autograd.Function):
    """Wx, or Wᵀx if not `forward`. Autograd does not record how it is computed: the derivative of one is the other."""

    @staticmethod
    def forward(x: Tensor, w: CertifiedProduct, forward: bool) -> Tensor:
        if isinstance(w.op, ConvOperator):
            return convolve(w.op, x, forward, w.matrix)
        return x @ (w.weight.T if forward else w.weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, CertifiedProduct, bool], output: Tensor) -> None:
        _, ctx.op, ctx.is_forward = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Product.apply(grads[0], ctx.op, not ctx.is_forward), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _Product.apply(tangents[0], ctx.op, ctx.is_forward)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None, None], *args: Any) -> tuple[Tensor, int]:
        x = args[0].movedim(in_dims[0], 0)
        return _Product.apply(x.flatten(0, 1), *args[1:]).unflatten(0, x.shape[:2]), 0


def spread_bound(op: DenseOperator | ConvOperator) -> float:
    """At least ‖|W|‖₂, by Schur's test: √(greatest row sum · greatest column sum) of |W|."""
    weight = op.weight.abs()
    if isinstance(op, DenseOperator):
        rows, columns, terms, copies = weight.sum(1).max(), weight.sum(0).max(), max(weight.shape), 1
    else:
        rows = weight.sum((1, 2, 3)).max()
        columns = weight.unflatten(0, (op.groups, -1)).sum((1, 3, 4)).max()
        terms, copies = weight.numel(), repeats(op)
    product = Fraction(float(rows)) * Fraction(float(columns)) * copies / (1 - gamma(terms)) ** 2
    return up(sqrt_up(product) * (1 + SLACK) + terms * TINY)


def repeats(op: LinearOperator) -> int:
    """A bound on how many times padding repeats one input position."""
    if not isinstance(op, ConvOperator) or op.padding_mode == "zeros":
        return 1
    return math.prod(-(-axis.padded // axis.size) for axis in (op.rows, op.columns))


class CertifiedFourier(CertifiedOperator):
    """A Fourier multiplier as real matrix products: y = RᵀGᵀEGRx.

    Note [real transform]. Let x be an image of h × w pixels and m = w // 2 + 1. Along its rows let R be the real 2m × w
    matrix of the waves √(c/w)·cos(2πfj/w) and -√(c/w)·sin(2πfj/w), 0 ≤ f < m, with c = 1 if f is its own mirror image
    (0, and w/2 for even w) and c = 2 otherwise. Along its columns let G be the real 2h × 2h matrix [[C, S], [-S, C]]/√h
    of the cosines and sines of 2πfj/h: the Fourier matrix e^{-iωj}/√h, acting on real and imaginary parts. Then RᵀR = I
    and GᵀG = GGᵀ = I. E is the matrix [[Re M, -Im M], [Im M, Re M]] at each of the h × m frequencies. The map is real
    and linear for any matrices M, at 0 and at w/2 too, and of norm at most the greatest ‖M‖. The error model covers
    these products, and does not cover an FFT. Proofs: docs/soundness-spectral.md.
    """

    def __init__(self, op: FourierMultiplier) -> None:
        super().__init__(op, up(Fraction(norm_certificate(op)[0]) * (1 + SLACK)))
        self.real, self.imaginary = op.weight.real.contiguous(), op.weight.imag.contiguous()
        self.rows, self.columns = row_transform(op.in_size[1]), column_transform(op.in_size[0])  # R and G

    def __call__(self, x: Tensor) -> Tensor:
        batch, into = x.shape[:2]
        h, m, out, _ = self.real.shape
        z = (x @ self.rows.T).reshape(batch, into, h, 2, m)
        z = z.permute(0, 1, 4, 3, 2).reshape(batch, into, m, 2 * h) @ self.columns.T
        a, b = z.reshape(batch, into, m, 2, h).permute(3, 4, 2, 1, 0).unbind(0)  # (h, m, in, batch) each
        y = torch.stack([self.real @ a - self.imaginary @ b, self.imaginary @ a + self.real @ b])
        y = y.permute(4, 3, 2, 0, 1).reshape(batch, out, m, 2 * h) @ self.columns
        return y.reshape(batch, out, m, 2, h).permute(0, 1, 4, 3, 2).reshape(batch, out, h, 2 * m) @ self.rows

    @cached_property
    def spread(self) -> Fraction:
        """At least ‖|E|‖, by Schur's test at each frequency."""
        magnitude = self.real.abs() + self.imaginary.abs()
        sums = Fraction(float(magnitude.sum(-1).max())) * Fraction(float(magnitude.sum(-2).max()))
        terms = 2 * max(self.real.shape[2:])
        return sqrt_up(sums / (1 - gamma(terms)) ** 2) * (1 + SLACK) + terms * TINY

    def apply_error(self, reach: Fraction) -> Fraction:
        """The errors of five products with matrices A: of each, the terms of a sum, ‖A‖, ‖|A|‖, and the error of A."""
        (h, m, out, into), width = self.real.shape, self.op.in_size[1]
        row = (Fraction(1), sqrt_up(Fraction(width)), TRANSFORM_ERROR * sqrt_up(Fraction(2 * width)))
        column = (Fraction(1), sqrt_up(Fraction(2 * h)), 2 * TRANSFORM_ERROR * sqrt_up(Fraction(h)))
        matrices = (Fraction(self.norm), self.spread, Fraction(0))
        products = ((width, row), (2 * h, column), (2 * into, matrices), (2 * h, column), (2 * m, row))
        size, error, entries = reach, Fraction(0), 2 * h * m * max(out, into)
        for length, (norm, spread, off) in products:
            computed = size + error
            error = norm * error + (gamma(length) * (spread + off) + off) * computed + length * entries * TINY
            size = norm * size
        return in_range(error)

    def adjoint(self, y: Tensor) -> Tensor:
        raise ValueError(_NO_ADJOINT)

    def adjoint_error(self, reach: Fraction) -> Fraction:
        raise ValueError(_NO_ADJOINT)


_NO_ADJOINT = "the adjoint of a Fourier multiplier has no certified form; use a convolution or a matrix"


def row_transform(width: int) -> Tensor:
    """R of Note [real transform]  # (2m, w)."""
    m = width // 2 + 1
    cosine, sine = _waves(m, width)
    c = torch.tensor([1.0 if 2 * f % width == 0 else 2.0 for f in range(m)], dtype=torch.float64)
    amplitude = (c / width).sqrt()[:, None]
    return torch.cat([amplitude * cosine, -(amplitude * sine)])


def column_transform(height: int) -> Tensor:
    """G of Note [real transform]  # (2h, 2h)."""
    cosine, sine = _waves(height, height)
    amplitude = (torch.ones(1, dtype=torch.float64) / height).sqrt()
    cosine, sine = amplitude * cosine, amplitude * sine
    return torch.cat([torch.cat([cosine, sine], 1), torch.cat([-sine, cosine], 1)])


def _waves(frequencies: int, size: int) -> tuple[Tensor, Tensor]:
    """cos and sin of 2πfj/size  # (frequencies, size)."""
    return unit_circle(torch.arange(frequencies)[:, None] * torch.arange(size), size)


_CERTIFIED: dict[type, Callable[[Any], CertifiedOperator]] = cast(
    Any, {DenseOperator: CertifiedProduct, ConvOperator: CertifiedProduct, FourierMultiplier: CertifiedFourier}
)
