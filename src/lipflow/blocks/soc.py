"""The skew orthogonal convolution as published (Singla and Feizi 2021): between any numbers of channels, with stride.

Space-to-depth for the stride; zero channels if there are to be more of them; the exponential of a skew convolution; the
first channels if there are to be fewer; a bias.
"""

import math

from torch import nn

from lipflow.blocks.resize import PadChannels, SpaceToDepth, TakeChannels
from lipflow.blocks.shift import Shift
from lipflow.flows import ConvWeight, Exponential, Flow, ReshapedNorm, Skew

# The published layer convolves 12 times in evaluation and 5 times in training; the identity is a term too.
TERMS, TRAIN_TERMS = 13, 6


def soc_conv(
    in_channels: int,
    out_channels: int,
    kernel_size: int = 3,
    *,
    stride: int = 1,
    terms: int = TERMS,
    train_terms: int | None = TRAIN_TERMS,
    in_size: tuple[int, int] | None = None,
    bias: bool = True,
) -> nn.Sequential:
    """The SOC layer: ½(M - Mᵀ) scaled by 0.7 over the least norm of four reshaped kernels, or by 1 over it if 1×1.

    `in_size` is that of the skew convolution, after the stride.
    """
    read = in_channels * stride**2
    channels = max(read, out_channels)
    weight = ConvWeight(channels, channels, kernel_size, in_size=in_size)
    nn.init.normal_(weight.weight, std=1 / math.sqrt(channels))
    skew = Skew(weight, ReshapedNorm(1.0 if kernel_size == 1 else 0.7))
    layers = [
        SpaceToDepth(stride) if stride > 1 else None,
        PadChannels(channels) if read < channels else None,
        Flow(skew, Exponential(1.0, terms, train_terms)),
        TakeChannels(out_channels) if out_channels < channels else None,
        Shift(out_channels) if bias else None,
    ]
    return nn.Sequential(*(layer for layer in layers if layer is not None))
