"""The pair (L, ε) of a module: it is within ε of a map that is exactly L-Lipschitz.

A tolerance is additive and cannot be part of L, as two close points may be separated by up to 2ε. The pair describes
the module in real arithmetic; `lipflow.freeze` adds rounding errors.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lipflow.graph import UNIT, Domain, fold, lower
from lipflow.node import Node
from lipflow.operators import norm_bound
from lipflow.primitives.declared import declared
from lipflow.shapes import Shape, in_shape_of
from lipflow.torch_state import as_written


class Bound(NamedTuple):
    """(L, ε): a module is within ε = `tolerance` of a map that is exactly L-Lipschitz in L2, L = `lipschitz`."""

    lipschitz: float
    tolerance: float = 0.0


class Assume(nn.Module):
    """A module with a bound that you declare: `Assume(module, bound=L)`.

    `lipschitz_bound` accepts it; `freeze` refuses it, as its rounding error is unknown.
    """

    def __init__(self, module: nn.Module, bound: float, tolerance: float = 0.0) -> None:
        super().__init__()
        if not (math.isfinite(bound) and bound >= 0 and math.isfinite(tolerance) and tolerance >= 0):
            raise ValueError(
                f"Assume takes finite numbers that are at least 0, not bound={bound}, tolerance={tolerance}"
            )
        self.module = module
        self.assumed = Bound(float(bound), float(tolerance))

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    def lower(self, x: Node) -> Node:
        name = f"Assume({type(self.module).__name__})"
        return declared(x, name, self.module, lambda norm: self.assumed.lipschitz, lambda *_: self.assumed.tolerance)

    def extra_repr(self) -> str:
        return f"bound={self.assumed.lipschitz}, tolerance={self.assumed.tolerance}"


@as_written
@torch.no_grad()
def lipschitz_bound(module: nn.Module, in_shape: Shape | None = None, domain: Domain = UNIT) -> Bound:
    """The pair (L, ε) of a module in evaluation mode, with certified norms. ε holds for inputs with values in `domain`.

    `in_shape` is the shape of one input, without the batch; networks of lipflow know their own. A module without a
    bound raises a LoweringError that names it.
    """
    graph = lower(module, in_shape_of(module, in_shape))
    folded = fold(graph, norm_bound, domain)
    return Bound(folded.lipschitz, folded.error)
