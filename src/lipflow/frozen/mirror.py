"""An image and its mirror image, side by side: the two primitives that change the number of rows of a batch.

Between `Mirror` and `Mean` an image is the rows 2i and 2i + 1, and their norm is that of the greater one. By this norm
x ↦ (x, Rx) and (a, b) ↦ (a + b)/2 have the constant 1, and a map that runs on each row has its own constant and error.
So what is folded along the list of primitives is what it would be without the two.
"""

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from lipflow.bound import Shape
from lipflow.frozen.operation import Primitive
from lipflow.rounding import TINY, gamma


@dataclass(frozen=True, eq=False)
class Mirror(Primitive):
    """x as the two rows x and Rx, its mirror image, left for right: exact."""

    kind = "mirror"

    def fits(self, shape: Shape) -> bool:
        return len(shape) == 3

    def __call__(self, x: Tensor) -> Tensor:
        return torch.stack([x, x.flip(3)], 1).flatten(0, 1)

    @property
    def shape(self) -> str:
        return "of images, left for right"


@dataclass(frozen=True, eq=False)
class Mean(Primitive):
    """The two rows a and b of an image as one, (a + b)/2."""

    kind = "mean"

    def fits(self, shape: Shape) -> bool:
        return True

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) % 2:
            raise ValueError("a mean is of the two rows of an image, which a mirror before it makes")
        a, b = x.unflatten(0, (-1, 2)).unbind(1)
        return (a + b) / 2

    def error(self, reach: Fraction, entries: int) -> Fraction:
        """One addition, of what is at most 2X; to halve is exact, but for underflow."""
        return gamma(1) * reach + 2 * entries * TINY

    @property
    def shape(self) -> str:
        return "of two rows"
