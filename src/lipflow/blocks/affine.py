"""Layers Wx + b, with W computed from free parameters by a `Parametrization`; a bias alone; normalized weights.

For a stride s, put `SpaceToDepth(s)` before a layer with s² times as many input channels.
"""

import math
from abc import ABC, abstractmethod

from torch import Tensor, nn

from lipflow.flows.cache import Cache
from lipflow.flows.scale import ReshapedScale, Scale, SpectralScale
from lipflow.flows.weight import ConvWeight, DenseWeight, Weight, new_bias
from lipflow.operators import LinearOperator
from lipflow.operators.conv import Padding
from lipflow.shapes import require_positive


class Parametrization(nn.Module, ABC):
    """A linear map W as a differentiable function of free parameters.

    `channels` are the numbers of input and output channels (or features), `fan_in` the number of weights per output.
    """

    def __init__(self, channels: tuple[int, int], fan_in: int) -> None:
        super().__init__()
        self.channels, self.fan_in, self.cache = channels, fan_in, Cache()

    @abstractmethod
    def forward(self, x: Tensor) -> LinearOperator:
        """W as an operator on the inputs x."""


class Affine(nn.Module):
    """Wx + b, with W from a parametrization."""

    def __init__(self, weight: Parametrization, bias: bool = True) -> None:
        super().__init__()
        self.weight = weight
        self.bias = new_bias(weight.channels[1], weight.fan_in) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        op = self.weight(x)
        y = op(x)
        return y if self.bias is None else y + self.bias.reshape(-1, *[1] * (len(op.out_shape) - 1))


class Bias(nn.Module):
    """x + b, with b along the channels or features: an isometry. b is initialised uniformly in ±1/√channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        require_positive(channels=channels)
        self.bias = new_bias(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] != len(self.bias):
            raise ValueError(f"Bias takes (batch, {len(self.bias)}, …), not {tuple(x.shape)}")
        return x + self.bias.reshape(-1, *[1] * (x.ndim - 2))

    def extra_repr(self) -> str:
        return str(len(self.bias))


class Scaled(Parametrization):
    """A learned weight times a scale, such as 1/n for an estimate n of its norm.

    Estimates are from below, so the norm of the product is a little above 1; `lipflow.lipschitz_bound` bounds it.
    """

    def __init__(self, weight: Weight, scale: Scale) -> None:
        super().__init__(weight.channels, weight.weight[0].numel())
        self.weight, self.scale = weight, scale
        scale.begin(weight.weight)

    def forward(self, x: Tensor) -> LinearOperator:
        op = self.weight(x)
        scaled = self.cache.transform(
            lambda: op.weight * self.scale(op, self.weight),
            op.weight,
            *self.scale.parameters(),
            training=self.training,
            key=op.in_shape,
        )
        return op.with_weight(scaled)


def spectral_dense(in_features: int, out_features: int, *, bias: bool = True) -> Affine:
    """Wx/‖W‖ + b, with the norm by power iteration (Miyato et al. 2018)."""
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
    """W ∗ x/‖W‖ + b, with the norm of the convolution by power iteration (Farnia et al. 2019)."""
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
    """W ∗ x/(√(hw)·σ) + b, with σ the least norm of four reshaped kernels (Singla and Feizi 2021b)."""
    weight = ConvWeight(
        in_channels, out_channels, kernel_size, padding, padding_mode, stride, dilation, groups, in_size
    )
    return Affine(Scaled(weight, ReshapedScale(1 / math.sqrt(weight.weight[0, 0].numel()))), bias)
