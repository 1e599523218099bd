"""A linear map between images that is a matrix at each frequency, run as real matrix products: Cayley convolutions.

Note [real transform]. Let x be an image of h × w pixels and m = w // 2 + 1. Along its rows let R be the real 2m × w
matrix of the waves √(c/w)·cos(2πfj/w) and -√(c/w)·sin(2πfj/w), 0 ≤ f < m, with c = 1 if f is its own mirror image (0,
and w/2 for even w) and c = 2 otherwise. Along its columns let G be the real 2h × 2h matrix [[C, S], [-S, C]]/√h of the
cosines and sines of 2πfj/h: the Fourier matrix e^{-iωj}/√h, acting on real and imaginary parts. Then RᵀR = I and
GᵀG = GGᵀ = I, and

    y = Rᵀ Gᵀ E G R x,    E = the matrix [[Re M, -Im M], [Im M, Re M]] at each of the h × m frequencies,

is what the primitive stands for: real-linear whatever the matrices M are, at 0 and at w/2 too, and of norm at most the
greatest ‖M‖. An FFT is no sum of products that the error model knows; these are. Proofs: docs/soundness-spectral.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor

from lipflow.bound import Shape
from lipflow.frozen.linear import ROOM
from lipflow.frozen.operation import Primitive, require
from lipflow.operators.fourier import unit_circle
from lipflow.operators.norm import CHUNK_BYTES, gram_bound
from lipflow.rounding import TINY, U, gamma, power_of_two, sqrt_up, up

# Entries of R and G: a cosine within 8u, an amplitude with two roundings, and their product.
ENTRY = 12 * U


@dataclass(frozen=True, eq=False)
class Spectral(Primitive):
    """RᵀGᵀEGRx with M = real + i·imaginary at the frequencies of rfft2  # (h, w // 2 + 1, out, in). L = max ‖M‖."""

    kind = "spectral"
    real: Tensor
    imaginary: Tensor
    width: int

    def __post_init__(self) -> None:
        fits = self.real.ndim == 4 and self.real.shape == self.imaginary.shape and 0 not in self.real.shape
        require(fits and self.width >= 1 and self.real.shape[1] == self.width // 2 + 1, self)

    def fits(self, shape: Shape) -> bool:
        return shape == self.in_shape

    def __call__(self, x: Tensor) -> Tensor:
        batch, into = x.shape[:2]
        h, m, out, _ = self.real.shape
        z = (x @ self.rows.T).reshape(batch, into, h, 2, m)
        z = z.permute(0, 1, 4, 3, 2).reshape(batch, into, m, 2 * h) @ self.columns.T
        a, b = z.reshape(batch, into, m, 2, h).permute(3, 4, 2, 1, 0).unbind(0)  # (h, m, in, batch) each
        y = torch.stack([self.real @ a - self.imaginary @ b, self.imaginary @ a + self.real @ b])
        y = y.permute(4, 3, 2, 0, 1).reshape(batch, out, m, 2 * h) @ self.columns
        return y.reshape(batch, out, m, 2, h).permute(0, 1, 4, 3, 2).reshape(batch, out, h, 2 * m) @ self.rows

    @property
    def in_shape(self) -> tuple[int, int, int]:
        return self.real.shape[3], self.real.shape[0], self.width

    @cached_property
    def rows(self) -> Tensor:
        """R  # (2m, w)."""
        return row_transform(self.width)

    @cached_property
    def columns(self) -> Tensor:
        """G  # (2h, 2h)."""
        return column_transform(self.real.shape[0])

    @cached_property
    def norm(self) -> float:
        """At least the greatest ‖M‖, certified like that of a matrix."""
        scale = power_of_two(float(torch.maximum(self.real.abs().max(), self.imaginary.abs().max())))
        if scale == 0:
            return 0.0
        greatest = max(gram_bound(e) for e in self._embeddings(scale))
        underflow = 4 * self.real[0, 0].numel() * TINY
        return up((sqrt_up(greatest) + underflow) * Fraction(scale) * (1 + ROOM))

    def _embeddings(self, scale: float) -> Iterator[Tensor]:
        """[[Re M, -Im M], [Im M, Re M]] at some frequencies after the other, divided by a power of two."""
        real, imaginary = self.real.flatten(0, 1), self.imaginary.flatten(0, 1)
        at_once = max(1, CHUNK_BYTES // (32 * real[0].numel()))
        for re, im in zip(real.split(at_once), imaginary.split(at_once), strict=True):
            re, im = re / scale, im / scale
            yield torch.cat([torch.cat([re, -im], -1), torch.cat([im, re], -1)], -2)

    @cached_property
    def spread(self) -> Fraction:
        """At least ‖|E|‖, by Schur's test at each frequency."""
        magnitude = self.real.abs() + self.imaginary.abs()
        sums = Fraction(float(magnitude.sum(-1).max())) * Fraction(float(magnitude.sum(-2).max()))
        terms = 2 * max(self.real.shape[2:])
        return sqrt_up(sums / (1 - gamma(terms)) ** 2) * (1 + ROOM) + terms * TINY

    @property
    def lipschitz(self) -> float:
        return self.norm

    def error(self, reach: Fraction, entries: int) -> Fraction:
        """Five products, each with its inner length, ‖A‖, ‖|A|‖, and the error of the entries of A."""
        h, m, out, into = self.real.shape
        row = (Fraction(1), sqrt_up(Fraction(self.width)), ENTRY * sqrt_up(Fraction(2 * self.width)))
        column = (Fraction(1), sqrt_up(Fraction(2 * h)), 2 * ENTRY * sqrt_up(Fraction(h)))
        matrices = (Fraction(self.norm), self.spread, Fraction(0))
        size, wrong, held = reach, Fraction(0), 2 * h * m * max(out, into)
        for length, (norm, spread, off) in (
            (self.width, row),
            (2 * h, column),
            (2 * into, matrices),
            (2 * h, column),
            (2 * m, row),
        ):
            computed = size + wrong
            wrong = norm * wrong + (gamma(length) * (spread + off) + off) * computed + length * held * TINY
            size = norm * size
        return wrong

    @property
    def how(self) -> str:
        return "certified norm of its matrices at all frequencies"

    @property
    def shape(self) -> str:
        h, _, out, into = self.real.shape
        return f"{into}×{h}×{self.width} → {out}×{h}×{self.width}"


def row_transform(width: int) -> Tensor:
    """R of Note [real transform]  # (2m, w)."""
    m = width // 2 + 1
    cosine, sine = _waves(m, width)
    own = torch.tensor([1.0 if 2 * f % width == 0 else 2.0 for f in range(m)], dtype=torch.float64)
    amplitude = (own / width).sqrt()[:, None]
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


def spectral(matrices: Tensor, width: int) -> Spectral:
    """The primitive of complex matrices at the frequencies of rfft2  # (h, w // 2 + 1, out, in)."""
    held = matrices.detach().to("cpu", torch.complex128).resolve_conj()
    if not bool(torch.isfinite(held).all()):
        raise ValueError("the matrices of a spectral map have NaN or infinite entries, so they have no norm to bound")
    real, imaginary = (part.clone(memory_format=torch.contiguous_format) for part in (held.real, held.imag))
    return Spectral(real, imaginary, width)
