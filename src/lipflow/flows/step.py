"""How a flow is discretised: the steps of the field × step table.

step \\ field     convex, F = -∇f, f ℓ-smooth            skew, F = Ax, ‖A‖ ≤ a
ExplicitEuler    max(1, hℓ - 1)                         √(1 + h²a²), refused unless asked for
ImplicitEuler    1, and ε for what is left unsolved     1
Midpoint         1, and ε                               1
Exponential      refused                                1 + (ha)ᵏ/k!
Split(s₁, s₂)    through -∇f + Ax: s₁ through -∇f, then s₂ through Ax; the constants multiply
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from lipflow.flows.cell import Both, Cell, Descent, Proximal, Rational, Series
from lipflow.flows.field import Convex, Field, Skew, Sum


class Step(ABC):
    """A way to step through fields; `cell` gives the cell of the table, or refuses."""

    @abstractmethod
    def cell(self, field: Field) -> Cell:
        """This step through a field."""

    def refuse(self, field: Field, instead: str) -> TypeError:
        """The error for a cell of the table that is empty."""
        if isinstance(field, Sum) and not isinstance(self, Split):
            instead = "a Sum of fields takes Split(convex_step, skew_step)"
        return TypeError(f"{self} does not step through {type(field).__name__}: {instead}")


@dataclass(frozen=True)
class ExplicitEuler(Step):
    """x + hF(x).

    Through a convex potential, h = None takes h = 2/ℓ̂ with ℓ̂ = s‖W‖² estimated: the Convex Potential Layer. A fixed
    h is the paper's relaxed network. A skew field is stretched by √(1 + h²a²), so it is refused unless `expand=True`.
    """

    h: float | None = None
    expand: bool = False

    def __post_init__(self) -> None:
        if self.h is not None:
            _require_step(self.h)

    def cell(self, field: Field) -> Cell:
        if isinstance(field, Convex):
            return Descent(field, self.h)
        if isinstance(field, Skew) and self.expand and self.h is not None:
            return Series(field, self.h, terms=2, train_terms=2)
        raise self.refuse(
            field, "it would stretch by √(1 + h²a²); use Midpoint or Exponential, or give h and expand=True"
        )


@dataclass(frozen=True)
class ImplicitEuler(Step):
    """z = x + hF(z).

    Through a convex potential: the proximal map of h·f, 1-Lipschitz without any smoothness (the paper's appendix on
    implicit flows); `iterations` fixes how long it is solved, by default as long as the estimated smoothness needs.
    Through a skew field: (I - hA)⁻¹x, which contracts.
    """

    h: float = 1.0
    iterations: int | None = None

    def __post_init__(self) -> None:
        _require_step(self.h, self.iterations)

    def cell(self, field: Field) -> Cell:
        if isinstance(field, Convex):
            return Proximal(field, self.h, self.iterations, reflect=False)
        if isinstance(field, Skew) and field.weight.solvable:
            return Rational(field, self.h, 0.0)
        raise self.refuse(field, _UNSOLVABLE)


@dataclass(frozen=True)
class Midpoint(Step):
    """z = x + hF((x + z)/2).

    Through a convex potential: m = (x + z)/2 solves m = x + (h/2)F(m), so z = 2m - x is the reflected proximal map.
    Through a skew field: Cayley, (I - hA/2)⁻¹(I + hA/2)x, which preserves norms.
    """

    h: float = 1.0
    iterations: int | None = None

    def __post_init__(self) -> None:
        _require_step(self.h, self.iterations)

    def cell(self, field: Field) -> Cell:
        if isinstance(field, Convex):
            return Proximal(field, self.h / 2, self.iterations, reflect=True)
        if isinstance(field, Skew) and field.weight.solvable:
            return Rational(field, self.h / 2, self.h / 2)
        raise self.refuse(field, _UNSOLVABLE)


@dataclass(frozen=True)
class Exponential(Step):
    """e^{hA}x, the exact flow of a skew field, by so many `terms` of its series: SOC. train() may use `train_terms`."""

    h: float = 1.0
    terms: int = 13
    train_terms: int | None = None

    def __post_init__(self) -> None:
        _require_step(self.h, self.terms)
        _require_step(self.h, self.train_terms)

    def cell(self, field: Field) -> Cell:
        if isinstance(field, Skew):
            return Series(field, self.h, self.terms, self.train_terms or self.terms)
        raise self.refuse(field, "its exact flow has no closed form; use ExplicitEuler, ImplicitEuler or Midpoint")


@dataclass(frozen=True)
class Split(Step):
    """The paper's two-part step through -∇f + Ax: `convex_step` through -∇f, then `skew_step` through Ax."""

    convex_step: Step
    skew_step: Step

    def cell(self, field: Field) -> Cell:
        if isinstance(field, Sum):
            return Both(self.convex_step.cell(field.convex), self.skew_step.cell(field.skew))
        raise self.refuse(field, "Split steps through a Sum(convex, skew); give a single field a single step")


_UNSOLVABLE = "it is solved at each frequency, which takes padding_mode='circular'; with zero padding use Exponential"


def _require_step(h: float, repetitions: int | None = None) -> None:
    """A step size is positive and finite; a number of iterations or terms is at least 1."""
    if isinstance(h, bool) or not isinstance(h, int | float) or not (math.isfinite(h) and h > 0):
        raise ValueError(f"a step size is a finite number above 0, not {h!r}")
    if repetitions is not None and (not isinstance(repetitions, int) or repetitions < 1):
        raise ValueError(f"iterations and terms are at least 1, not {repetitions!r}")
