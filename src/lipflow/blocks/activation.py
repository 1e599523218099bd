"""Activations that preserve the norm of gradients: GroupSort, MaxMin, Householder, Abs. All are 1-Lipschitz.

They act on the second axis, the C channels or features. A group of size g has the entries i, i + C/g, i + 2C/g, ….
"""

import math

import torch
from torch import Tensor, nn

from lipflow import primitives
from lipflow.node import Node
from lipflow.primitives.activation import group_sort, householder


class GroupSort(nn.Module):
    """Sort each group in descending order: locally a permutation at almost every input (Anil, Lucas and Grosse 2019).

    `GroupSort(2)` is MaxMin.
    """

    def __init__(self, group: int = 2) -> None:
        super().__init__()
        if not isinstance(group, int) or group < 2:
            raise ValueError(f"a group has at least 2 entries, not {group!r}")
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return group_sort(split_channels(x, self.group))

    def extra_repr(self) -> str:
        return str(self.group)


def MaxMin() -> GroupSort:
    """(max(a, b), min(a, b)) of each pair."""
    return GroupSort(2)


class Householder(nn.Module):
    """x - 2v·relu(v·x) on each pair, with v = (-sin θ/2, cos θ/2): the half-plane v·x > 0 is reflected onto the other.

    Singla, Singla and Feizi 2022. It is a Convex Potential Layer with W of one row and b = 0. θ is learned for each
    pair of channels. It is π/2 at first, which is MaxMin.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        if channels < 2 or channels % 2:
            raise ValueError(f"Householder pairs its channels, so it takes an even number of them, not {channels}")
        self.theta = nn.Parameter(torch.full((channels // 2,), math.pi / 2))

    def forward(self, x: Tensor) -> Tensor:
        half = self.theta / 2
        return householder(split_channels(x, 2, expected=2 * len(half)), half.sin(), half.cos())

    def lower(self, x: Node) -> Node:
        """The layer as one primitive: the bound from the functions in `forward` would be above 1."""
        half = self.theta / 2
        return primitives.Householder(half.sin(), half.cos())(x)

    def extra_repr(self) -> str:
        return str(2 * len(self.theta))


class Abs(nn.Module):
    """|x|, entry by entry."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


def split_channels(x: Tensor, group: int, expected: int | None = None) -> Tensor:
    """(batch, C, …) as (batch, group, C / group, …)."""
    if x.ndim < 2 or x.shape[1] % group or (expected is not None and x.shape[1] != expected):
        wanted = f"{expected} channels" if expected is not None else f"a number of channels that {group} divides"
        raise ValueError(f"the activation takes inputs (batch, channels, …) with {wanted}, not {tuple(x.shape)}")
    return x.unflatten(1, (group, -1))
