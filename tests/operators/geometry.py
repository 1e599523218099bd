"""Convolutions of every geometry, their matrices by definition, and the norms of these by LAPACK."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lipflow import ConvOperator, LinearOperator

Pair = tuple[int, int]
Draw = Callable[[int, int], int]  # an integer between two others, both included


@dataclass(frozen=True)
class Geometry:
    """A convolution without its kernel: y[o, i] = Σ_{c, j} K[o, c, j] x[c, i·stride + j·dilation - before]."""

    size: Pair
    kernel: Pair
    before: Pair
    after: Pair
    mode: str = "zeros"
    stride: Pair = (1, 1)
    dilation: Pair = (1, 1)
    groups: int = 1
    out: int = 1  # output channels of a group
    grouped: int = 1  # input channels of a group

    @property
    def kernel_shape(self) -> tuple[int, int, int, int]:
        return (self.out * self.groups, self.grouped, *self.kernel)

    @property
    def outputs(self) -> Pair:
        """The number of windows on each axis: below 1 if the kernel is larger than the padded input."""
        rows, columns = (
            (n + b + a - d * (k - 1) - 1) // s + 1
            for n, k, b, a, s, d in zip(
                self.size, self.kernel, self.before, self.after, self.stride, self.dilation, strict=True
            )
        )
        return rows, columns

    def conv(self, kernel: Tensor) -> ConvOperator:
        padding = ((self.before[0], self.after[0]), (self.before[1], self.after[1]))
        return ConvOperator(kernel, self.size, padding, self.mode, self.stride, self.dilation, self.groups)

    def matrix(self, kernel: Tensor) -> Tensor:
        """The matrix of the convolution, assembled from its definition  # (out·m₁·m₂, in·n₁·n₂)."""
        rows, columns = self._reads(0, kernel.dtype), self._reads(1, kernel.dtype)
        blocks = [
            torch.einsum("ocjk,jim,kln->oilcmn", block, rows, columns).reshape(
                self.out * math.prod(self.outputs), self.grouped * math.prod(self.size)
            )
            for block in kernel.split(self.out)
        ]
        return torch.block_diag(*blocks)

    def _reads(self, axis: int, dtype: torch.dtype) -> Tensor:
        """How often output i reads input r through tap j  # (taps, outputs, inputs)."""
        size = self.size[axis]
        reads = torch.zeros(self.kernel[axis], self.outputs[axis], size, dtype=dtype)
        for j in range(self.kernel[axis]):
            for i in range(self.outputs[axis]):
                r = i * self.stride[axis] + j * self.dilation[axis] - self.before[axis]
                if self.mode == "circular":
                    reads[j, i, r % size] += 1
                elif 0 <= r < size:
                    reads[j, i, r] += 1
        return reads


def draw_geometry(draw: Draw, side: int = 7, channels: int = 3) -> Geometry:
    """Any geometry: even kernels, asymmetric padding (also beyond the input), stride, dilation, groups, both modes."""

    def pair(low: int, high: int) -> Pair:
        return draw(low, high), draw(low, high)

    size, kernel, before, after = pair(1, side), pair(1, 4), pair(0, 4), pair(0, 4)
    stride, dilation = pair(1, 3), pair(1, 3)
    if draw(0, 2) == 0:  # what most networks use
        stride, dilation, after = (1, 1), (1, 1), before
    # Where the kernel does not fit, pad at the end until it does.
    rows, columns = (
        max(a, d * (k - 1) + 1 - n - b) for n, k, b, a, d in zip(size, kernel, before, after, dilation, strict=True)
    )
    mode = ("zeros", "circular")[draw(0, 1)]
    groups, out, grouped = draw(1, 2), draw(1, channels), draw(1, channels)
    return Geometry(size, kernel, before, (rows, columns), mode, stride, dilation, groups, out, grouped)


def affine_matrix(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype = torch.float64
) -> Tensor:
    """The matrix of an affine map: its columns are f(eₖ) - f(0)."""
    entries = math.prod(shape)
    points = torch.cat([torch.zeros(1, entries, dtype=dtype), torch.eye(entries, dtype=dtype)])
    with torch.no_grad():
        values = function(points.reshape(-1, *shape)).flatten(1)
    return (values[1:] - values[0]).T


def matrix_of(op: LinearOperator) -> Tensor:
    """The matrix of an operator, from its values."""
    return affine_matrix(op, op.in_shape, op.weight.real.dtype)


def svd_norm(matrix: Tensor) -> tuple[float, float]:
    """The greatest singular value computed by LAPACK, and a bound on its error.

    The algorithm is backward stable: the computed values are those of W + E with ‖E‖ ≤ p(m, n)·u·‖W‖, and moving W by
    E moves no singular value by more than ‖E‖ (Weyl). p is a modest polynomial (LAPACK Users' Guide, section 4.9);
    8(m + n) is generous, and still 40 times below the margin that norm_bound adds at these sizes.
    """
    value = float(np.linalg.svd(matrix.numpy(), compute_uv=False)[0])
    return value, 8 * sum(matrix.shape) * 2.0**-53 * value


def gaussian(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
