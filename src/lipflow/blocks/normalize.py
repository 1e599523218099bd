"""Normalization of the input."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

Values = float | Sequence[float]


class Normalize(nn.Module):
    """(x - mean)/std for each channel, with L = 1/min(std), or x - mean with L = 1.

    As it is part of the model, inputs are pixels in [0, 1], and radii are distances between such inputs.
    """

    mean: Tensor
    std: Tensor | None

    def __init__(self, mean: Values, std: Values | None = None) -> None:
        super().__init__()
        self.register_buffer("mean", _channels(mean, "mean", -math.inf, "a finite number"))
        self.register_buffer("std", None if std is None else _channels(std, "std", 0.0, "a finite number above 0"))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or len(self.mean) not in (1, x.shape[1]):
            raise ValueError(
                f"Normalize has {len(self.mean)} channels and takes (batch, {len(self.mean)}, …), not {tuple(x.shape)}"
            )
        if not x.is_floating_point():
            raise TypeError(f"Normalize takes pixels as floats in [0, 1], not {x.dtype}; give images / 255")
        shape = (-1, *[1] * (x.ndim - 2))
        centred = x - self.mean.reshape(shape)
        return centred if self.std is None else centred / self.std.reshape(shape)

    def extra_repr(self) -> str:
        return f"mean={self.mean.tolist()}" + ("" if self.std is None else f", std={self.std.tolist()}")


def _channels(values: Values, name: str, above: float, wanted: str) -> Tensor:
    channels = [float(v) for v in values] if isinstance(values, Sequence) else [float(values)]
    if not channels or not all(math.isfinite(v) and v > above for v in channels):
        raise ValueError(f"{name} is {wanted}, or one for each channel, not {values!r}")
    return torch.tensor(channels, dtype=torch.get_default_dtype())
