"""Random crops, flips and erased squares of a batch, each a function of (seed, epoch, image index) alone."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lipflow.data.counter import CROP_COLUMNS, CROP_ROWS, CUTOUT_COLUMNS, CUTOUT_ROWS, FLIP, below, bits, key


def augment(
    images: Tensor,  # (batch, channels, height, width), of any dtype
    indices: Tensor,  # (batch,): the index of each image in its split
    seed: int,
    epoch: int,
    *,
    crop_padding: int = 4,
    padding_mode: Literal["reflect", "zeros"] = "reflect",
    flip: bool = True,
    cutout: int = 0,
) -> Tensor:
    """Pad each image on all sides, crop a random window of the old size, and mirror half of the images.

    The paper's augmentation is crop_padding=4 and "reflect" (the border pixel is not repeated), with flips; SOC's is
    "zeros". The offsets, uniform on {0, …, 2·crop_padding}², and the flip of an image depend on (seed, epoch, its
    index) only: see Note [counter-based randomness]. Padding, crop and flip are one gather. A square of side `cutout`
    around a random pixel is then set to the mean colour of the image (DeVries and Taylor 2017).
    """
    if images.dim() != 4:
        raise ValueError(f"augment() needs images of shape (batch, channels, height, width); got {tuple(images.shape)}")
    batch, channels, height, width = images.shape
    if indices.shape != (batch,):
        raise ValueError(f"augment() needs one index for each image, shape ({batch},); got {tuple(indices.shape)}")
    if padding_mode not in _MODES:
        raise ValueError(f"augment() has the padding modes {', '.join(map(repr, _MODES))}; got {padding_mode!r}")
    smaller_side = min(height, width)
    if not 0 <= crop_padding < smaller_side + (padding_mode == "zeros"):
        raise ValueError(
            f"cannot {padding_mode}-pad {height}×{width} images by {crop_padding}; a padding is at least 0, "
            "and at most the smaller side (reflect: less)"
        )
    if not 0 <= cutout <= smaller_side:
        raise ValueError(f"cannot erase a square of side {cutout} from {height}×{width} images")

    indices = indices.to(images.device)

    def draw(purpose: int, bound: int) -> Tensor:  # (batch, 1), in [0, bound)
        return below(bits(key(purpose, seed, epoch), indices), bound)[:, None]

    # The source of each row and column, in [-crop_padding, side + crop_padding)
    rows = draw(CROP_ROWS, 2 * crop_padding + 1) - crop_padding + torch.arange(height, device=images.device)
    columns = draw(CROP_COLUMNS, 2 * crop_padding + 1) - crop_padding + torch.arange(width, device=images.device)
    if flip:
        columns = torch.where(draw(FLIP, 2).bool(), columns.flip(1), columns)

    source = _MODES[padding_mode]
    pixel = source(rows, height)[:, :, None] * width + source(columns, width)[:, None, :]
    pixel = pixel.reshape(batch, 1, height * width).expand(batch, channels, height * width)
    crops = images.reshape(batch, channels, height * width).gather(2, pixel).view(images.shape)
    if padding_mode == "zeros":
        inside = _inside(rows, height)[:, :, None] & _inside(columns, width)[:, None, :]
        crops.masked_fill_(~inside[:, None], 0)
    if cutout:
        top, left = draw(CUTOUT_ROWS, height) - cutout // 2, draw(CUTOUT_COLUMNS, width) - cutout // 2
        in_rows = _inside(torch.arange(height, device=images.device) - top, cutout)
        in_columns = _inside(torch.arange(width, device=images.device) - left, cutout)
        square = in_rows[:, None, :, None] & in_columns[:, None, None, :]
        crops = torch.where(square, crops.double().mean((2, 3), keepdim=True).to(crops.dtype), crops)
    return crops


def _reflect(position: Tensor, side: int) -> Tensor:
    """-1 → 1, -2 → 2, …; side → side - 2, …: reflection about the centres of the border pixels."""
    return (side - 1) - ((side - 1) - position.abs()).abs()


def _inside(position: Tensor, side: int) -> Tensor:
    return (position >= 0) & (position < side)


_MODES = {"reflect": _reflect, "zeros": lambda position, side: position.clamp(0, side - 1)}
