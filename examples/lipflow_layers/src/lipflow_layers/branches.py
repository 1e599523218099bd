"""A block of two branches, in plain PyTorch."""

import torch
from torch import Tensor, nn


class TwoBranches(nn.Module):
    """(x + |Qx|)/2, where Q is a learned orthogonal matrix on the channels.

    Both branches are 1-Lipschitz, so their mean is. lipflow derives this: Q is computed from the parameter while the
    block runs, and becomes a constant of the graph.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, channels) / channels**0.5)

    def forward(self, x: Tensor) -> Tensor:  # (batch, channels, height, width)
        skew = self.weight - self.weight.T
        q = torch.linalg.matrix_exp(skew)  # orthogonal, as its argument is skew-symmetric
        return (x + nn.functional.conv2d(x, q[:, :, None, None]).abs()) / 2
