"""LipConvnets of skew orthogonal convolutions: SOC-10, SOC-20, and SOC+ (Singla and Feizi 2021; Singla et al. 2022).

The input is centred, and all channels are divided by one number. Five stages of `block` convolutions with activations
follow. The last convolution of a stage has stride 2 and twice the channels; that of the last stage is 1×1. Then comes
one dense layer with K outputs, or last-layer normalization.
"""

from collections import OrderedDict
from collections.abc import Callable

from torch import nn

from lipflow.blocks import Householder, LastLayerNormalization, MaxMin, Normalize, Truncate
from lipflow.blocks.normalize import Values
from lipflow.blocks.soc import soc_conv, soc_dense
from lipflow.flows import Sequential
from lipflow.flows.step import TERMS, TRAIN_TERMS
from lipflow.models.network import Network
from lipflow.shapes import require_layers, require_positive

ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {"maxmin": lambda channels: MaxMin(), "householder": Householder}


def lipconvnet(
    classes: int,
    in_shape: tuple[int, int, int],
    *,
    block: int = 2,
    channels: int = 32,
    stages: int = 5,
    activation: str = "maxmin",
    lln: bool = False,
    mean: Values = 0.5,
    std: Values | None = 0.2507,
    terms: int = TERMS,
    train_terms: int | None = TRAIN_TERMS,
) -> Network:
    """A LipConvnet of `stages` × `block` convolutions, from `channels` channels to 2^stages times as many."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    require_positive(block=block, stages=stages, channels=channels)
    require_layers(block=block, stages=stages)
    if channels % 2:
        raise ValueError(f"channels are paired, so they are even, not channels={channels}")
    if in_shape[1] % 2**stages or in_shape[2] % 2**stages:
        raise ValueError(f"{stages} strides of 2 need sides that {2**stages} divides, not {in_shape[1]}×{in_shape[2]}")
    into, body = in_shape[0], []
    for stage in range(stages):
        for last in [False] * (block - 1) + [True]:
            out, stride = (2 * channels, 2) if last else (channels, 1)
            kernel_size = 1 if last and stage == stages - 1 else 3
            convolution = soc_conv(into, out, kernel_size, stride=stride, terms=terms, train_terms=train_terms)
            body.append(nn.Sequential(convolution, ACTIVATIONS[activation](out)))
            into = out
        channels = into
    features = into * (in_shape[1] >> stages) * (in_shape[2] >> stages)
    last_layer = nn.Identity() if lln else soc_dense(features, classes, terms=terms, train_terms=train_terms)
    by_name: OrderedDict[str, nn.Module] = OrderedDict(
        center=Normalize(mean, std),
        convolutions=Sequential(*body),
        flatten=nn.Flatten(),
        last=last_layer,
        head=LastLayerNormalization(features, classes) if lln else Truncate(classes),
    )
    return Network(by_name, in_shape)


VARIANTS: dict[str, dict[str, int | str | bool]] = {
    "soc-10": dict(block=2),
    "soc-20": dict(block=4),
    "soc+-10": dict(block=2, activation="householder", lln=True),
    "soc+-20": dict(block=4, activation="householder", lln=True),
}
