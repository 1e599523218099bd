"""A linear map as a frozen network runs it: float64, our own columns and matrix products, and its constants.

Backends may convolve by Winograd or FFT, which the error model does not cover. Here every entry of Wx is one sum of at
most `dots[0]` products, in some order, and every entry of Wᵀy one of at most `dots[1]` (Note [error model]).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lipflow.operators import Conv2d, Dense, LinearOperator
from lipflow.operators.columns import matrix_of, run
from lipflow.operators.norm import Torus, norm_certificate
from lipflow.rounding import TINY, gamma, in_range, sqrt_up, up

# A stated constant is this much above the one derived here, so that another program, which rounds differently,
# derives one that is at most the stated one.
ROOM = Fraction(1, 2**32)


@dataclass(frozen=True, eq=False)
class Map:
    """x ↦ Wx with ‖W‖ ≤ `norm` and ‖|W|‖ ≤ `spread`; `geometry` is that of a convolution, or None for a matrix."""

    weight: Tensor
    geometry: dict[str, Any] | None
    norm: float
    spread: float
    torus: Torus

    @staticmethod
    def of(op: LinearOperator) -> "Map":
        """Bound an operator once, and hold its weights in float64."""
        require_known(op)
        weight = op.weight.detach().to("cpu", torch.float64).clone(memory_format=torch.contiguous_format)
        held = op.with_kernel(weight) if isinstance(op, Conv2d) else Dense(weight)
        norm, torus = norm_certificate(held)
        return Map(weight, geometry_of(op), up(Fraction(norm) * (1 + ROOM)), spread_bound(held), torus)

    @cached_property
    def op(self) -> Dense | Conv2d:
        if self.geometry is None:
            return Dense(self.weight)
        return Conv2d(self.weight, **{k: _tuples(v) for k, v in self.geometry.items()})

    @cached_property
    def matrix(self) -> Tensor:
        """The weights as products read them, made once."""
        return matrix_of(self.op) if isinstance(self.op, Conv2d) else self.weight

    @property
    def dots(self) -> tuple[int, int]:
        """The greatest number of products in an entry of Wx, and of Wᵀy (with the additions that unwrap a torus)."""
        op = self.op
        if isinstance(op, Dense):
            return self.weight.shape[1], self.weight.shape[0]
        out, grouped, height, width = self.weight.shape
        return grouped * height * width + 1, out // op.groups * height * width + 1 + repeats(op)

    def apply_error(self, reach: Fraction) -> Fraction:
        """‖fl(Wx) - Wx‖ for ‖x‖ ≤ reach."""
        return self._error(self.dots[0], reach)

    def adjoint_error(self, reach: Fraction) -> Fraction:
        """‖fl(Wᵀy) - Wᵀy‖ for ‖y‖ ≤ reach."""
        return self._error(self.dots[1], reach)

    def _error(self, dot: int, reach: Fraction) -> Fraction:
        return in_range(gamma(dot) * Fraction(self.spread) * reach + dot * repeats(self.op) * self.entries * TINY)

    @property
    def entries(self) -> int:
        """Entries of one input and one output together."""
        return math.prod(self.op.in_shape) + math.prod(self.op.out_shape)

    def __call__(self, x: Tensor) -> Tensor:
        return _Apply.apply(x, self)

    def adjoint(self, y: Tensor) -> Tensor:
        return _Adjoint.apply(y, self)


class _Linear(torch.autograd.Function):
    """A linear map of the members of a batch, which autograd and the transforms of torch.func do not look into."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Map], output: Tensor) -> None:
        ctx.map = inputs[1]


class _Apply(_Linear):
    """Wx; its derivative is the adjoint, run in the same way."""

    @staticmethod
    def forward(x: Tensor, w: Map) -> Tensor:
        return _forward(w.op, x, w.matrix) if isinstance(w.op, Conv2d) else x @ w.weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Adjoint.apply(grads[0], ctx.map), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _Apply.apply(tangents[0], ctx.map)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], *args: Any) -> tuple[Tensor, int]:
        return _of_batches(_Apply.apply, args[0].movedim(in_dims[0], 0), args[1]), 0


class _Adjoint(_Linear):
    """Wᵀy; its derivative is W."""

    @staticmethod
    def forward(y: Tensor, w: Map) -> Tensor:
        return _backward(w.op, y, w.matrix) if isinstance(w.op, Conv2d) else y @ w.weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Apply.apply(grads[0], ctx.map), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _Adjoint.apply(tangents[0], ctx.map)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], *args: Any) -> tuple[Tensor, int]:
        return _of_batches(_Adjoint.apply, args[0].movedim(in_dims[0], 0), args[1]), 0


def _of_batches(function: Callable[[Tensor, Map], Tensor], x: Tensor, w: Map) -> Tensor:
    """A map of batches applied to many of them, as to one."""
    return function(x.flatten(0, 1), w).unflatten(0, x.shape[:2])


def _forward(op: Conv2d, x: Tensor, matrix: Tensor) -> Tensor:
    if op.padding_mode == "circular":
        return run(_unpadded(op), op.pad(x), matrix=matrix)
    return run(op, x, matrix=matrix)


def _backward(op: Conv2d, y: Tensor, matrix: Tensor) -> Tensor:
    if op.padding_mode == "circular":
        return op.unpad(run(_unpadded(op), y, forward=False, matrix=matrix))
    return run(op, y, forward=False, matrix=matrix)


def _unpadded(op: Conv2d) -> Conv2d:
    """The convolution of images that have their border already."""
    size = [axis.size + axis.before + axis.after for axis in (op.rows, op.columns)]
    stride, dilation = (op.rows.stride, op.columns.stride), (op.rows.dilation, op.columns.dilation)
    return Conv2d(op.kernel, (size[0], size[1]), 0, "zeros", stride, dilation, op.groups)


def require_known(op: LinearOperator) -> None:
    """Refuse an operator of another type: what extends ours may compute anything."""
    if type(op) not in (Dense, Conv2d):
        raise TypeError(f"freeze knows the operators Dense and Conv2d, and not {type(op).__name__}")


def spread_bound(op: Dense | Conv2d) -> float:
    """At least ‖|W|‖₂, by Schur's test: √(greatest row sum · greatest column sum) of |W|."""
    weight = op.weight.abs()
    if isinstance(op, Dense):
        rows, columns, terms, copies = weight.sum(1).max(), weight.sum(0).max(), max(weight.shape), 1
    else:
        rows = weight.sum((1, 2, 3)).max()
        columns = weight.unflatten(0, (op.groups, -1)).sum((1, 3, 4)).max()
        terms, copies = weight.numel(), repeats(op)
    product = Fraction(float(rows)) * Fraction(float(columns)) * copies / (1 - gamma(terms)) ** 2
    return up(sqrt_up(product) * (1 + ROOM) + terms * TINY)


def repeats(op: LinearOperator) -> int:
    """How often padding repeats one input position."""
    if not isinstance(op, Conv2d) or op.padding_mode == "zeros":
        return 1
    axes = (op.rows, op.columns)
    counts = [-(-(axis.size + axis.before + axis.after) // axis.size) for axis in axes]
    return counts[0] * counts[1]


def geometry_of(op: LinearOperator) -> dict[str, Any] | None:
    """The arguments of a Conv2d after its kernel, as plain data."""
    if not isinstance(op, Conv2d):
        return None
    rows, columns = op.rows, op.columns
    return dict(
        in_size=[rows.size, columns.size],
        padding=[[rows.before, rows.after], [columns.before, columns.after]],
        padding_mode=op.padding_mode,
        stride=[rows.stride, columns.stride],
        dilation=[rows.dilation, columns.dilation],
        groups=op.groups,
    )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
