"""The base class of primitive operations: a program, a Lipschitz constant, and a bound on the error."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from lipflow.node import Node, apply
from lipflow.operators import LinearOperator
from lipflow.operators.certified import CertifiedOperator
from lipflow.shapes import Shape

Norm = Callable[[LinearOperator], float]
Certify = Callable[[LinearOperator], CertifiedOperator]


@dataclass(frozen=True, eq=False)
class Primitive(ABC):
    """One operation, on batches of tensors or on nodes. Its fields are tensors, operators, and plain data.

    It is an exact map of real numbers, defined by the numbers it stores. A certified primitive is also a program in
    float64: what `run` computes is within `rounding` of the exact map (docs/soundness.md). `lipflow.check` has its own
    implementation of every kind that a frozen network may contain.
    """

    kind: ClassVar[str]
    reason: ClassVar[str] = "1 by construction"  # why it has its Lipschitz constant

    def __call__(self, *xs: Any) -> Any:
        """The result on batches of tensors; on nodes, the node of the result."""
        return apply(self, *xs) if xs and all(isinstance(x, Node) for x in xs) else self.run(*xs)

    @abstractmethod
    def run(self, *xs: Tensor) -> Tensor:
        """The operation on batches."""

    @abstractmethod
    def out_shape(self, *shapes: Shape) -> Shape:
        """The shape of an output, for inputs of these shapes. Shapes that do not fit are refused, never broadcast."""

    @abstractmethod
    def lipschitz(self, norm: Norm, *distances: Fraction) -> Fraction:
        """A bound on the distance of two outputs for inputs at these distances; `norm` gives norms of operators."""

    def tolerance(self, norm: Norm, *reaches: float) -> float:
        """A bound on the distance, in real arithmetic, from a map that has the constant of `lipschitz`."""
        return 0.0

    def rounding(self, entries: int, *reaches: Fraction) -> Fraction:
        """A bound on ‖computed - exact‖ for computed inputs of norms at most `reaches`.

        `entries` is the greatest number of entries of an input or the output.
        """
        raise ValueError(f"{self.kind} has no bound on its rounding error")

    def certified(self, certify: Certify) -> "Primitive":
        """This primitive in certified arithmetic: certified operators, and copies of other numbers in float64."""
        new: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, LinearOperator):
                new[field.name] = certify(value)
            elif isinstance(value, Tensor) and value.is_floating_point():
                new[field.name] = float64(value)
        return dataclasses.replace(self, **new) if new else self

    @property
    def how(self) -> str:
        """How its Lipschitz constant was obtained, for the ledger."""
        return self.reason

    @property
    def size(self) -> str:
        """The shapes of its operator, such as "45×32×32 → 5×32×32"; without one, of its tensor; else its numbers."""
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        for value in values:
            if isinstance(value, LinearOperator):
                return f"{format_shape(value.in_shape)} → {format_shape(value.out_shape)}"
            if isinstance(value, Tensor):
                return format_shape(value.shape)
        plain = (f.name for f in dataclasses.fields(self) if f.type in (int, str, tuple[int, int]))
        return ", ".join(f"{name} {getattr(self, name)}" for name in plain)


def no_operator(op: LinearOperator) -> float:
    """The `norm` of primitives that have no operator."""
    raise TypeError(f"the norm of {op} is needed")


@dataclass(frozen=True, eq=False)
class Exact(Primitive):
    """A primitive that does not round, as it only moves, selects, clips or negates numbers."""

    def rounding(self, entries: int, *reaches: Fraction) -> Fraction:
        return Fraction(0)


def format_shape(shape: Iterable[int]) -> str:
    """A shape as "45×32×32"."""
    return "×".join(map(str, shape))


def float64(t: Tensor | None) -> Tensor | None:
    """A copy of stored numbers in float64 on the CPU."""
    return None if t is None else t.detach().to("cpu", torch.float64).clone(memory_format=torch.contiguous_format)


def require(valid: bool, p: Primitive) -> None:
    """Raise ValueError for a primitive whose fields are not valid."""
    if not valid:
        values = {f.name: getattr(p, f.name) for f in dataclasses.fields(p)}
        shown = {name: tuple(v.shape) if isinstance(v, Tensor) else v for name, v in values.items()}
        article = "an" if p.kind[0] in "aeiou" else "a"
        raise ValueError(f"{article} {p.kind} primitive cannot be built from {shown}")


def require_affine(p: Primitive, op: object, bias: Tensor | None) -> None:
    """Raise unless op is an operator, and the bias has a number for each row of a matrix, or each output channel."""
    if not isinstance(op, LinearOperator):
        raise TypeError(f"a primitive takes an operator, such as DenseOperator(matrix), not {type(op).__name__}")
    require(bias is None or bias.shape == (op.out_shape[0],), p)


def require_shape(fits: bool, p: Primitive, *shapes: Shape) -> None:
    """Raise ValueError for inputs whose shapes the constants of a primitive do not cover."""
    if not fits:
        given = " and ".join(map(str, shapes)) or "nothing"
        raise ValueError(f"{p.kind} ({p.size}) does not take an input of shape {given}")
