"""The "large" network of Wong and Kolter 2018, with which Cayley and BCOP layers were published.

The stages: centre the input; four convolutions as below, each with MaxMin; three dense layers, of which the last has K
outputs or is replaced by last-layer normalization. A stride of 2 is space-to-depth, followed by a convolution.

    3×3 to C,   stride 2 to C,   3×3 to 2C,   stride 2 to 2C,   dense to `hidden`,   to `features`,   to K
"""

from collections import OrderedDict
from collections.abc import Callable

from torch import nn

from lipflow.blocks import (
    Affine,
    LastLayerNormalization,
    MaxMin,
    Normalize,
    SpaceToDepth,
    Truncate,
    bcop_conv,
    bjorck_dense,
    cayley_conv,
    cayley_dense,
)
from lipflow.blocks.normalize import Values
from lipflow.flows import Sequential
from lipflow.models.network import Network
from lipflow.shapes import require_positive

# The convolution, the dense layer, and the kernel of strided convolutions after space-to-depth. As published, a strided
# 3×3 kernel becomes 1×1, and a strided 4×4 kernel 2×2.
FAMILIES: dict[str, tuple[Callable[[int, int, int], Affine], Callable[[int, int], Affine], int]] = {
    "cayley": (cayley_conv, cayley_dense, 1),
    "bcop": (bcop_conv, bjorck_dense, 2),
}


def kwlarge(
    classes: int,
    in_shape: tuple[int, int, int],
    *,
    family: str,
    channels: int = 32,
    hidden: int = 512,
    features: int = 512,
    lln: bool = False,
    mean: Values = 0.5,
    std: Values | None = None,
) -> Network:
    """A KW-Large network of Cayley or BCOP layers."""
    if family not in FAMILIES:
        raise ValueError(f"family is one of {', '.join(FAMILIES)}, not {family!r}")
    require_positive(channels=channels, hidden=hidden, features=features)
    if channels % 2 or hidden % 2 or features % 2:
        given = f"channels={channels}, hidden={hidden}, features={features}"
        raise ValueError(f"MaxMin pairs channels and features, so all must be even, not {given}")
    colours, height, width = in_shape
    if height % 4 or width % 4:
        raise ValueError(f"the sides of images are multiples of 4, not {height}×{width}")
    convolution, dense, strided = FAMILIES[family]
    body = [
        nn.Sequential(convolution(colours, channels, 3), MaxMin()),
        nn.Sequential(SpaceToDepth(2), convolution(4 * channels, channels, strided), MaxMin()),
        nn.Sequential(convolution(channels, 2 * channels, 3), MaxMin()),
        nn.Sequential(SpaceToDepth(2), convolution(8 * channels, 2 * channels, strided), MaxMin()),
    ]
    flat = 2 * channels * (height // 4) * (width // 4)
    linear = [
        nn.Sequential(dense(flat, hidden), MaxMin()),
        nn.Sequential(dense(hidden, features), MaxMin()),
        nn.Identity() if lln else dense(features, classes),
    ]
    stages: OrderedDict[str, nn.Module] = OrderedDict(
        center=Normalize(mean, std),
        convolutions=Sequential(*body),
        flatten=nn.Flatten(),
        linear=Sequential(*linear),
        head=LastLayerNormalization(features, classes) if lln else Truncate(classes),
    )
    return Network(stages, in_shape)


VARIANTS: dict[str, dict[str, int | str | float]] = {
    "cayley-kw3": dict(family="cayley", channels=96, hidden=1536),
    "bcop-large": dict(family="bcop", mean=0.0),  # BCOP was trained on pixels as they are
}
