"""Random crops, flips and erased squares of a batch in memory, each a function of (seed, epoch, image index) alone."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lipflow.data.counter import below, bits, key

_ROWS, _COLUMNS, _FLIP, _TOP, _LEFT = 1, 2, 3, 5, 6


def augment(
    images: Tensor,  # (batch, channels, height, width), of any dtype
    indices: Tensor,  # (batch,): the index of each image in its split
    seed: int,
    epoch: int,
    *,
    pad: int = 4,
    mode: Literal["reflect", "zeros"] = "reflect",
    flip: bool = True,
    erase: int = 0,
) -> Tensor:
    """Pad each image by `pad` on all sides, crop a window of the old size at random, mirror half of them left to right.

    The paper's augmentation is pad=4, "reflect" (the border pixel is not repeated), with flips; SOC's is "zeros".
    The offsets, uniform on {0, …, 2·pad}², and the flip of an image depend on (seed, epoch, its index) only: see
    Note [counter-based randomness]. Nothing is padded in fact: the three maps are composed into one gather. A square of
    side `erase` about a random pixel is then set to the image's mean colour (cutout: DeVries and Taylor 2017).
    """
    if images.dim() != 4:
        raise ValueError(f"augment() needs images of shape (batch, channels, height, width); got {tuple(images.shape)}")
    batch, channels, height, width = images.shape
    if indices.shape != (batch,):
        raise ValueError(f"augment() needs one index an image, shape ({batch},); got {tuple(indices.shape)}")
    if mode not in _SOURCES:
        raise ValueError(f"augment() knows the modes {', '.join(map(repr, _SOURCES))}; got {mode!r}")
    if pad < 0 or (mode == "reflect" and pad >= min(height, width)):
        raise ValueError(f"cannot {mode}-pad {height}×{width} images by {pad}; reflection needs 0 <= pad < both sides")
    if not 0 <= erase <= min(height, width):
        raise ValueError(f"cannot erase a square of side {erase} from {height}×{width} images")

    indices = indices.to(images.device)

    def positions(purpose: int, side: int) -> Tensor:  # (batch, side), in [-pad, side + pad)
        offset = below(bits(key(purpose, seed, epoch), indices), 2 * pad + 1) - pad
        return offset[:, None] + torch.arange(side, device=images.device)

    rows, columns = positions(_ROWS, height), positions(_COLUMNS, width)
    if flip:
        mirrored = below(bits(key(_FLIP, seed, epoch), indices), 2).bool()
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)

    source = _SOURCES[mode]
    pixel = source(rows, height)[:, :, None] * width + source(columns, width)[:, None, :]
    pixel = pixel.reshape(batch, 1, height * width).expand(batch, channels, height * width)
    crops = images.reshape(batch, channels, height * width).gather(2, pixel).view(images.shape)
    if mode == "zeros":
        inside = _inside(rows, height)[:, :, None] & _inside(columns, width)[:, None, :]
        crops.masked_fill_(~inside[:, None], 0)
    if erase:

        def within(purpose: int, side: int) -> Tensor:  # (batch, side)
            first = below(bits(key(purpose, seed, epoch), indices), side) - erase // 2
            position = torch.arange(side, device=images.device) - first[:, None]
            return (position >= 0) & (position < erase)

        square = within(_TOP, height)[:, None, :, None] & within(_LEFT, width)[:, None, None, :]
        crops = torch.where(square, crops.double().mean((2, 3), keepdim=True).to(crops.dtype), crops)
    return crops


def _reflect(position: Tensor, side: int) -> Tensor:
    """-1 → 1, -2 → 2, …; side → side - 2, …: reflection about the centres of the border pixels."""
    return (side - 1) - ((side - 1) - position.abs()).abs()


def _clamp(position: Tensor, side: int) -> Tensor:
    return position.clamp(0, side - 1)


def _inside(position: Tensor, side: int) -> Tensor:
    return (position >= 0) & (position < side)


_SOURCES = {"reflect": _reflect, "zeros": _clamp}
