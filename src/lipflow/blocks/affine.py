"""Wx + b, with W made from free parameters; and the normalisations that the related work compares with.

How W is made is an object: `Scaled` here, `CayleyMatrix` and `CayleySymbols` in cayley.py, `BlockConvolution` and
`Orthonormal` in bcop.py. Stride s is `SpaceToDepth(s)` before a layer of s² times as many input channels.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

from lipflow.blocks.bias import new_bias
from lipflow.flows.cache import Cache
from lipflow.flows.scale import ReshapedScale, Scale, SpectralScale
from lipflow.flows.weight import ConvWeight, DenseWeight, Weight
from lipflow.operators import LinearOperator
from lipflow.operators.conv import Padding


class Parameterisation(nn.Module, ABC):
    """A linear map W as a differentiable function of free parameters."""

    @abstractmethod
    def forward(self, x: Tensor) -> LinearOperator:
        """W on the inputs x, whose shape it takes up."""

    @property
    @abstractmethod
    def channels(self) -> tuple[int, int]:
        """The sizes of the input's and the output's first axis."""

    @property
    @abstractmethod
    def fan_in(self) -> int:
        """How many weights make one output, from which a bias takes its first size."""


class Affine(nn.Module):
    """Wx + b, with W from a parameterisation."""

    def __init__(self, weight: Parameterisation, bias: bool = True) -> None:
        super().__init__()
        self.weight = weight
        self.bias = new_bias(weight.channels[1], weight.fan_in) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        op = self.weight(x)
        y = op(x)
        return y if self.bias is None else y + self.bias.reshape(-1, *[1] * (len(op.out_shape) - 1))


class Scaled(Parameterisation):
    """A learned weight times a scale, such as one over an estimate of its norm; the norm of the product is certified.

    Estimates are from below, so that norm is a little above 1: `lipflow.lipschitz_bound` says how much.
    """

    def __init__(self, weight: Weight, scale: Scale) -> None:
        super().__init__()
        self.weight, self.scale, self.cache = weight, scale, Cache()
        scale.begin(weight.weight)

    @property
    def channels(self) -> tuple[int, int]:
        return self.weight.channels

    @property
    def fan_in(self) -> int:
        return self.weight.weight[0].numel()

    def forward(self, x: Tensor) -> LinearOperator:
        op = self.weight(x)
        return op.with_weight(self.cached(lambda: op.weight * self.scale(op, self.weight), op))

    def cached(self, compute: Callable[[], Tensor], op: LinearOperator) -> Tensor:
        """compute(), once in evaluation."""
        if self.training:
            return compute()
        return self.cache.transform(compute, op.weight, *self.scale.parameters(), key=op.in_shape)


def spectral_dense(in_features: int, out_features: int, *, bias: bool = True) -> Affine:
    """Wx/‖W‖ + b (Miyato et al. 2018), the norm by power iteration."""
    return Affine(Scaled(DenseWeight(in_features, out_features), SpectralScale()), bias)


def spectral_conv(
    in_channels: int,
    out_channels: int,
    kernel_size: int | tuple[int, int] = 3,
    *,
    padding: Padding = "same",
    padding_mode: str = "zeros",
    stride: int | tuple[int, int] = 1,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    in_size: tuple[int, int] | None = None,
    bias: bool = True,
) -> Affine:
    """W ∗ x/‖W‖ + b, with the norm of the convolution itself (Farnia et al. 2019), by power iteration."""
    weight = ConvWeight(
        in_channels, out_channels, kernel_size, padding, padding_mode, stride, dilation, groups, in_size
    )
    return Affine(Scaled(weight, SpectralScale()), bias)


def reshaped_conv(
    in_channels: int,
    out_channels: int,
    kernel_size: int | tuple[int, int] = 3,
    *,
    padding: Padding = "same",
    padding_mode: str = "zeros",
    stride: int | tuple[int, int] = 1,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    in_size: tuple[int, int] | None = None,
    bias: bool = True,
) -> Affine:
    """W ∗ x/(√(hw)·σ) + b, with σ the least norm of four reshaped kernels (Singla and Feizi 2021b): at most about 1."""
    weight = ConvWeight(
        in_channels, out_channels, kernel_size, padding, padding_mode, stride, dilation, groups, in_size
    )
    return Affine(Scaled(weight, ReshapedScale(1 / math.sqrt(weight.weight[0, 0].numel()))), bias)
