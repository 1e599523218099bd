"""Bytes as pixels in [0, 1]."""

import torch
from torch import Tensor


def to_unit(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Bytes k as the floats k/255, correctly rounded: float32 to train, float64 to certify.

    The divisor is a tensor, as torch divides a CUDA tensor by a Python number by multiplying with the rounded 1/255.
    """
    if images.dtype != torch.uint8:
        raise ValueError(f"to_unit() takes uint8 images; got {images.dtype}")
    return images.to(dtype) / torch.full((), 255, dtype=dtype, device=images.device)
