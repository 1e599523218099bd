"""The skew orthogonal convolution as published (Singla and Feizi 2021), for any numbers of channels and any stride.

It consists of: space-to-depth for the stride; zero channels, if the output has more channels than the input; the
exponential of a skew convolution; the first channels only, if the output has fewer; a bias.
"""

import math

from torch import nn

from lipflow.blocks.affine import Bias
from lipflow.blocks.resize import PadChannels, SpaceToDepth, TakeChannels
from lipflow.flows import ConvWeight, DenseWeight, Exponential, Flow, ReshapedScale, Skew
from lipflow.flows.step import TERMS, TRAIN_TERMS


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
    """The SOC layer: A = ½(M - Mᵀ), scaled by 0.7/σ (1/σ if 1×1) with σ the least norm of four reshaped kernels.

    `in_size` is the input size of the skew convolution, after the stride.
    """
    inputs = in_channels * stride**2
    channels = max(inputs, out_channels)
    weight = ConvWeight(channels, channels, kernel_size, in_size=in_size)
    flow = _flow(weight, 1.0 if kernel_size == 1 else 0.7, terms, train_terms)
    shuffle = [SpaceToDepth(stride)] if stride > 1 else []
    return nn.Sequential(*shuffle, *_resized(flow, inputs, channels, out_channels, bias))


def soc_dense(
    in_features: int, out_features: int, *, terms: int = TERMS, train_terms: int | None = TRAIN_TERMS, bias: bool = True
) -> nn.Sequential:
    """The SOC layer on features: a 1×1 convolution of one pixel."""
    features = max(in_features, out_features)
    flow = _flow(DenseWeight(features, features), 1.0, terms, train_terms)
    return nn.Sequential(*_resized(flow, in_features, features, out_features, bias))


def _flow(weight: ConvWeight | DenseWeight, factor: float, terms: int, train_terms: int | None) -> Flow:
    nn.init.normal_(weight.weight, std=1 / math.sqrt(len(weight.weight)))
    return Flow(Skew(weight, ReshapedScale(factor)), Exponential(1.0, terms, train_terms))


def _resized(flow: Flow, inputs: int, channels: int, out: int, bias: bool) -> list[nn.Module]:
    """A flow on `channels` channels, from `inputs` to `out` channels, and a bias."""
    widen = [PadChannels(channels)] if inputs < channels else []
    narrow = [TakeChannels(out)] if out < channels else []
    return [*widen, flow, *narrow, *([Bias(out)] if bias else [])]
