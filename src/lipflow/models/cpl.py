"""Networks of Convex Potential Layers: the paper's S, M, L and XL, and other sizes.

The stages: centre the input; append zero channels, 3 → C; `depth` convolutional CPLs at full resolution; average
pooling, scaled to be 1-Lipschitz; `depth_linear` dense CPLs; the first K features, or last-layer normalization.
"""

from collections import OrderedDict

from torch import nn

from lipflow.blocks import AvgPool, LastLayerNormalization, Normalize, PadChannels, Truncate
from lipflow.blocks.normalize import Values
from lipflow.flows import Sequential, cpl_conv, cpl_dense
from lipflow.models.network import Network
from lipflow.shapes import require_layers, require_positive


def cpl(
    classes: int,
    in_shape: tuple[int, int, int],
    *,
    channels: int = 30,
    depth: int = 10,
    inner: int = 5,
    kernel_size: int = 3,
    pool: int = 4,
    features: int = 512,
    depth_linear: int = 3,
    lln: bool = False,
    mean: Values = 0.5,
    std: Values | None = None,
    sigma: str = "relu",
    h: float | None = None,
) -> Network:
    """A CPL network of any size.

    `inner` is the number of output channels of W in a convolution, `features` the rows of W in a dense layer.
    """
    require_positive(channels=channels, inner=inner, kernel_size=kernel_size, pool=pool, features=features)
    require_layers(depth=depth, depth_linear=depth_linear)
    colours, height, width = in_shape
    if channels < colours:
        raise ValueError(f"channels={channels} is less than the {colours} channels of the input")
    if min(height, width) < pool:
        raise ValueError(f"pool={pool} does not fit images of {height}×{width}")
    flat = channels * (height // pool) * (width // pool)
    if not lln and flat < classes:
        raise ValueError(f"{flat} features cannot be truncated to {classes} classes; use more channels, or lln=True")
    convolutions = (cpl_conv(channels, inner, kernel_size, sigma=sigma, h=h) for _ in range(depth))
    linear = (cpl_dense(flat, features, sigma=sigma, h=h) for _ in range(depth_linear))
    stages: OrderedDict[str, nn.Module] = OrderedDict(
        center=Normalize(mean, std),
        widen=PadChannels(channels),
        convolutions=Sequential(*convolutions),
        pool=AvgPool(pool),
        flatten=nn.Flatten(),
        linear=Sequential(*linear),
        head=LastLayerNormalization(flat, classes) if lln else Truncate(classes),
    )
    return Network(stages, in_shape)


SIZES: dict[str, dict[str, int]] = {  # Table 1 of the paper; `inner` is that of the authors' code
    "cpl-s": dict(depth=20, channels=45, depth_linear=7, features=2048, inner=5),
    "cpl-m": dict(depth=30, channels=60, depth_linear=10, features=2048, inner=5),
    "cpl-l": dict(depth=90, channels=60, depth_linear=15, features=4096, inner=5),
    "cpl-xl": dict(depth=120, channels=70, depth_linear=15, features=4096, inner=5),
    "cpl-digits": dict(depth=4, channels=8, depth_linear=3, features=128, inner=16, pool=1),
}
