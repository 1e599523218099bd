"""A small network of Convex Potential Layers, for high certified accuracy per minute of training.

The stages: twice space-to-depth (2×2 pixels become channels, an isometry), each followed by convolutional CPLs; then
average pooling, dense CPLs, and last-layer normalization. No layer runs at full resolution, where layers are slowest
and have the least context. Weights are initialised with orthonormal rows, approximately so in convolutions: the
Jacobian of x - (2/‖W‖²)Wᵀσ(Wx + b) is then a product of reflections at every x, which preserves the norm of gradients.
docs/log.md lists other experiments.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn

from lipflow.blocks import AvgPool, LastLayerNormalization, Normalize, PadChannels, SpaceToDepth
from lipflow.blocks.normalize import Values
from lipflow.flows import Sequential, Weight, cpl_conv, cpl_dense
from lipflow.models.network import Network
from lipflow.shapes import require_layers, require_positive

NOISE_STD = 0.02  # of the initial kernel of a convolution


def cpl_fast(
    classes: int,
    in_shape: tuple[int, int, int],
    *,
    channels: int = 32,
    depth: tuple[int, int] = (3, 4),
    inner: tuple[int, int] = (16, 32),
    kernel_size: int = 3,
    pool: int = 2,
    depth_linear: int = 4,
    features: int = 512,
    lln: bool = True,
    mean: Values = 0.5,
    std: Values | None = None,
) -> Network:
    """The network. `depth` and `inner` are pairs, for the convolutions at half and at quarter resolution.

    There are `channels` channels at half resolution and four times as many at quarter resolution. `features` is the
    number of rows of W in a dense layer.
    """
    colours, height, width = in_shape
    if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in (depth, inner)):
        raise ValueError(f"depth and inner are pairs, for two resolutions, not {depth} and {inner}")
    require_positive(channels=channels, kernel_size=kernel_size, pool=pool, features=features)
    require_layers(depth_linear=depth_linear)
    for layers, outputs in zip(depth, inner, strict=True):
        require_positive(inner=outputs)
        require_layers(depth=layers)
    if height % (4 * pool) or width % (4 * pool):
        raise ValueError(f"the sides of images are multiples of {4 * pool} with pool={pool}, not {height}×{width}")
    if channels < 4 * colours:
        raise ValueError(f"channels={channels} is less than the {4 * colours} channels after the first space-to-depth")
    if not lln:
        raise ValueError("cpl-fast ends in last-layer normalization; for truncation use the model cpl")
    flat = 4 * channels * (height // 4 // pool) * (width // 4 // pool)
    stages: OrderedDict[str, nn.Module] = OrderedDict(
        center=Normalize(mean, std),
        fold=SpaceToDepth(2),
        widen=PadChannels(channels),
        at_half=Sequential(*(cpl_conv(channels, inner[0], kernel_size) for _ in range(depth[0]))),
        fold_again=SpaceToDepth(2),
        at_quarter=Sequential(*(cpl_conv(4 * channels, inner[1], kernel_size) for _ in range(depth[1]))),
        pool=AvgPool(pool),
        flatten=nn.Flatten(),
        linear=Sequential(*(cpl_dense(flat, features) for _ in range(depth_linear))),
        head=LastLayerNormalization(flat, classes),
    )
    network = Network(stages, in_shape)
    for module in network.modules():
        if isinstance(module, Weight):
            _initialise_orthonormal(module)
    return network


@torch.no_grad()
def _initialise_orthonormal(layer: Weight) -> None:
    """Give a weight orthonormal rows, or columns if they are fewer; in a convolution its middle tap, plus noise."""
    weight = layer.weight
    rows = nn.init.orthogonal_(weight.new_empty(weight.shape[:2]))
    if weight.ndim == 2:
        weight.copy_(rows)
    else:
        nn.init.normal_(weight, std=NOISE_STD)
        weight[:, :, weight.shape[2] // 2, weight.shape[3] // 2] += rows
    layer.reset_estimate()
