"""Activations as primitives: by entry, by group of channels, by pair of channels."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from lipflow.primitives.primitive import Exact, Norm, Primitive, require, require_shape
from lipflow.rounding import TINY, gamma
from lipflow.shapes import Shape

# Functions σ that do not round, with σ(0) = 0 and slopes in [-1, 1].
POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "abs": torch.abs, "hardtanh": F.hardtanh}


@dataclass(frozen=True, eq=False)
class Pointwise(Exact):
    """relu, abs or hardtanh of each entry. It does not round."""

    kind = "pointwise"
    name: str

    def __post_init__(self) -> None:
        require(self.name in POINTWISE, self)

    def out_shape(self, *shapes: Shape) -> Shape:
        require_shape(len(shapes) == 1, self, *shapes)
        return shapes[0]

    def run(self, *xs: Tensor) -> Tensor:
        return POINTWISE[self.name](xs[0])

    def lipschitz(self, norm: Norm, *distances: Fraction) -> Fraction:
        return distances[0]


@dataclass(frozen=True, eq=False)
class GroupSort(Exact):
    """Sort each group of the entries i, i + C/g, … of the first axis, greatest first. It does not round."""

    kind = "group_sort"
    group: int

    def __post_init__(self) -> None:
        require(type(self.group) is int and self.group >= 1, self)

    def out_shape(self, *shapes: Shape) -> Shape:
        fits = len(shapes) == 1 and len(shapes[0]) >= 1 and shapes[0][0] % self.group == 0
        require_shape(fits, self, *shapes)
        return shapes[0]

    def run(self, *xs: Tensor) -> Tensor:
        return group_sort(xs[0].unflatten(1, (self.group, -1)))

    def lipschitz(self, norm: Norm, *distances: Fraction) -> Fraction:
        return distances[0]


def group_sort(groups: Tensor) -> Tensor:
    """Sort the groups  # (batch, group, C / group, …) → (batch, C, …)."""
    if groups.shape[1] == 2:
        first, second = groups.unbind(1)
        return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], 1)
    return groups.sort(1, descending=True).values.flatten(1, 2)


@dataclass(frozen=True, eq=False)
class Householder(Primitive):
    """x - 2v·relu(v·x) on the pairs (i, i + C/2), with the stored v = (-sine, cosine). L = max(1, 2‖v‖² - 1)."""

    kind = "householder"
    reason = "2‖v‖² - 1 of the stored directions"
    sine: Tensor
    cosine: Tensor

    def __post_init__(self) -> None:
        require(self.sine.ndim == 1 and len(self.sine) >= 1 and self.sine.shape == self.cosine.shape, self)

    def out_shape(self, *shapes: Shape) -> Shape:
        fits = len(shapes) == 1 and len(shapes[0]) >= 1 and shapes[0][0] == 2 * len(self.sine)
        require_shape(fits, self, *shapes)
        return shapes[0]

    def run(self, *xs: Tensor) -> Tensor:
        pairs = xs[0].unflatten(1, (2, -1))
        return householder(pairs, self.sine.to(pairs.dtype), self.cosine.to(pairs.dtype))

    @cached_property
    def square(self) -> Fraction:
        """The greatest ‖v‖² of the pairs."""
        pairs = zip(self.sine.tolist(), self.cosine.tolist(), strict=True)
        return max(Fraction(s) ** 2 + Fraction(c) ** 2 for s, c in pairs)

    def lipschitz(self, norm: Norm, *distances: Fraction) -> Fraction:
        return max(Fraction(1), 2 * self.square - 1) * distances[0]

    def rounding(self, entries: int, *reaches: Fraction) -> Fraction:
        """v·x has an error of at most γ₂‖v‖‖x‖. Three more roundings follow, of numbers of at most (1 + 2‖v‖²)‖x‖."""
        size = (1 + 2 * self.square) * reaches[0]
        underflow = 8 * entries * TINY * (1 + 2 * self.square)
        return (gamma(2) * 2 * self.square + gamma(4)) * size + underflow

    @property
    def size(self) -> str:
        return f"{2 * len(self.sine)} channels"


def householder(pairs: Tensor, sine: Tensor, cosine: Tensor) -> Tensor:
    """x - 2v·relu(v·x) for each pair x, with v = (-sine, cosine)  # (batch, 2, C / 2, …) → (batch, C, …)."""
    first, second = pairs.unbind(1)
    sine, cosine = (t.reshape(-1, *[1] * (pairs.ndim - 3)) for t in (sine, cosine))
    across = torch.relu(cosine * second - sine * first)
    return torch.cat([first + 2 * sine * across, second - 2 * cosine * across], 1)
