"""The discretisation of a flow: the steps of the field × step table, with the Lipschitz constants of the layers.

step \\ field     convex, F = -∇f, f ℓ-smooth            skew, F = Ax, ‖A‖ ≤ a
ExplicitEuler    max(1, hℓ - 1)                         √(1 + h²a²), only with expand=True
ImplicitEuler    1, and ε for the error of the solver   1
Midpoint         1, and ε                               1
Exponential      not supported                          1 + (ha)ᵏ/k!
Split(s₁, s₂)    on -∇f + Ax: s₁ on -∇f, then s₂ on Ax; the constants multiply

The constants are derived in docs/theory.md.
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
from lipflow.flows.proximal import proximal_step
from lipflow.flows.resolvent import resolvent_step
from lipflow.flows.weight import ConvWeight
from lipflow.node import LoweringError, Node
from lipflow.primitives import Norm
from lipflow.primitives.declared import declared
from lipflow.rounding import up

MAX_REPETITIONS = 10_000  # iterations of a step, or terms of a series

# Published for SOC: 12 convolutions in evaluation and 5 in training; the identity is one more term.
TERMS, TRAIN_TERMS = 13, 6


class Step(ABC):
    """One step of a discretisation of dx/dt = F(x)."""

    @abstractmethod
    def require(self, field: Field) -> None:
        """Raise TypeError for a field that this step cannot be used with."""

    @abstractmethod
    def __call__(self, field: Field, x: Tensor) -> Tensor:
        """The value after one step from x."""

    def lower(self, field: Field, x: Node) -> Node:
        """The step in evaluation mode as a node. Override it if the step has a better constant than its parts."""
        return cast(Node, self(field, x))

    def refusal(self, field: Field, instead: str) -> TypeError:
        """The error for a field that this step cannot be used with; `instead` says what can."""
        if isinstance(field, ConvexPlusSkew) and not isinstance(self, Split):
            instead = "a ConvexPlusSkew takes Split(convex_step, skew_step)"
        return TypeError(f"{self} cannot be used with {type(field).__name__}: {instead}")


@dataclass(frozen=True)
class ExplicitEuler(Step):
    """x + hF(x).

    With a convex potential and h = None, h is 2/ℓ̂ for the estimate ℓ̂ of s‖W‖²: the Convex Potential Layer
    x - (2/s‖W‖²)·Wᵀσ(Wx + b). The eigenvalues of I - h∇²f are in [1 - hℓ, 1], so L = max(1, hℓ - 1). A fixed h gives
    the paper's relaxed network. With a skew field L = √(1 + h²a²) > 1, so it needs `expand=True`.
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
        """h, or 2/ℓ̂ if h is None."""
        return cast(Convex, field).step_size(tuple(x.shape[1:])) if self.h is None else self.h

    @torch.no_grad()
    def lower(self, field: Field, x: Node) -> Node:
        if isinstance(field, Skew):
            return primitives.TruncatedExponential(field.on(x), cast(float, self.h), 2)(x)
        convex = cast(Convex, field)
        shape, parts, h = tuple(x.shape[1:]), convex.parts(x), float(self.size(field, x))
        if not math.isfinite(h):
            raise LoweringError(f"the step 2/‖W‖² is {h}: the layer has NaN or infinite weights")
        if parts is not None:
            return primitives.Descent(*parts, h, follows=self.h is None)(x)

        def constant(norm: Norm) -> float:
            return up(max(Fraction(1), Fraction(h) * Fraction(convex.smoothness(shape, norm)) - 1))

        return declared(x, type(field).__name__, lambda z: self(field, z), constant)


@dataclass(frozen=True)
class _Implicit(Step):
    """An implicit step: a linear solve for a skew field, `iterations` of the proximal solver for a convex one.

    By default, the number of iterations follows from the estimated smoothness.
    """

    h: float = 1.0
    iterations: int | None = None

    def __post_init__(self) -> None:
        _require_step(self.h, self.iterations)

    def require(self, field: Field) -> None:
        if isinstance(field, Convex):
            return
        weight = field.weight if isinstance(field, Skew) else None
        if weight is None or (isinstance(weight, ConvWeight) and weight.geometry["padding_mode"] != "circular"):
            raise self.refusal(
                field,
                "it needs padding_mode='circular', to be solved at each frequency; with zero padding use Exponential",
            )


@dataclass(frozen=True)
class ImplicitEuler(_Implicit):
    """z = x + hF(z).

    With a convex potential: the proximal map of h·f, which is 1-Lipschitz for any smoothness (the paper's appendix on
    implicit flows). With a skew field: (I - hA)⁻¹x, which is 1-Lipschitz, as ‖(I - hA)z‖² = ‖z‖² + h²‖Az‖².
    """

    def __call__(self, field: Field, x: Tensor) -> Tensor:
        if isinstance(field, Skew):
            return resolvent_step(field, x, self.h, 0.0)
        return proximal_step(cast(Convex, field), x, self.h, self.iterations)


@dataclass(frozen=True)
class Midpoint(_Implicit):
    """z = x + hF((x + z)/2).

    With a convex potential: m = (x + z)/2 solves m = x + (h/2)F(m), so m is the proximal map of (h/2)·f, and z = 2m - x
    its reflection. With a skew field: the Cayley transform (I - hA/2)⁻¹(I + hA/2)x, which preserves norms.
    """

    def __call__(self, field: Field, x: Tensor) -> Tensor:
        if isinstance(field, Skew):
            return resolvent_step(field, x, self.h / 2, self.h / 2)
        return proximal_step(cast(Convex, field), x, self.h / 2, self.iterations, reflect=True)


@dataclass(frozen=True)
class Exponential(Step):
    """The exact flow e^{hA}x of a skew field, by `terms` terms of its series (SOC); `train_terms` in training.

    e^{hA} is orthogonal, and for |θ| ≤ ha the remainder of e^{iθ} after k terms is at most (ha)ᵏ/k!: L = 1 + (ha)ᵏ/k!.
    """

    h: float = 1.0
    terms: int = TERMS
    train_terms: int | None = None

    def __post_init__(self) -> None:
        _require_step(self.h, self.terms, self.train_terms)

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
    """The paper's two-part step for -∇f + Ax: `convex_step` on -∇f, then `skew_step` on Ax."""

    convex_step: Step
    skew_step: Step

    def require(self, field: Field) -> None:
        if not isinstance(field, ConvexPlusSkew):
            raise self.refusal(field, "it needs ConvexPlusSkew(convex, skew); give a single field a single step")
        self.convex_step.require(field.convex)
        self.skew_step.require(field.skew)

    def __call__(self, field: Field, x: Tensor) -> Tensor:
        both = cast(ConvexPlusSkew, field)
        return self.skew_step(both.skew, self.convex_step(both.convex, x))

    def lower(self, field: Field, x: Node) -> Node:
        both = cast(ConvexPlusSkew, field)
        return self.skew_step.lower(both.skew, self.convex_step.lower(both.convex, x))


def _require_step(h: float, *repetitions: int | None) -> None:
    if isinstance(h, bool) or not isinstance(h, int | float) or not (math.isfinite(h) and h > 0):
        raise ValueError(f"a step size is a finite number above 0, not {h!r}")
    for number in repetitions:
        if number is not None and (not isinstance(number, int) or not 1 <= number <= MAX_REPETITIONS):
            raise ValueError(
                f"iterations and terms are integers of at least 1 and at most {MAX_REPETITIONS}, not {number!r}"
            )
