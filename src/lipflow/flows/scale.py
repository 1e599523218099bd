"""Factors of a weight that make its norm known or learned.

`Skew(weight, scale)` scales A, and `blocks.Scaled` scales W. Factors are computed from estimates, from below; the norm
of the scaled weight is bounded afterwards.
"""

import math
from abc import ABC, abstractmethod
from functools import partial

import torch
from torch import Tensor, nn

from lipflow.flows.cache import Cache
from lipflow.flows.weight import WARM_UP_ITERATIONS, Weight, track_top_vector
from lipflow.operators import DenseOperator, LinearOperator, norm_estimate
from lipflow.operators.norm import norm, power_iteration, start_vector
from lipflow.torch_state import storing


class Scale(nn.Module, ABC):
    """A positive factor for a weight, differentiable."""

    @abstractmethod
    def begin(self, kernel: Tensor) -> None:
        """Create parameters and buffers for a kernel. The owner of the weight calls it once."""

    @abstractmethod
    def forward(self, op: LinearOperator, weight: Weight) -> Tensor:
        """The factor for an operator made from `weight`."""


class SpectralScale(Scale):
    """1/‖W‖, by power iteration on the operator itself (Farnia et al. 2019): the scaled norm is about 1."""

    def begin(self, kernel: Tensor) -> None:
        """Nothing to create: the vector of the power iteration is the weight's."""

    def forward(self, op: LinearOperator, weight: Weight) -> Tensor:
        return 1 / _positive(weight.estimate(op))


class ReshapedScale(Scale):
    """factor/σ, where σ is the least norm of four reshapings of the kernel `(out, in, height, width)`.

    The matrices are (out·h) × (in·w), (out·w) × (in·h), out × (in·h·w) and (out·h·w) × in. ‖W‖ ≤ √(hw)·σ on inputs of
    any size, with zero padding or padding that keeps the size (Singla and Feizi 2021b). So with factor = 1/√(hw) the
    norm is at most about 1. SOC uses 0.7.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"the factor of a scale is a finite number above 0, not {factor!r}")
        self.factor = float(factor)

    def begin(self, kernel: Tensor) -> None:
        matrices = reshapings(kernel.detach())
        for i, matrix in enumerate(matrices):
            start = start_vector((matrix.shape[1],), matrix)
            self.register_buffer(f"u{i}", power_iteration(DenseOperator(matrix), start, WARM_UP_ITERATIONS))
        self.caches = [Cache() for _ in matrices]

    def forward(self, op: LinearOperator, weight: Weight) -> Tensor:
        estimates = []
        for i, matrix in enumerate(map(DenseOperator, reshapings(op.weight))):
            buffer = self.get_buffer(f"u{i}")
            u = track_top_vector(
                matrix, buffer.clone(), self.caches[i], partial(_store, buffer) if self.training else None
            )
            estimates.append(norm_estimate(matrix, u, 0))
        return self.factor / _positive(torch.stack(estimates).amin())

    def extra_repr(self) -> str:
        return f"factor={self.factor:.4g}"


class LearnedScale(Scale):
    """α/‖W‖_F with a learned α, initialised to ‖W‖_F: the scale of Cayley layers (Trockman and Kolter 2021).

    The published layer divides Ŵ by its norm over the half-spectrum of n × n pixels, about √(n(n/2 + 1))·‖W‖_F, so its
    α is larger by this factor. ‖W‖_F does not depend on the input size.
    """

    alpha: nn.Parameter

    def begin(self, kernel: Tensor) -> None:
        self.alpha = nn.Parameter(frobenius_norm(kernel.detach()).clone())

    def forward(self, op: LinearOperator, weight: Weight) -> Tensor:
        return self.alpha / _positive(frobenius_norm(op.weight))


def reshapings(kernel: Tensor) -> list[Tensor]:
    """The four matrices of a kernel. For a 1×1 kernel or a matrix they are equal, so it is one."""
    if kernel.ndim == 2 or kernel.shape[2:] == (1, 1):
        return [kernel.flatten(1)]
    out, grouped, height, width = kernel.shape
    return [
        kernel.permute(0, 2, 1, 3).reshape(out * height, grouped * width),
        kernel.permute(0, 3, 1, 2).reshape(out * width, grouped * height),
        kernel.reshape(out, grouped * height * width),
        kernel.permute(0, 2, 3, 1).reshape(out * height * width, grouped),
    ]


def frobenius_norm(weight: Tensor) -> Tensor:
    """‖W‖_F, from the norms of the rows: one sum of millions of squares would lose four digits in float32."""
    return norm(torch.linalg.vector_norm(weight.flatten(1), dim=1))


def _store(buffer: Tensor, u: Tensor) -> Tensor:
    with storing():
        buffer.copy_(u)
    return u


def _positive(x: Tensor) -> Tensor:
    """x, or 1 where x is 0: a zero weight stays zero."""
    return torch.where(x > 0, x, torch.ones_like(x))
