"""What a primitive operation is: a program, the Lipschitz constant of the exact map it stands for, and its error."""

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from torch import Tensor

from lipflow.bound import Shape


@dataclass(frozen=True, eq=False)
class Primitive(ABC):
    """One operation. Its fields are the data that a file holds: tensors, maps, and plain JSON."""

    kind: ClassVar[str]

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """The operation as it runs, on a float64 batch."""

    @abstractmethod
    def fits(self, shape: Shape) -> bool:
        """Whether inputs of a shape are what the constants are about. Nothing is ever broadcast against them."""

    @property
    def lipschitz(self) -> float:
        """A bound on the Lipschitz constant of the exact map."""
        return 1.0

    def error(self, reach: Fraction, entries: int) -> Fraction:
        """At least ‖computed - exact‖ on a computed input of so many entries and of norm at most `reach`."""
        return Fraction(0)

    @property
    def how(self) -> str:
        """How the bound was obtained."""
        return "1 by construction"

    @property
    def shape(self) -> str:
        """A word on its size, for the ledger."""
        return ", ".join(f"{f.name} {getattr(self, f.name)}" for f in dataclasses.fields(self) if f.name in _SHOWN)


_SHOWN = ("name", "group", "channels", "size", "block", "classes")


def require(right: bool, p: Primitive) -> None:
    """Refuse a primitive whose data no program here can run."""
    if not right:
        values = {f.name: getattr(p, f.name) for f in dataclasses.fields(p)}
        plain = {name: value for name, value in values.items() if isinstance(value, int | float | str | list)}
        raise ValueError(f"a {p.kind} primitive cannot be built from {plain}")
