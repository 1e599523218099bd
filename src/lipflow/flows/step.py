"""How a flow is discretised: the steps of the field × step table.

step \\ field     convex, F = -∇f, f ℓ-smooth            skew, F = Ax, ‖A‖ ≤ a
ExplicitEuler    max(1, hℓ - 1)                         √(1 + h²a²), refused unless asked for
ImplicitEuler    1, and ε for what is left unsolved     1
Midpoint         1, and ε                               1
Exponential      refused                                1 + (ha)ᵏ/k!
Split(s₁, s₂)    through -∇f + Ax: s₁ through -∇f, then s₂ through Ax; the constants multiply

Derivations of the constants are in docs/theory.md.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

import torch
from torch import Tensor

from lipflow import primitives
from lipflow.flows.field import Convex, ConvexPlusSkew, Field, Skew
from lipflow.flows.proximal import lower_proximal, proximal_step
from lipflow.flows.resolvent import resolvent_step
from lipflow.node import LoweringError, Node
from lipflow.primitives import Norm
from lipflow.primitives.declared import declared
from lipflow.rounding import up


class Step(ABC):
    """A way to step through fields."""

    @abstractmethod
    def require(self, field: Field) -> None:
        """Refuse a field whose cell of the table is empty."""

    @abstractmethod
    def __call__(self, field: Field, x: Tensor) -> Tensor:
        """x after one step through a field."""

    def lower(self, field: Field, x: Node) -> Node:
        """The step in evaluation mode as a node: by its parts, unless it is better than they are."""
        return cast(Node, self(field, x))

    def refusal(self, field: Field, instead: str) -> TypeError:
        """The error for a cell of the table that is empty."""
        if isinstance(field, ConvexPlusSkew) and not isinstance(self, Split):
            instead = "a ConvexPlusSkew takes Split(convex_step, skew_step)"
        return TypeError(f"{self} does not step through {type(field).__name__}: {instead}")


@dataclass(frozen=True)
class ExplicitEuler(Step):
    """x + hF(x).

    Through a convex potential, h = None takes h = 2/ℓ̂ with ℓ̂ = s‖W‖² estimated: the Convex Potential Layer
    x - (2/s‖W‖²)·Wᵀσ(Wx + b). As I - h∇²f has its eigenvalues in [1 - hℓ, 1], L = max(1, hℓ - 1). A fixed h is the
    paper's relaxed network. A skew field is stretched by √(1 + h²a²), so it is refused unless `expand=True`.
    """

    h: float | None = None
    expand: bool = False

    def __post_init__(self) -> None:
        if self.h is not None:
            _require_step(self.h)

    def require(self, field: Field) -> None:
        if not isinstance(field, Convex) and not (isinstance(field, Skew) and self.expand and self.h is not None):
            raise self.refusal(
                field, "it would stretch by √(1 + h²a²); use Midpoint or Exponential, or give h and expand=True"
            )

    def __call__(self, field: Field, x: Tensor) -> Tensor:
        return x + self.size(field, x) * field(x)

    def size(self, field: Field, x: Tensor) -> Tensor | float:
        """h, or 2/ℓ̂ where none was given."""
        return cast(Convex, field).step_size(tuple(x.shape[1:])) if self.h is None else self.h

    def lower(self, field: Field, x: Node) -> Node:
        if isinstance(field, Skew):
            return primitives.TruncatedExponential(field.on(x), cast(float, self.h), 2)(x)
        convex = cast(Convex, field)
        shape, parts = tuple(x.shape[1:]), convex.parts(x)
        h = self.evaluation_size(convex, x)
        if parts is not None:
            return primitives.Descent(*parts, h, follows=self.h is None)(x)

        def constant(norm: Norm) -> float:
            return up(max(Fraction(1), Fraction(h) * Fraction(convex.smoothness(shape, norm)) - 1))

        return declared(x, type(field).__name__, lambda z: self(field, z), constant)

    @torch.no_grad()
    def evaluation_size(self, field: Convex, x: Tensor) -> float:
        """The h that evaluation uses."""
        h = float(self.size(field, x))
        if not math.isfinite(h):
            raise LoweringError(f"the step 2/‖W‖² is {h}: the layer has NaN or infinite weights")
        return h


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

    def require(self, field: Field) -> None:
        _require_solvable(self, field)

    def __call__(self, field: Field, x: Tensor) -> Tensor:
        if isinstance(field, Skew):
            return resolvent_step(field, x, self.h, 0.0)
        return proximal_step(cast(Convex, field), x, self.h, self.iterations)

    def lower(self, field: Field, x: Node) -> Node:
        if isinstance(field, Skew):
            return super().lower(field, x)
        return lower_proximal(cast(Convex, field), x, self.h, self.iterations)


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

    def require(self, field: Field) -> None:
        _require_solvable(self, field)

    def __call__(self, field: Field, x: Tensor) -> Tensor:
        if isinstance(field, Skew):
            return resolvent_step(field, x, self.h / 2, self.h / 2)
        return proximal_step(cast(Convex, field), x, self.h / 2, self.iterations, reflect=True)

    def lower(self, field: Field, x: Node) -> Node:
        if isinstance(field, Skew):
            return super().lower(field, x)
        return lower_proximal(cast(Convex, field), x, self.h / 2, self.iterations, reflect=True)


@dataclass(frozen=True)
class Exponential(Step):
    """e^{hA}x, the exact flow of a skew field, by so many `terms` of its series: SOC. train() may use `train_terms`.

    e^{hA} is orthogonal, and e^{iθ} less k terms of its series is at most |θ|ᵏ/k!: L = 1 + (ha)ᵏ/k!.
    """

    h: float = 1.0
    terms: int = 13
    train_terms: int | None = None

    def __post_init__(self) -> None:
        _require_step(self.h, self.terms)
        _require_step(self.h, self.train_terms)

    def require(self, field: Field) -> None:
        if not isinstance(field, Skew):
            raise self.refusal(field, "its exact flow has no closed form; use ExplicitEuler, ImplicitEuler or Midpoint")

    def __call__(self, field: Field, x: Tensor) -> Tensor:
        op = cast(Skew, field).on(x)
        terms = (self.train_terms or self.terms) if field.training else self.terms
        z = x
        for j in reversed(range(1, terms)):
            z = x + op(z) * (self.h / j)  # Horner: x + hA(x + hA/2(x + hA/3(…)))
        return z

    def lower(self, field: Field, x: Node) -> Node:
        return primitives.TruncatedExponential(cast(Skew, field).on(x), self.h, self.terms)(x)


@dataclass(frozen=True)
class Split(Step):
    """The paper's two-part step through -∇f + Ax: `convex_step` through -∇f, then `skew_step` through Ax."""

    convex_step: Step
    skew_step: Step

    def require(self, field: Field) -> None:
        if not isinstance(field, ConvexPlusSkew):
            raise self.refusal(
                field, "it steps through ConvexPlusSkew(convex, skew); give a single field a single step"
            )
        self.convex_step.require(field.convex)
        self.skew_step.require(field.skew)

    def __call__(self, field: Field, x: Tensor) -> Tensor:
        both = cast(ConvexPlusSkew, field)
        return self.skew_step(both.skew, self.convex_step(both.convex, x))

    def lower(self, field: Field, x: Node) -> Node:
        both = cast(ConvexPlusSkew, field)
        return self.skew_step.lower(both.skew, self.convex_step.lower(both.convex, x))


def _require_solvable(step: Step, field: Field) -> None:
    """An implicit step goes through convex fields, and through skew ones that are solved directly."""
    if not isinstance(field, Convex) and not (isinstance(field, Skew) and field.weight.solvable):
        raise step.refusal(
            field,
            "it is solved at each frequency, which takes padding_mode='circular'; with zero padding use Exponential",
        )


def _require_step(h: float, repetitions: int | None = None) -> None:
    """A step size is positive and finite; a number of iterations or terms is at least 1."""
    if isinstance(h, bool) or not isinstance(h, int | float) or not (math.isfinite(h) and h > 0):
        raise ValueError(f"a step size is a finite number above 0, not {h!r}")
    if repetitions is not None and (not isinstance(repetitions, int) or repetitions < 1):
        raise ValueError(f"iterations and terms are at least 1, not {repetitions!r}")
