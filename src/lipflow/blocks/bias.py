"""A learned bias, for layers that have none of their own."""

import math

import torch
from torch import Tensor, nn


class Bias(nn.Module):
    """x + b, with b along the channels or features: an isometry. b is uniform in ±1/√channels at first."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        if channels < 1:
            raise ValueError(f"channels must be at least 1, not {channels}")
        self.bias = new_bias(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] != len(self.bias):
            raise ValueError(f"Bias takes (batch, {len(self.bias)}, …), not {tuple(x.shape)}")
        return x + self.bias.reshape(-1, *[1] * (x.ndim - 2))

    def extra_repr(self) -> str:
        return str(len(self.bias))


def new_bias(channels: int, fan_in: int) -> nn.Parameter:
    """A bias, uniform in ±1/√fan_in."""
    return nn.Parameter(torch.empty(channels).uniform_(-1, 1) / math.sqrt(fan_in))
