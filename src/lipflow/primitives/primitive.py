"""What a primitive operation is: a program, how far it stretches, and its error."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

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
    float64: what `run` computes is within `rounding` of the exact map (docs/soundness.md). `lipflow.check` has a twin
    of every kind that a frozen network may hold.
    """

    kind: ClassVar[str]

    def __call__(self, *xs: Any) -> Any:
        """The operation on batches; on nodes, the node of the result."""
        return apply(self, *xs) if xs and all(isinstance(x, Node) for x in xs) else self.run(*xs)

    @abstractmethod
    def run(self, *xs: Tensor) -> Tensor:
        """The operation on batches."""

    @abstractmethod
    def out_shape(self, *shapes: Shape) -> Shape:
        """The shape of an output, for inputs of these shapes. What does not fit is refused: nothing is broadcast."""

    def lipschitz(self, norm: Norm, *distances: Fraction) -> Fraction:
        """How far apart outputs can be for inputs so far apart; `norm` is what to take for the norms of operators."""
        return sum(distances, Fraction(0))

    def tolerance(self, norm: Norm, *reaches: float) -> float:
        """At least the distance, in real arithmetic, from a map that stretches no more than `lipschitz` says."""
        return 0.0

    def rounding(self, entries: int, *reaches: Fraction) -> Fraction:
        """At least ‖computed - exact‖ for computed inputs of norms at most `reaches`; no tensor has more `entries`."""
        return Fraction(0)

    def certified(self, certify: Certify) -> "Primitive":
        """This primitive in certified arithmetic: what a frozen network runs."""
        return self

    @property
    def how(self) -> str:
        """How its constant was obtained."""
        return "1 by construction"

    @property
    def size(self) -> str:
        """A word on its size, for the ledger."""
        plain = (f.name for f in dataclasses.fields(self) if f.type in (int, str, tuple[int, int]))
        return ", ".join(f"{name} {getattr(self, name)}" for name in plain)


def require(right: bool, p: Primitive) -> None:
    """Refuse a primitive whose data no program here can run."""
    if not right:
        values = {f.name: getattr(p, f.name) for f in dataclasses.fields(p)}
        shown = {name: tuple(v.shape) if isinstance(v, Tensor) else v for name, v in values.items()}
        article = "an" if p.kind[0] in "aeiou" else "a"
        raise ValueError(f"{article} {p.kind} primitive cannot be built from {shown}")


def require_operator(op: object) -> None:
    """Refuse what is no operator, such as the weight of one."""
    if not isinstance(op, LinearOperator):
        raise TypeError(f"a primitive takes an operator, such as DenseOperator(matrix), not {type(op).__name__}")


def require_shape(fits: bool, p: Primitive, *shapes: Shape) -> None:
    """Refuse inputs that a primitive's constants say nothing of."""
    if not fits:
        given = " and ".join(map(str, shapes)) or "nothing"
        raise ValueError(f"{p.kind} ({p.size}) does not take an input of shape {given}")


def size_of(op: LinearOperator) -> str:
    """An operator's shapes, as "45×32×32 → 5×32×32"."""
    return " → ".join("×".join(map(str, shape)) for shape in (op.in_shape, op.out_shape))
