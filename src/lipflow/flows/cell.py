"""The cells of the field × step table: a step through a field, as it runs and as it is lowered.

Derivations of the constants are in docs/theory.md.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

import torch
from torch import Tensor

from lipflow import primitives
from lipflow.flows.descent import autocasts
from lipflow.flows.field import Convex, Skew
from lipflow.flows.proximal import SMALLEST, contraction, iterations_for, proximal
from lipflow.flows.resolvent import apply, resolvent
from lipflow.node import LoweringError, Node
from lipflow.operators.norm import in_full
from lipflow.primitives import Norm
from lipflow.primitives.declared import declared
from lipflow.primitives.descent import UNSOLVED
from lipflow.rounding import add_up, mul_up, norm_up, up
from lipflow.shapes import Shape

REFINE = 10  # power iterations before an implicit step: a solve costs more than a good estimate
SLACK = 1.25  # an implicit step is solved for a smoothness up to so many times the estimate


class Cell(ABC):
    """One field with one step."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x after the step."""

    def lower(self, x: Node) -> Node:
        """The step in evaluation mode as a node: by its parts, where it is no better than they are."""
        return cast(Node, self(x))


@dataclass(frozen=True)
class Descent(Cell):
    """x - h∇f(x): gradient descent. With f ℓ-smooth, I - h∇²f has its eigenvalues in [1 - hℓ, 1]: L = max(1, hℓ - 1).

    h = None takes 2/ℓ̂ with the estimated ℓ̂ ≤ ℓ: the Convex Potential Layer, 1-Lipschitz where the estimate is exact.
    """

    field: Convex
    h: float | None

    def __call__(self, x: Tensor) -> Tensor:
        return self.field.descend(x, self.h)

    def lower(self, x: Node) -> Node:
        shape, parts = tuple(x.shape[1:]), self.field.parts(x)
        h = self.evaluation_size(shape)
        if parts is not None:
            return primitives.Descent(*parts, h, follows=self.h is None)(x)

        def constant(norm: Norm) -> float:
            return up(max(Fraction(1), Fraction(h) * Fraction(self.field.smoothness(shape, norm)) - 1))

        return declared(x, type(self.field).__name__, self, constant)

    @torch.no_grad()
    def evaluation_size(self, shape: Shape) -> float:
        """The h that evaluation uses."""
        h = float(self.field.step_size(shape, learn=False)) if self.h is None else self.h
        if not math.isfinite(h):
            raise LoweringError(f"a step of 2/‖W‖² = {h} is no number: the layer has NaN or infinite weights")
        return h


@dataclass(frozen=True)
class Proximal(Cell):
    """The proximal map z + h∇f(z) = x of the implicit step, or its reflection 2z - x of the midpoint: both 1-Lipschitz.

    As I + h∇f is 1-strongly monotone, ‖x - z*‖ = h‖∇f(z*)‖ ≤ h‖∇f(x)‖; a known part of it is left unsolved: ε.
    """

    field: Convex
    h: float
    iterations: int | None
    reflect: bool

    def plan(self, shape: Shape, learn: bool) -> tuple[float, int]:
        """The ℓ that the iteration is run for, and how many times it is run."""
        ell = SLACK * self.h * float(self.field.smoothness_estimate(shape, learn, REFINE).detach())
        return ell, iterations_for(ell, UNSOLVED) if self.iterations is None else self.iterations

    def __call__(self, x: Tensor) -> Tensor:
        if autocasts(x):
            x = x.float()  # a layer before may have been rounded, and what is solved for is not
        with in_full(x):
            plan = self.plan(tuple(x.shape[1:]), self.field.training)
            z = proximal(self.field.gradient, x, self.h, *plan, now=lambda: self.field.now(x))
            return 2 * z - x if self.reflect else z

    def lower(self, x: Node) -> Node:
        shape, parts = tuple(x.shape[1:]), self.field.parts(x)
        ell, iterations = self.plan(shape, learn=False)
        planned, unsolved = max(ell, SMALLEST), contraction(ell, iterations)
        if parts is not None:

            def solve(gradient: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
                return proximal(gradient, x, self.h, ell, iterations)

            return primitives.LiveProximal(*parts, self.h, self.reflect, solve, planned, unsolved)(x)
        at_origin = norm_up(self.field.gradient(torch.zeros(1, *shape, dtype=x.dtype)))

        def allowance(norm: Norm, reach: float) -> float:
            smoothness = self.field.smoothness(shape, norm)
            if mul_up(self.h, smoothness) > planned:
                return math.inf  # a live estimate that fell behind by more than the slack promises no rate
            left = mul_up(unsolved, mul_up(self.h, add_up(at_origin, mul_up(smoothness, reach))))
            return 2 * left if self.reflect else left

        return declared(x, type(self.field).__name__, self, lambda norm: 1.0, allowance)


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

    def lower(self, x: Node) -> Node:
        return primitives.Series(self.field.on(x), self.h, self.terms)(x)


@dataclass(frozen=True)
class Both(Cell):
    """One cell after the other: the constants multiply. Both keep the shape."""

    first: Cell
    second: Cell

    def __call__(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    def lower(self, x: Node) -> Node:
        return self.second.lower(self.first.lower(x))
