"""Primitives that move numbers, or choose among them: they do not round."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn import functional as F

from lipflow.bound import Shape, overlap
from lipflow.frozen.linear import ROOM
from lipflow.frozen.operation import Primitive, require
from lipflow.rounding import sqrt_up, up

# Exact in floating point, and fixing 0.
POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "abs": torch.abs}


@dataclass(frozen=True, eq=False)
class Pointwise(Primitive):
    """relu or abs, entry by entry: exact."""

    kind = "pointwise"
    name: str

    def __post_init__(self) -> None:
        require(self.name in POINTWISE, self)

    def fits(self, shape: Shape) -> bool:
        return True

    def __call__(self, x: Tensor) -> Tensor:
        return POINTWISE[self.name](x)


@dataclass(frozen=True, eq=False)
class GroupSort(Primitive):
    """Sort the entries i, i + C/g, … of each group, greatest first: exact."""

    kind = "group_sort"
    group: int

    def fits(self, shape: Shape) -> bool:
        return len(shape) >= 1 and self.group >= 1 and shape[0] % self.group == 0

    def __call__(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.group, -1)).sort(1, descending=True).values.flatten(1, 2)


@dataclass(frozen=True, eq=False)
class PadChannels(Primitive):
    """Zero channels appended: exact."""

    kind = "pad"
    channels: int

    def fits(self, shape: Shape) -> bool:
        return len(shape) >= 1 and self.channels >= shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(x.shape[0], self.channels - x.shape[1], *x.shape[2:])], 1)


@dataclass(frozen=True, eq=False)
class MaxPool(Primitive):
    """The greatest entry of each window: exact. L = √overlap."""

    kind = "max_pool"
    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]

    def fits(self, shape: Shape) -> bool:
        return len(shape) == 3 and all(
            len(pair) == 2 for pair in (self.kernel, self.stride, self.padding, self.dilation)
        )

    def __call__(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, self.kernel, self.stride, self.padding, self.dilation)

    @property
    def lipschitz(self) -> float:
        count = overlap(tuple(self.kernel), tuple(self.stride), tuple(self.dilation))
        return up(sqrt_up(Fraction(count)) * (1 + ROOM)) if count > 1 else 1.0

    @property
    def how(self) -> str:
        return "√ of the greatest number of windows on one entry"


@dataclass(frozen=True, eq=False)
class SpaceToDepth(Primitive):
    """block × block squares of pixels as channels: a permutation, exact."""

    kind = "space_to_depth"
    block: int

    def fits(self, shape: Shape) -> bool:
        return len(shape) == 3 and self.block >= 1 and not (shape[1] % self.block or shape[2] % self.block)

    def __call__(self, x: Tensor) -> Tensor:
        blocks = x.unflatten(3, (-1, self.block)).unflatten(2, (-1, self.block))
        return blocks.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)


@dataclass(frozen=True, eq=False)
class Flatten(Primitive):
    """Each input as one vector: exact."""

    kind = "flatten"

    def fits(self, shape: Shape) -> bool:
        return True

    def __call__(self, x: Tensor) -> Tensor:
        return x.flatten(1)


@dataclass(frozen=True, eq=False)
class Truncate(Primitive):
    """The first `classes` entries: exact."""

    kind = "truncate"
    classes: int

    def fits(self, shape: Shape) -> bool:
        return len(shape) >= 1 and 1 <= self.classes <= shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        return x[:, : self.classes]
