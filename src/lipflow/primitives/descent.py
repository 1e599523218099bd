"""Steps of the flow of -∇f for a convex potential f, as primitives: gradient descent, and the proximal map."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from lipflow.operators import LinearOperator
from lipflow.operators.certified import CertifiedOperator
from lipflow.operators.operator import add_bias
from lipflow.primitives.linear import affine_error, bias_norm
from lipflow.primitives.nonlinearity import EXACT_SIGMAS, NONLINEARITIES, Nonlinearity, name_of
from lipflow.primitives.primitive import Certify, Norm, Primitive, float64, require, require_affine, require_shape
from lipflow.rounding import TINY, U, down, gamma, mul_up, norm_up, sqrt_up, up
from lipflow.shapes import Shape

UNSOLVED = 2.0**-26  # an implicit step is solved until at most this fraction of ‖x - z*‖ is left
MAX_STEPS = 10_000  # stiffer layers, which need more steps, are refused here and in lipflow.check


@dataclass(frozen=True, eq=False)
class Convex(Primitive):
    """A step of the flow of -∇f, ∇f(x) = Wᵀσ(Wx + b). f is convex and ℓ-smooth: σ has slopes in [0, s], ℓ = s‖W‖²."""

    op: LinearOperator
    bias: Tensor | None
    sigma: Nonlinearity

    def __post_init__(self) -> None:
        require_affine(self, self.op, self.bias)
        if not isinstance(self.sigma, Nonlinearity):
            raise TypeError(f"σ is a Nonlinearity with its slopes, such as NONLINEARITIES['relu'], not {self.sigma!r}")

    def out_shape(self, *shapes: Shape) -> Shape:
        require_shape(shapes == (self.op.in_shape,), self, *shapes)
        return shapes[0]

    def gradient(self, x: Tensor) -> Tensor:
        """∇f(x) = Wᵀσ(Wx + b)."""
        return self.op.adjoint(self.sigma.function(add_bias(self.op(x), self.bias)))

    def smoothness(self, norm: Norm) -> Fraction:
        """ℓ = s‖W‖²."""
        return Fraction(self.sigma.high) * Fraction(norm(self.op)) ** 2

    def gradient_error(self, reach: Fraction) -> tuple[Fraction, Fraction]:
        """Bounds on the error and on the norm of the computed gradient, for ‖x‖ ≤ reach and a σ that does not round.

        σ, of slope at most 1, does not increase the error e of Wx + b; Wᵀ multiplies it by ‖W‖ and adds its own error.
        """
        assert isinstance(self.op, CertifiedOperator)
        norm, e = Fraction(self.op.norm), affine_error(self.op, self.bias, reach)
        inner = norm * reach + bias_norm(self.op, self.bias) + e
        product = self.op.adjoint_error(inner)
        return norm * e + product, norm * inner + product

    def exact_sigma(self) -> Nonlinearity:
        """σ; raise unless it is one that does not round."""
        name = name_of(self.sigma)
        if name not in EXACT_SIGMAS:
            raise ValueError(f"σ = {name} rounds, and its rounding error is unknown; relu and hardtanh do not round")
        return NONLINEARITIES[name]


@dataclass(frozen=True, eq=False)
class Descent(Convex):
    """x - h∇f(x), the Convex Potential Layer if h = 2/ℓ. L = max(1, hℓ - 1): I - h∇²f has eigenvalues in [1 - hℓ, 1].

    If it `follows` the norm, h comes from an estimate of ‖W‖, and freezing replaces it by 2/ℓ with the certified norm.
    """

    kind = "descent"
    h: float
    follows: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "h", float(self.h))
        require(self.h == 0 or TINY <= self.h < math.inf, self)

    def run(self, *xs: Tensor) -> Tensor:
        return xs[0] - self.h * self.gradient(xs[0])

    def lipschitz(self, norm: Norm, *distances: Fraction) -> Fraction:
        return max(Fraction(1), Fraction(self.h) * self.smoothness(norm) - 1) * distances[0]

    def rounding(self, entries: int, *reaches: Fraction) -> Fraction:
        """h times the error of the computed gradient g, and the roundings of h·g and x - h·g."""
        assert isinstance(self.op, CertifiedOperator)
        error, size = self.gradient_error(reaches[0])
        h = Fraction(self.h)
        return h * error + 3 * U * (reaches[0] + h * size) + 2 * self.op.entries * TINY

    def certified(self, certify: Certify) -> Primitive:
        sigma, op = self.exact_sigma(), certify(self.op)
        h = step_size(op.norm) if self.follows else self.h
        if not h / 2 <= self.h <= 2 * h:
            raise ValueError(
                f"its step is {self.h:.4g}, and the certified norm of its weight gives {h:.4g}; is a hook between the "
                "weight and the layer?"
            )
        return Descent(op, float64(self.bias), sigma, h)

    @property
    def how(self) -> str:
        norm = f" against a certified norm of {self.op.norm:.6g}" if isinstance(self.op, CertifiedOperator) else ""
        return f"h = {self.h:.6g}{norm}"


def step_size(norm: float) -> float:
    """The greatest float64 h with h·norm² ≤ 2; 0 if the norm is 0, or so small or large that h is out of range."""
    if norm == 0:
        return 0.0
    h = Fraction(2) / Fraction(norm) ** 2
    return down(h) if TINY <= h < 2**1000 else 0.0


@dataclass(frozen=True, eq=False)
class LiveProximal(Convex):
    """The z with z + h∇f(z) = x, up to a fraction `unsolved` of ‖x - z‖, or its reflection 2z - x. L = 1.

    `solve` is the solver of training; freezing replaces it by the gradient steps of `Proximal`.

    As I + h∇f is 1-strongly monotone, ‖x - z‖ = h‖∇f(z)‖ ≤ h‖∇f(x)‖. The number of iterations was chosen for hℓ =
    `planned`; for larger hℓ their rate is unknown.
    """

    kind = "proximal, live"
    h: float
    reflect: bool
    solve: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
    planned: float
    unsolved: float

    def run(self, *xs: Tensor) -> Tensor:
        z = self.solve(self.gradient, xs[0])
        return 2 * z - xs[0] if self.reflect else z

    def lipschitz(self, norm: Norm, *distances: Fraction) -> Fraction:
        return distances[0]

    def tolerance(self, norm: Norm, *reaches: float) -> float:
        if math.isinf(reaches[0]) or Fraction(self.h) * self.smoothness(norm) > Fraction(self.planned):
            return math.inf
        left = mul_up(self.unsolved, up(Fraction(self.h) * self.gradient_bound(norm, Fraction(reaches[0]))))
        return 2 * left if self.reflect else left

    def gradient_bound(self, norm: Norm, reach: Fraction) -> Fraction:
        """At least ‖∇f(x)‖ for ‖x‖ ≤ reach: ‖W‖·min(s‖W‖·reach + ‖σ(b)‖, √m·sup|σ|)."""
        at_origin = self.sigma.function(add_bias(self.op(self.op.weight.new_zeros(1, *self.op.in_shape)), self.bias))
        w, units = Fraction(norm(self.op)), Fraction(math.prod(self.op.out_shape))
        linear = Fraction(self.sigma.high) * w * reach + Fraction(norm_up(at_origin))
        if math.isfinite(self.sigma.sup):
            linear = min(linear, sqrt_up(units) * Fraction(self.sigma.sup))
        return w * linear

    def certified(self, certify: Certify) -> Primitive:
        """Gradient steps of size τ = 2/(2 + hℓ), rounded down, until at most UNSOLVED of ‖x - z*‖ is left."""
        sigma, op = self.exact_sigma(), certify(self.op)
        tau = down(2 / (2 + Fraction(self.h) * Fraction(op.norm) ** 2))
        iterations = max(1, math.ceil(math.log(UNSOLVED) / math.log1p(-tau))) if tau < 1 else 1
        if iterations > MAX_STEPS:
            raise ValueError(
                f"h‖W‖² = {self.h * op.norm**2:.3g} takes {iterations} steps to solve, more than {MAX_STEPS}; "
                "use a smaller h"
            )
        return Proximal(op, float64(self.bias), sigma, self.h, tau, iterations, self.reflect)


@dataclass(frozen=True, eq=False)
class Proximal(Convex):
    """The z with z + h∇f(z) = x, by n gradient steps of size τ from z = x, or its reflection 2z - x.

    With τ(2 + hℓ) ≤ 2, a step is (1 - τ)-Lipschitz in z and τ-Lipschitz in x. With ρ = 1 - τ, z after n steps has the
    constant ρⁿ + τ(1 + ρ + … + ρⁿ⁻¹) = 1: it is exactly 1-Lipschitz for any n. Its reflection is 1-Lipschitz up to the
    unsolved part, 2ρⁿ‖x - z*‖ ≤ 2ρⁿ·h‖∇f(x)‖, which counts as an error.
    """

    kind = "proximal"
    h: float
    tau: float
    iterations: int
    reflect: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = type(self.iterations) is int and 1 <= self.iterations <= MAX_STEPS
        require(steps and TINY <= self.h < math.inf and TINY <= self.tau <= 1 and type(self.reflect) is bool, self)

    def run(self, *xs: Tensor) -> Tensor:
        (x,) = xs
        z = x
        for _ in range(self.iterations):
            z = z - self.tau * ((z - x) + self.h * self.gradient(z))
        return 2 * z - x if self.reflect else z

    def lipschitz(self, norm: Norm, *distances: Fraction) -> Fraction:
        if Fraction(self.tau) * (2 + Fraction(self.h) * self.smoothness(norm)) > 2:
            raise ValueError(f"a proximal step of τ = {self.tau} does not contract for a norm of {norm(self.op)}")
        return distances[0]

    def rounding(self, entries: int, *reaches: Fraction) -> Fraction:
        """Each step has a new error of at most λ and multiplies the earlier ones by 1 - τ: at most λ/τ in all.

        Iterates have norms of at most reach + 2h‖W‖‖b‖; twice that is used, for their errors.
        """
        assert isinstance(self.op, CertifiedOperator)
        norm, h, tau = Fraction(self.op.norm), Fraction(self.h), Fraction(self.tau)
        bias, (reach,) = bias_norm(self.op, self.bias), reaches
        within = 2 * (reach + 2 * h * norm * bias)
        error, size = self.gradient_error(within)
        step = tau * h * error + gamma(6) * (3 * within + h * size) + 8 * self.op.entries * TINY * (1 + h)
        total = step / tau
        if total > within / 2:
            raise ValueError("the rounding error of this proximal layer is as large as its output; reduce h")
        if not self.reflect:
            return total
        left = Fraction(up((1 - tau) ** self.iterations)) * h * norm * (norm * reach + bias)
        return 2 * total + 2 * left + 2 * U * (2 * within + reach)

    @property
    def how(self) -> str:
        return f"{self.iterations} steps that contract by {1 - self.tau:.4g}"
