"""Cayley layers of any shape: dense, and circular convolutions with a Cayley transform at each frequency.

Trockman and Kolter 2021. These layers have any numbers of inputs and outputs and any kernel size, and learn the scale
α of their weight. For a square W, the layer is Q = (I + A)⁻¹(I - A) with A = W - Wᵀ: the paper's (I - A)⁻¹(I + A) with
the opposite sign of A. `lipflow.cayley` is that layer as a flow: the midpoint step of a skew field.
"""

import torch
from torch import Tensor

from lipflow.blocks.affine import Affine, Parametrization
from lipflow.flows.resolvent import inverse, symbols
from lipflow.flows.scale import LearnedScale
from lipflow.flows.weight import ConvWeight, DenseWeight
from lipflow.operators import ConvOperator, DenseOperator, FourierMultiplier, LinearOperator
from lipflow.shapes import require_flat
from lipflow.torch_state import without_autocast


def cayley_transform(w: Tensor) -> Tensor:
    """A matrix with orthonormal columns, or rows if they are fewer, from any matrix  # (..., out, in).

    With W = [U; V], U square, let A = U - U* + V*V. Then Q = [I - A; -2V](I + A)⁻¹ has Q*Q = I, because
    (I - A)*(I - A) + 4V*V = (I + A)*(I + A). I + A is invertible, because its Hermitian part is I + V*V. The upper
    block is 2(I + A)⁻¹ - I.
    """
    rows, columns = w.shape[-2:]
    if rows < columns:
        return cayley_transform(w.mH).mH
    u, v = w[..., :columns, :], w[..., columns:, :]
    identity = torch.eye(columns, dtype=w.dtype, device=w.device)
    with without_autocast(w):  # rounded factors would not give an orthogonal matrix
        if rows == columns:  # V is empty, and inductor has no empty complex tensors
            return 2 * inverse(identity + u - u.mH) - identity
        inverted = inverse(identity + u - u.mH + v.mH @ v)
        return torch.cat([2 * inverted - identity, -2 * v @ inverted], -2)


class CayleyMatrix(Parametrization):
    """The Cayley transform of αW/‖W‖_F, with α learned: orthonormal rows or columns, so ‖Q‖ = 1."""

    def __init__(self, in_features: int, out_features: int) -> None:
        weight = DenseWeight(in_features, out_features)
        super().__init__(weight.channels, in_features)
        self.weight, self.scale = weight, LearnedScale()
        self.scale.begin(weight.weight)

    def forward(self, x: Tensor) -> DenseOperator:
        require_flat(x.shape[1:], self.channels[0])
        weights = self.weight.weight, self.scale.alpha
        return DenseOperator(self.cache.transform(self.matrix, *weights, training=self.training))

    def matrix(self) -> Tensor:
        """The matrix `(out, in)`."""
        op = self.weight.operator(None)
        return cayley_transform(op.weight * self.scale(op, self.weight))


class CayleySymbols(Parametrization):
    """The Cayley transform of αŴ(ω)/‖W‖_F at each frequency ω of a circular convolution, with α learned.

    The discrete Fourier transform is unitary up to a factor, which cancels. So the layer has orthonormal rows or
    columns like its matrices: ‖Q‖ = 1. Its kernel is as large as the image.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int] = 3,
        in_size: tuple[int, int] | None = None,
    ) -> None:
        weight = ConvWeight(in_channels, out_channels, kernel_size, padding_mode="circular", in_size=in_size)
        super().__init__(weight.channels, weight.weight[0].numel())
        self.weight, self.scale = weight, LearnedScale()
        self.scale.begin(weight.weight)

    def forward(self, x: Tensor) -> FourierMultiplier:
        op = self.weight(x)
        weights = self.weight.weight, self.scale.alpha
        matrices = self.cache.transform(lambda: self.matrices(op), *weights, training=self.training, key=op.in_shape)
        return FourierMultiplier(matrices, (op.rows.size, op.columns.size))

    def matrices(self, op: LinearOperator) -> Tensor:
        """The matrix at each frequency of rfft2."""
        scaled = op.with_weight(op.weight * self.scale(op, self.weight))
        assert isinstance(scaled, ConvOperator)
        return cayley_transform(symbols(scaled)[0])


def cayley_dense(in_features: int, out_features: int, *, bias: bool = True) -> Affine:
    """The dense Cayley layer: a matrix with orthonormal rows or columns, and a bias."""
    return Affine(CayleyMatrix(in_features, out_features), bias)


def cayley_conv(
    in_channels: int,
    out_channels: int,
    kernel_size: int | tuple[int, int] = 3,
    *,
    in_size: tuple[int, int] | None = None,
    bias: bool = True,
) -> Affine:
    """The Cayley convolution: circular and orthogonal, of any kernel size, and a bias."""
    return Affine(CayleySymbols(in_channels, out_channels, kernel_size, in_size), bias)
