"""Cayley layers of any shape: dense, and circular convolutions by one Cayley transform at each frequency.

Trockman and Kolter 2021. `lipflow.cayley` is the square layer as a flow, the midpoint step through a skew field; these
take any number of inputs and outputs, any kernel, and learn the scale α of their weight.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lipflow.blocks.affine import Affine, Parameterisation
from lipflow.flows.cache import Cache
from lipflow.flows.resolvent import inverse, symbols
from lipflow.flows.scale import LearnedScale
from lipflow.flows.weight import ConvWeight, DenseWeight, require_flat
from lipflow.operators import ConvOperator, DenseOperator, FourierMultiplier, LinearOperator
from lipflow.operators.norm import in_full


def cayley_transform(w: Tensor) -> Tensor:
    """A matrix with orthonormal columns, or rows if it has fewer of them, from any matrix  # (..., out, in).

    With W = [U; V], U square, let A = U - U* + V*V. Then Q = [I - A; -2V](I + A)⁻¹ has Q*Q = I, as
    (I - A)*(I - A) + 4V*V = (I + A)*(I + A); and I + A is invertible, as its Hermitian part is I + V*V. The upper block
    is 2(I + A)⁻¹ - I.
    """
    rows, columns = w.shape[-2:]
    if rows < columns:
        return cayley_transform(w.mH).mH
    u, v = w[..., :columns, :], w[..., columns:, :]
    identity = torch.eye(columns, dtype=w.dtype, device=w.device)
    with in_full(w):  # rounded factors would not give an orthogonal matrix
        inverted = inverse(identity + u - u.mH + v.mH @ v)
        return torch.cat([2 * inverted - identity, -2 * v @ inverted], -2)


class CayleyMatrix(Parameterisation):
    """The Cayley transform of αW/‖W‖_F, with α learned: orthonormal rows or columns, so ‖Q‖ = 1."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight, self.scale, self.cache = DenseWeight(in_features, out_features), LearnedScale(), Cache()
        self.scale.begin(self.weight.weight)

    @property
    def channels(self) -> tuple[int, int]:
        return self.weight.channels

    @property
    def fan_in(self) -> int:
        return self.weight.weight[0].numel()

    def forward(self, x: Tensor) -> DenseOperator:
        require_flat(x.shape[1:], self.channels[0])
        weights = self.weight.weight, self.scale.alpha
        return DenseOperator(self.matrix() if self.training else self.cache.transform(self.matrix, *weights))

    def matrix(self) -> Tensor:
        """The matrix `(out, in)`."""
        op = self.weight.operator(None)
        return cayley_transform(op.weight * self.scale(op, self.weight))


class CayleySymbols(Parameterisation):
    """The Cayley transform of αŴ(ω)/‖W‖_F at each frequency ω of a circular convolution, with α learned.

    The discrete Fourier transform is unitary, up to a factor that cancels, so the layer has orthonormal rows or columns
    as its matrices have: ‖Q‖ = 1. Its kernel is as large as the image.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int] = 3,
        in_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.weight = ConvWeight(in_channels, out_channels, kernel_size, padding_mode="circular", in_size=in_size)
        self.scale, self.cache = LearnedScale(), Cache()
        self.scale.begin(self.weight.weight)

    @property
    def channels(self) -> tuple[int, int]:
        return self.weight.channels

    @property
    def fan_in(self) -> int:
        return self.weight.weight[0].numel()

    def forward(self, x: Tensor) -> FourierMultiplier:
        op = self.weight(x)
        return FourierMultiplier(self.cached(lambda: self.matrices(op), op), (op.rows.size, op.columns.size))

    def cached(self, compute: Callable[[], Tensor], op: LinearOperator) -> Tensor:
        """compute(), once in evaluation."""
        if self.training:
            return compute()
        return self.cache.transform(compute, self.weight.weight, self.scale.alpha, key=op.in_shape)

    def matrices(self, op: LinearOperator) -> Tensor:
        """The matrix at each frequency of rfft2."""
        scaled = op.with_weight(op.weight * self.scale(op, self.weight))
        assert isinstance(scaled, ConvOperator)
        return cayley_transform(symbols(scaled)[0])


def cayley_dense(in_features: int, out_features: int, *, bias: bool = True) -> Affine:
    """The dense Cayley layer from any number of features to any other: orthonormal rows or columns, and a bias."""
    return Affine(CayleyMatrix(in_features, out_features), bias)


def cayley_conv(
    in_channels: int,
    out_channels: int,
    kernel_size: int | tuple[int, int] = 3,
    *,
    in_size: tuple[int, int] | None = None,
    bias: bool = True,
) -> Affine:
    """The Cayley convolution: circular, of any kernel size, from any number of channels to any other, and a bias."""
    return Affine(CayleySymbols(in_channels, out_channels, kernel_size, in_size), bias)
