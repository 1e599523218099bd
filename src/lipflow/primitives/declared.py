"""A map whose Lipschitz constant is declared: it can be bounded, but not run in certified arithmetic."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from lipflow.node import Node
from lipflow.primitives.primitive import Certify, Norm, Primitive
from lipflow.shapes import Shape

Constant = Callable[[Norm], float]
Allowance = Callable[[Norm, float], float]


def declared(
    x: Node, name: str, function: Callable[[Tensor], Tensor], constant: Constant, allowance: Allowance | None = None
) -> Node:
    """The node of a function with a declared constant; the function computes in the dtype of the network."""
    dtype = x.dtype
    return Declared(name, lambda t: function(t.to(dtype)).to(t.dtype), constant, allowance)(x)


@dataclass(frozen=True, eq=False)
class Declared(Primitive):
    """A function, a bound on its Lipschitz constant, and how far it may be from a map with that constant.

    Both may depend on the norms of operators, and the latter on a bound on ‖x‖. `lipflow.lipschitz_bound` takes it;
    `freeze` refuses it, as the rounding error of the function is unknown.
    """

    kind = "declared"
    reason = "declared"
    name: str
    function: Callable[[Tensor], Tensor]
    constant: Constant
    allowance: Allowance | None = None

    def out_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        return tuple(self.function(torch.zeros(2, *shape)).shape[1:])

    def run(self, *xs: Tensor) -> Tensor:
        return self.function(xs[0])

    def lipschitz(self, norm: Norm, *distances: Fraction) -> Fraction:
        return Fraction(self.constant(norm)) * distances[0]

    def tolerance(self, norm: Norm, *reaches: float) -> float:
        return 0.0 if self.allowance is None else self.allowance(norm, reaches[0])

    def certified(self, certify: Certify) -> Primitive:
        raise ValueError(
            f"{self.name} has a declared bound, which lipschitz_bound takes; freeze cannot run it in certified "
            "arithmetic, as its rounding error is unknown"
        )
