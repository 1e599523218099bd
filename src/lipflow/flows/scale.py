"""What a learned weight is multiplied by, so that its norm is known or learned.

`Skew(weight, scale)` turns with a scaled A, and `lipflow.spectral_conv` and its kin apply a scaled W. A scale is made
from estimates, from below; what it does to a norm is certified afterwards, on the scaled weight.
"""

import math
from abc import ABC, abstractmethod
from functools import partial

import torch
from torch import Tensor, nn

from lipflow.fast.torch_state import to_keep
from lipflow.flows.cache import Cache
from lipflow.flows.weight import WARM_UP, Weight, follow
from lipflow.operators import DenseOperator, LinearOperator, norm_estimate
from lipflow.operators.norm import norm, power_iteration, start_vector


class Scale(nn.Module, ABC):
    """A positive factor, differentiable, that follows a weight."""

    @abstractmethod
    def begin(self, kernel: Tensor) -> None:
        """Begin with a kernel: called once, where the scale is given its weight, so that all state exists by then."""

    @abstractmethod
    def forward(self, op: LinearOperator, weight: Weight) -> Tensor:
        """The factor for an operator made from `weight`."""


class SpectralScale(Scale):
    """1/‖W‖, by power iteration on the operator itself (Farnia et al. 2019): the norm is at most about 1."""

    def begin(self, kernel: Tensor) -> None:
        """Nothing to begin with: the weight carries the vector."""

    def forward(self, op: LinearOperator, weight: Weight) -> Tensor:
        return 1 / _positive(weight.estimate(op))


class ReshapedScale(Scale):
    """factor/σ, with σ the least norm of four reshapings of the kernel `(out, in, height, width)`.

    The matrices are (out·h) × (in·w), (out·w) × (in·h), out × (in·h·w) and (out·h·w) × in, and ‖W‖ ≤ √(hw)·σ on inputs
    of any size, with zero padding or padding that keeps the size (Singla and Feizi 2021b). So factor = 1/√(hw) makes
    the norm at most about 1, and SOC takes 0.7.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"a scale is multiplied by a finite factor above 0, not {factor!r}")
        self.factor = float(factor)

    def begin(self, kernel: Tensor) -> None:
        matrices = reshapings(kernel.detach())
        for i, matrix in enumerate(matrices):
            start = start_vector((matrix.shape[1],), matrix)
            self.register_buffer(f"u{i}", power_iteration(DenseOperator(matrix), start, WARM_UP))
        self.caches = [Cache() for _ in matrices]

    def forward(self, op: LinearOperator, weight: Weight) -> Tensor:
        estimates = []
        for i, matrix in enumerate(map(DenseOperator, reshapings(op.weight))):
            buffer = self.get_buffer(f"u{i}")
            u = follow(matrix, buffer.clone(), self.caches[i], partial(_keep, buffer) if self.training else None)
            estimates.append(norm_estimate(matrix, u, 0))
        return self.factor / _positive(torch.stack(estimates).amin())

    def extra_repr(self) -> str:
        return f"factor={self.factor:.4g}"


class LearnedScale(Scale):
    """α/‖W‖_F with α learned, from ‖W‖_F, so that nothing changes at first: Cayley's (Trockman and Kolter 2021).

    By Parseval ‖Ŵ‖ over all n² frequencies is n‖W‖_F, so the norm is taken in space, where it knows no input size.
    """

    alpha: nn.Parameter

    def begin(self, kernel: Tensor) -> None:
        self.alpha = nn.Parameter(length(kernel.detach()).clone())

    def forward(self, op: LinearOperator, weight: Weight) -> Tensor:
        return self.alpha / _positive(length(op.weight))


def reshapings(kernel: Tensor) -> list[Tensor]:
    """The four matrices of a kernel; those of a 1×1 kernel, or of a matrix, are all the same one."""
    if kernel.ndim == 2 or kernel.shape[2:] == (1, 1):
        return [kernel.flatten(1)]
    out, grouped, height, width = kernel.shape
    return [
        kernel.permute(0, 2, 1, 3).reshape(out * height, grouped * width),
        kernel.permute(0, 3, 1, 2).reshape(out * width, grouped * height),
        kernel.reshape(out, grouped * height * width),
        kernel.permute(0, 2, 3, 1).reshape(out * height * width, grouped),
    ]


def length(weight: Tensor) -> Tensor:
    """‖W‖_F, row by row: one sum over millions of squares would lose four digits in float32."""
    return norm(torch.linalg.vector_norm(weight.flatten(1), dim=1))


def _keep(buffer: Tensor, u: Tensor) -> Tensor:
    with to_keep():
        buffer.copy_(u)
    return u


def _positive(x: Tensor) -> Tensor:
    """x, or 1 where there is nothing to divide by: a zero weight stays zero."""
    return torch.where(x > 0, x, torch.ones_like(x))
