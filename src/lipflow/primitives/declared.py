"""A map whose Lipschitz constant is declared: it can be bounded, but not run in certified arithmetic."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from lipflow.node import IMAGES, Node
from lipflow.primitives.primitive import Certify, Norm, Primitive
from lipflow.shapes import Shape

LipschitzOf = Callable[[Norm], float]  # from the norms of operators
ToleranceOf = Callable[[Norm, float], float]  # from the norms of operators and a bound on ‖x‖


def declared(
    x: Node,
    name: str,
    function: Callable[[Tensor], Tensor],
    lipschitz: LipschitzOf,
    tolerance: ToleranceOf | None = None,
) -> Node:
    """The node of a function with a declared Lipschitz constant. The function computes in the dtype of the network."""
    dtype = x.dtype
    return Declared(name, lambda t: function(t.to(dtype)).to(t.dtype), lipschitz, tolerance)(x)


@dataclass(frozen=True, eq=False)
class Declared(Primitive):
    """A function within a declared tolerance of a map with a declared Lipschitz constant.

    `lipflow.lipschitz_bound` accepts it; `freeze` refuses it, as the rounding error of the function is unknown.
    """

    kind = "declared"
    reason = "declared"
    name: str
    function: Callable[[Tensor], Tensor]
    lipschitz_of: LipschitzOf
    tolerance_of: ToleranceOf | None = None

    def out_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        return tuple(self.function(torch.zeros(IMAGES, *shape)).shape[1:])

    def run(self, *xs: Tensor) -> Tensor:
        return self.function(xs[0])

    def lipschitz(self, norm: Norm, *distances: Fraction) -> Fraction:
        return Fraction(self.lipschitz_of(norm)) * distances[0]

    def tolerance(self, norm: Norm, *reaches: float) -> float:
        return 0.0 if self.tolerance_of is None else self.tolerance_of(norm, reaches[0])

    def certified(self, certify: Certify) -> Primitive:
        raise ValueError(
            f"{self.name} has a declared bound, which lipschitz_bound accepts; freeze cannot run it in certified "
            "arithmetic, as its rounding error is unknown"
        )
