"""A small network of Convex Potential Layers for the most certified accuracy per minute of training.

Fold pixels into channels, so that no layer runs at full resolution, where a layer costs most and sees least: 2×2 pixels
become channels twice (isometries), with convolutional CPLs after each; average pooling; dense CPLs; unit rows. Weights
begin with orthonormal rows, in convolutions nearly: then the Jacobian of x - (2/‖W‖²)Wᵀσ(Wx + b) is a product of
reflections at every x, and no gradient is lost. What was tried on the way is in docs/log.md.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn

from lipflow.blocks import AvgPool, Flatten, LastLayerNormalization, Normalize, PadChannels, SpaceToDepth
from lipflow.blocks.normalize import Values
from lipflow.flows import Sequential, Weight, cpl_conv, cpl_dense
from lipflow.flows.weight import require_at_least, require_positive
from lipflow.models.network import Network

NOISE = 0.02  # of the taps of a convolution at first


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
    """`depth` and `inner` are of the convolutions at a half and at a quarter of the resolution.

    `channels` are those at the half; there are four times as many at the quarter. `features` are the rows of a dense
    layer's W.
    """
    colours, height, width = in_shape
    if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in (depth, inner)):
        raise ValueError(f"depth and inner are pairs, for the two resolutions, not {depth} and {inner}")
    require_positive(channels=channels, kernel_size=kernel_size, pool=pool, features=features)
    for resolution in range(2):
        require_positive(inner=inner[resolution])
        require_at_least(0, depth=depth[resolution], depth_linear=depth_linear)
    if height % (4 * pool) or width % (4 * pool):
        raise ValueError(
            f"{height}×{width} images do not fit: sides are folded twice by 2 and pooled by {pool}, "
            f"so they are multiples of {4 * pool}"
        )
    if channels < 4 * colours:
        raise ValueError(f"channels={channels} cannot hold the {4 * colours} channels of the folded input")
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
        flatten=Flatten(),
        linear=Sequential(*(cpl_dense(flat, features) for _ in range(depth_linear))),
        head=LastLayerNormalization(flat, classes),
    )
    for stage in stages.values():
        for module in stage.modules():
            if isinstance(module, Weight):
                _begin_orthonormal(module)
    return Network(stages, in_shape)


@torch.no_grad()
def _begin_orthonormal(layer: Weight) -> None:
    """Orthonormal rows, or columns if they are fewer; in a convolution, those of the middle tap, with noise in all."""
    weight = layer.weight
    rows = nn.init.orthogonal_(weight.new_empty(weight.shape[:2]))
    if weight.ndim == 2:
        weight.copy_(rows)
    else:
        nn.init.normal_(weight, std=NOISE)
        weight[:, :, weight.shape[2] // 2, weight.shape[3] // 2] += rows
    layer.reset_estimate()
