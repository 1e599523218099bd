"""The cells of the field × step table: a step through a field, its constant, and how far it moves the origin.

Derivations are in docs/theory.md.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from lipflow.bound import Bound, Domain
from lipflow.flows.descent import autocasts
from lipflow.flows.field import Convex, Skew
from lipflow.flows.proximal import SMALLEST, contraction, iterations_for, proximal
from lipflow.flows.resolvent import apply, resolvent
from lipflow.operators import norm_bound
from lipflow.operators.norm import in_full
from lipflow.rounding import add_up, mul_up, sqrt_up, up

REFINE = 10  # power iterations before an implicit step: a solve costs more than a good estimate
SLACK = 1.25  # an implicit step is solved for a smoothness up to so many times the estimate
UNSOLVED = 2.0**-26  # and until at most this part of ‖x - z*‖ is left


class Cell(ABC):
    """One field with one step."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x after the step."""

    @abstractmethod
    def bound(self, domain: Domain) -> Bound:
        """The pair (L, ε) of the step in evaluation mode."""

    @abstractmethod
    def origin(self, domain: Domain) -> float:
        """A bound on how far the exact step moves 0."""


@dataclass(frozen=True)
class Descent(Cell):
    """x - h∇f(x): gradient descent. With f ℓ-smooth, I - h∇²f has its eigenvalues in [1 - hℓ, 1]: L = max(1, hℓ - 1).

    h = None takes 2/ℓ̂ with the estimated ℓ̂ ≤ ℓ: the Convex Potential Layer, 1-Lipschitz where the estimate is exact.
    """

    field: Convex
    h: float | None

    def __call__(self, x: Tensor) -> Tensor:
        return self.field.descend(x, self.h)

    def bound(self, domain: Domain) -> Bound:
        h, smoothness = self.evaluation_size(domain), Fraction(self.field.smoothness_bound(domain))
        return Bound(up(max(Fraction(1), Fraction(h) * smoothness - 1)))

    def origin(self, domain: Domain) -> float:
        return mul_up(self.evaluation_size(domain), self.field.gradient_bound(domain._replace(reach=0.0)))

    @torch.no_grad()
    def evaluation_size(self, domain: Domain) -> float:
        """The h that evaluation uses."""
        return float(self.field.step_size(domain, learn=False)) if self.h is None else self.h


@dataclass(frozen=True)
class Proximal(Cell):
    """The proximal map z + h∇f(z) = x of the implicit step, or its reflection 2z - x of the midpoint: both 1-Lipschitz.

    As I + h∇f is 1-strongly monotone, ‖x - z*‖ = h‖∇f(z*)‖ ≤ h‖∇f(x)‖; a known part of it is left unsolved: ε.
    """

    field: Convex
    h: float
    iterations: int | None
    reflect: bool

    def plan(self, domain: Domain, learn: bool) -> tuple[float, int]:
        """The ℓ that the iteration is run for, and how many times it is run."""
        ell = SLACK * self.h * float(self.field.smoothness_estimate(domain, learn, REFINE).detach())
        return ell, iterations_for(ell, UNSOLVED) if self.iterations is None else self.iterations

    def __call__(self, x: Tensor) -> Tensor:
        if autocasts(x):
            x = x.float()  # a layer before may have been rounded, and what is solved for is not
        with in_full(x):
            plan = self.plan(domain_of(x), self.field.training)
            z = proximal(self.field.gradient, x, self.h, *plan, now=lambda: self.field.now(x))
            return 2 * z - x if self.reflect else z

    def bound(self, domain: Domain) -> Bound:
        ell, iterations = self.plan(domain, learn=False)
        if mul_up(self.h, self.field.smoothness_bound(domain)) > max(ell, SMALLEST):
            return Bound(1.0, math.inf)  # a live estimate that fell behind by more than the slack promises no rate
        unsolved = mul_up(contraction(ell, iterations), mul_up(self.h, self.field.gradient_bound(domain)))
        return Bound(1.0, mul_up(2.0, unsolved) if self.reflect else unsolved)

    def origin(self, domain: Domain) -> float:
        once = mul_up(self.h, self.field.gradient_bound(domain._replace(reach=0.0)))
        return mul_up(2.0, once) if self.reflect else once


@dataclass(frozen=True)
class Rational(Cell):
    """(I - αA)⁻¹(I + βA)x with β ∈ {0, α}: it preserves norms for β = α (Cayley), and contracts for β = 0.

    For skew A, ‖(I ± αA)x‖² = ‖x‖² + α²‖Ax‖², the same for both signs and at least ‖x‖².
    """

    field: Skew
    alpha: float
    beta: float

    def __call__(self, x: Tensor) -> Tensor:
        m = self.field.weight(x)
        learn, coefficients = self.field.training, (self.alpha, self.beta)
        matrices = self.field.recall(
            lambda: resolvent(self.field.turn(m, learn), *coefficients), m, coefficients, m.in_shape
        )
        return apply(matrices, x)

    def bound(self, domain: Domain) -> Bound:
        return Bound(1.0)

    def origin(self, domain: Domain) -> float:
        return 0.0


@dataclass(frozen=True)
class Series(Cell):
    """Σ_{j<k} (hA)ʲ/j! · x, the series of e^{hA} cut after k terms (SOC).

    e^{hA} is orthogonal, and e^{iθ} less k terms of its series is at most |θ|ᵏ/k!: L = 1 + (ha)ᵏ/k!. Two terms are
    explicit Euler, I + hA, whose norm is exactly √(1 + h²a²); one is I.
    """

    field: Skew
    h: float
    terms: int
    train_terms: int

    def __call__(self, x: Tensor) -> Tensor:
        op = self.field.on(x)
        z = x
        for j in reversed(range(1, self.train_terms if self.field.training else self.terms)):
            z = torch.add(x, op(z), alpha=self.h / j)  # Horner: x + hA(x + hA/2(x + hA/3(…)))
        return z

    def bound(self, domain: Domain) -> Bound:
        angle = Fraction(self.h) * Fraction(norm_bound(self.field.operator(domain.shape)))
        if self.terms <= 2:
            return Bound(up(sqrt_up(1 + angle**2)) if self.terms == 2 else 1.0)
        return Bound(up(1 + angle**self.terms / math.factorial(self.terms)))

    def origin(self, domain: Domain) -> float:
        return 0.0


@dataclass(frozen=True)
class Both(Cell):
    """One cell after the other: the constants multiply. Both keep the shape."""

    first: Cell
    second: Cell

    def __call__(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    def bound(self, domain: Domain) -> Bound:
        first = self.first.bound(domain)
        reach = add_up(add_up(mul_up(first.lipschitz, domain.reach), self.first.origin(domain)), first.tolerance)
        return first.then(self.second.bound(domain._replace(reach=reach)))

    def origin(self, domain: Domain) -> float:
        return add_up(
            mul_up(self.first.origin(domain), self.second.bound(domain).lipschitz), self.second.origin(domain)
        )


def domain_of(x: Tensor) -> Domain:
    """The shape of one member of a batch."""
    return Domain(tuple(x.shape[1:]))
