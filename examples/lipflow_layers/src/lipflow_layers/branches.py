"""A block of two branches, in plain PyTorch."""

import torch
from torch import Tensor, nn


class TwoBranches(nn.Module):
    """(x + g(x))/2, where g turns the channels by a learned orthogonal matrix and takes absolute values.

    Both branches are 1-Lipschitz, so their mean is. lipflow finds that by itself: the matrix is computed from the
    parameter while the block runs, and becomes a constant of the graph.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, channels) / channels**0.5)

    def forward(self, x: Tensor) -> Tensor:  # (batch, channels, height, width)
        skew = self.weight - self.weight.T
        turn = torch.linalg.matrix_exp(skew)  # orthogonal, as its argument is skew-symmetric
        turned = nn.functional.conv2d(x, turn[:, :, None, None])
        return (x + turned.abs()) / 2
