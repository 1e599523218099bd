"""Bounds of zero-padded convolutions that are exact along the rows, where a torus is not (docs/norms.md, section 12).

The rows of the output are cut into strips, so thick that only neighbours read a common row of the input. Then WWᵀ is
block tridiagonal. Along the columns W is exact, or on a twisted torus. Each row of the kernel gives one matrix, called
a tap; on a torus there is such a list of taps for each frequency.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from lipflow.operators.conv import Axis
from lipflow.operators.fourier import Side, symbols
from lipflow.operators.gram import band_bound, band_shift, cholesky
from lipflow.rounding import TINY, gamma, square_sum_max

BATCH_BYTES = 8 * 2**20  # of the blocks of the frequencies computed at once


class Strips(NamedTuple):
    """An axis cut into strips: strip t has the outputs t·`thickness` + i, 0 ≤ i < `thickness`.

    It reads the `window` positions from t·`step` - before on. As window ≤ 2·step, the strips t and t + 2 read no common
    position.
    """

    pieces: int
    thickness: int
    step: int
    window: int

    @staticmethod
    def of(axis: Axis) -> "Strips":
        thickness = max(1, -(-axis.extent // axis.stride) - 1)
        step = thickness * axis.stride
        return Strips(-(-axis.outputs // thickness), thickness, step, step - axis.stride + axis.extent)

    def neighbours(self, axis: Axis) -> Tensor:
        """Which outputs and which positions exist, in the strip before and in the strip itself  # (pieces, 2, ·)."""
        t = torch.arange(self.pieces)[:, None]
        outputs = t * self.thickness + torch.arange(self.thickness)
        positions = t * self.step + torch.arange(self.window) - axis.before
        exist = torch.cat([outputs < axis.outputs, (positions >= 0) & (positions < axis.size)], 1)
        return torch.stack([exist.roll(1, 0) & (t > 0), exist], 1)


def toeplitz(taps: Tensor, outputs: int, stride: int, dilation: int) -> Tensor:
    """The matrix of some outputs of one axis  # (batch, taps, a, b) to (batch, outputs, a, positions, b)."""
    batch, k, a, b = taps.shape
    extent = dilation * (k - 1) + 1
    matrix = taps.new_zeros(batch, outputs, a, (outputs - 1) * stride + extent, b)
    for i in range(outputs):
        matrix[:, i, :, i * stride : i * stride + extent : dilation] = taps.transpose(1, 2)
    return matrix


def exact_columns(kernel: Tensor, columns: Axis) -> Tensor:
    """The matrix of each row of a kernel along the columns  # (1, rows of the kernel, out·m, in·n)."""
    matrix = toeplitz(kernel.permute(2, 3, 0, 1), columns.outputs, columns.stride, columns.dilation)
    matrix = matrix[:, :, :, columns.before : columns.before + columns.size]  # the other positions are padding
    return matrix.flatten(3).flatten(1, 2)[None]


def torus_columns(kernel: Tensor, columns: Axis, side: Side) -> Iterator[Tensor]:
    """The same matrices at half of the frequencies of a torus, as [[Re, -Im], [Im, Re]], times √stride.

    (frequencies, rows of the kernel, 2·out, 2·stride·in)
    """
    out, grouped, height, width = kernel.shape
    rows_as_channels = kernel.permute(2, 0, 1, 3).reshape(height * out, grouped, width, 1)
    for batch in symbols(rows_as_channels, (columns.dilation, 1), (side, (1, 0)), (columns.stride, 1)):
        yield batch.unflatten(1, (2, height, out)).transpose(1, 2).flatten(2, 3)


def strip_bound(taps: Iterable[Tensor], rows: Axis, guess: float = 0.0) -> Fraction:
    """At least the greatest λmax(WWᵀ), where W has these taps along the rows  # (batch, taps, a, b)."""
    greatest = Fraction(0)
    for gram in _grams(taps, rows):
        bound, guess = band_bound(*gram, guess)
        greatest = max(greatest, bound)
    return greatest


def strip_shift(taps: Callable[[], Iterable[Tensor]], rows: Axis, limit: float) -> float:
    """An approximation of `strip_bound`, or ∞ if it exceeds the limit: to choose a torus, never to certify."""
    finite = not math.isinf(limit)
    if finite and any(cholesky(diagonal, below, limit) is None for diagonal, below, _ in _grams(taps(), rows)):
        return math.inf
    shift = 0.0
    for diagonal, below, _ in _grams(taps(), rows):
        shift = band_shift(diagonal, below, shift)[0]
    return shift


def strip_work(rows: Axis, a: int, b: int) -> int:
    """The approximate number of multiplications of `strip_bound` for taps of a × b."""
    cut = Strips.of(rows)
    q, n = cut.thickness * a, cut.window * b
    return 5 * cut.pieces * q**3 + 5 * q * q * n


def _grams(taps: Iterable[Tensor], rows: Axis) -> Iterator[tuple[Tensor, Tensor, Fraction]]:
    """The blocks of fl(WWᵀ) on the diagonal and below it, and their distance to WWᵀ, some frequencies at a time."""
    for chunk in taps:
        blocks = 8 * rows.outputs * Strips.of(rows).thickness * chunk.shape[2] ** 2
        yield from (_gram(part, rows) for part in chunk.split(max(1, BATCH_BYTES // blocks)))


def _gram(taps: Tensor, rows: Axis) -> tuple[Tensor, Tensor, Fraction]:
    cut = Strips.of(rows)
    whole = toeplitz(taps, cut.thickness, rows.stride, rows.dilation)  # a strip away from the border
    shared = max(cut.window - cut.step, 0) * taps.shape[3]  # columns in common with the strip before

    def strip(exist: Tensor) -> Tensor:
        outputs, positions = exist.split((cut.thickness, cut.window))
        return (whole * outputs[:, None, None, None] * positions[:, None]).flatten(3).flatten(1, 2)

    def products(neighbours: Tensor) -> tuple[Tensor, Tensor, Fraction]:
        last, this = map(strip, neighbours)
        return this @ this.mT, this[..., :shared] @ last[..., last.shape[-1] - shared :].mT, square_sum_max(this)

    # Away from the border all strips are equal, and so are their products.
    kinds, kind = cut.neighbours(rows).unique(dim=0, return_inverse=True)
    diagonal, below, squares = zip(*map(products, kinds), strict=True)
    square = sum((squares[k] for k in kind.tolist()), Fraction(0))  # at least ‖W‖_F²
    q, n = cut.thickness * taps.shape[2], cut.window * taps.shape[3]
    product_error = gamma(n) * square + min(cut.pieces, 3) * q * n * TINY
    return torch.stack(diagonal, 1)[:, kind], torch.stack(below, 1)[:, kind[1:]], product_error
