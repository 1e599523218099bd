"""The primitive operations of a frozen network: what each computes, its constant, and its rounding error.

Each primitive is an exact map, defined by the numbers it stores, and L = `lipschitz` bounds its Lipschitz constant.
The program that runs it differs from it by at most `error(X)` in norm, on every computed input of norm at most X;
derivations are in docs/soundness.md and, for `Spectral`, in docs/soundness-spectral.md. `lipflow.check` knows the same
list, and nothing else.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from lipflow.bound import Shape
from lipflow.frozen.linear import Map
from lipflow.frozen.mirror import Mean, Mirror
from lipflow.frozen.operation import Primitive, require
from lipflow.frozen.rearrange import Flatten, GroupSort, MaxPool, PadChannels, Pointwise, SpaceToDepth, Truncate
from lipflow.frozen.spectral import Spectral
from lipflow.operators import Dense
from lipflow.rounding import TINY, U, gamma, in_range, norm_up, sqrt_up, up

# Exact in floating point, fixing 0, with slopes in [0, 1].
SIGMA: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "hardtanh": F.hardtanh}
MOST_STEPS, MOST_TERMS = 10_000, 1000  # a layer that needs more is too stiff to run, and refused by both programs


@dataclass(frozen=True, eq=False)
class Affine(Primitive):
    """Wx + b."""

    kind = "affine"
    map: Map
    bias: Tensor

    def fits(self, shape: Shape) -> bool:
        return shape == self.map.op.in_shape and self.bias.shape == (self.map.op.out_shape[0],)

    def __call__(self, x: Tensor) -> Tensor:
        return _add(self.map(x), self.bias)

    @property
    def lipschitz(self) -> float:
        return self.map.norm

    def error(self, reach: Fraction, entries: int) -> Fraction:
        """The product, and one addition of b, counted in γ."""
        dot = self.map.dots[0] + 1
        computed = Fraction(self.map.spread) * reach + _bias_norm(self.map, self.bias)
        return in_range(gamma(dot) * computed + dot * self.map.entries * TINY)

    @property
    def how(self) -> str:
        return "certified norm"

    @property
    def shape(self) -> str:
        return _shape(self.map)


@dataclass(frozen=True, eq=False)
class Descent(Primitive):
    """x - h·Wᵀσ(Wx + b): the Convex Potential Layer. L = max(1, h‖W‖² - 1), as σ has slopes in [0, 1]."""

    kind = "descent"
    map: Map
    bias: Tensor
    h: float
    name: str

    def __post_init__(self) -> None:
        require(self.name in SIGMA and (self.h == 0 or TINY <= self.h < math.inf), self)

    def fits(self, shape: Shape) -> bool:
        return shape == self.map.op.in_shape and self.bias.shape == (self.map.op.out_shape[0],)

    def __call__(self, x: Tensor) -> Tensor:
        inner = SIGMA[self.name](_add(self.map(x), self.bias))
        return torch.add(x, self.map.adjoint(inner), alpha=-self.h)

    @property
    def lipschitz(self) -> float:
        return up(max(Fraction(1), Fraction(self.h) * Fraction(self.map.norm) ** 2 - 1))

    def error(self, reach: Fraction, entries: int) -> Fraction:
        """e on Wx + b passes σ (slopes at most 1) and Wᵀ, whose own rounding joins it; then h·t and x - h·t round."""
        norm, h, bias = Fraction(self.map.norm), Fraction(self.h), _bias_norm(self.map, self.bias)
        e = Affine(self.map, self.bias).error(reach, entries)
        inner = norm * reach + bias + e
        wrong = self.map.adjoint_error(inner)
        turned = norm * inner + wrong
        return h * (norm * e + wrong) + 3 * U * (reach + h * turned) + 2 * self.map.entries * TINY

    @property
    def how(self) -> str:
        return f"h = {self.h:.6g} against a certified norm of {self.map.norm:.6g}"

    @property
    def shape(self) -> str:
        return _shape(self.map)


@dataclass(frozen=True, eq=False)
class Proximal(Primitive):
    """z + h∇f(z) = x, ∇f(z) = Wᵀσ(Wz + b), by n gradient steps of size τ from z = x; or its reflection 2z - x.

    With ℓ = h‖W‖² and τ(2 + ℓ) ≤ 2, a step contracts in z by ρ = 1 - τ and moves by τ with x, so that after any number
    of them z has the constant ρⁿ + τ(1 + ρ + … + ρⁿ⁻¹) = 1: a proximal layer cut short is still exactly 1-Lipschitz.
    Its reflection is so up to what is left unsolved, 2ρⁿ‖x - z*‖ ≤ 2ρⁿ·h‖∇f(x)‖, which counts as an error.
    """

    kind = "proximal"
    map: Map
    bias: Tensor
    h: float
    name: str
    tau: float
    iterations: int
    reflect: bool

    def __post_init__(self) -> None:
        steps = TINY <= self.h < math.inf and TINY <= self.tau <= 1 and 1 <= self.iterations <= MOST_STEPS
        require(self.name in SIGMA and steps, self)

    def fits(self, shape: Shape) -> bool:
        return shape == self.map.op.in_shape and self.bias.shape == (self.map.op.out_shape[0],)

    def __call__(self, x: Tensor) -> Tensor:
        z = x
        for _ in range(self.iterations):
            inner = SIGMA[self.name](_add(self.map(z), self.bias))
            z = z - self.tau * ((z - x) + self.h * self.map.adjoint(inner))
        return 2 * z - x if self.reflect else z

    @property
    def lipschitz(self) -> float:
        if Fraction(self.tau) * (2 + Fraction(self.h) * Fraction(self.map.norm) ** 2) > 2:
            raise ValueError(f"a proximal step of τ = {self.tau} does not contract for a norm of {self.map.norm}")
        return 1.0

    def error(self, reach: Fraction, entries: int) -> Fraction:
        """A step errs by λ, and errors contract: λ/τ in all. Iterates stay within X + 2h‖W‖‖b‖; we allow twice that."""
        norm, h, tau = Fraction(self.map.norm), Fraction(self.h), Fraction(self.tau)
        bias = _bias_norm(self.map, self.bias)
        within = 2 * (reach + 2 * h * norm * bias)
        e = Affine(self.map, self.bias).error(within, entries)
        inner = norm * within + bias + e
        wrong = self.map.adjoint_error(inner)
        slope = 2 * within + h * (norm * inner + wrong)
        step = tau * h * (norm * e + wrong) + gamma(6) * (within + slope) + 8 * self.map.entries * TINY * (1 + h)
        total = step / tau
        if total > within / 2:
            raise ValueError("the rounding of this proximal layer outgrows what it computes; use a smaller step h")
        if not self.reflect:
            return total
        left = Fraction(up((1 - tau) ** self.iterations)) * h * norm * (norm * reach + bias)
        return 2 * total + 2 * left + 2 * U * (2 * within + reach)

    @property
    def how(self) -> str:
        return f"{self.iterations} steps that contract by {1 - self.tau:.4g}"

    @property
    def shape(self) -> str:
        return _shape(self.map)


@dataclass(frozen=True, eq=False)
class Series(Primitive):
    """Σ_{j<k} (hA)ʲ/j! · x with A skew-symmetric: SOC. L = 1 + (ha)ᵏ/k!."""

    kind = "series"
    map: Map
    h: float
    terms: int

    def __post_init__(self) -> None:
        require(1000 * TINY <= self.h < math.inf and 1 <= self.terms <= MOST_TERMS and is_skew(self.map), self)

    def fits(self, shape: Shape) -> bool:
        return shape == self.map.op.in_shape

    def __call__(self, x: Tensor) -> Tensor:
        total = term = x
        for j in range(1, self.terms):
            term = self.map(term) * (self.h / j)
            total = total + term
        return total

    @property
    def lipschitz(self) -> float:
        angle, power = Fraction(self.h) * Fraction(self.map.norm), Fraction(1)
        for j in range(1, self.terms + 1):
            power = power * angle / j
        return up(1 + power)

    def error(self, reach: Fraction, entries: int) -> Fraction:
        """Term by term: an error e of the last becomes (h/j)(ae + product error), and h/j and the product round."""
        a, h = Fraction(self.map.norm), Fraction(self.h)
        size, wrong, total, sums = reach, Fraction(0), Fraction(0), reach
        for j in range(1, self.terms):
            scale = h / j
            computed = size + wrong
            wrong = scale * (a * wrong + self.map.apply_error(computed))
            size = scale * a * size
            wrong += 4 * U * (size + wrong) + self.map.entries * TINY
            sums += size + wrong
            total += wrong + U * sums * (1 + 2 * U) ** self.terms
        return total

    @property
    def how(self) -> str:
        return f"{self.terms} terms, h‖A‖ = {self.h * self.map.norm:.6g}"

    @property
    def shape(self) -> str:
        return _shape(self.map)


@dataclass(frozen=True, eq=False)
class Center(Primitive):
    """(x - mean)·scale for each channel. L = max(scale)."""

    kind = "center"
    mean: Tensor
    scale: Tensor

    def fits(self, shape: Shape) -> bool:
        return len(shape) >= 1 and self.mean.shape == self.scale.shape == (shape[0],)

    def __call__(self, x: Tensor) -> Tensor:
        shape = (-1, *[1] * (x.ndim - 2))
        return (x - self.mean.reshape(shape)) * self.scale.reshape(shape)

    @property
    def lipschitz(self) -> float:
        return float(self.scale.abs().max())

    def error(self, reach: Fraction, entries: int) -> Fraction:
        away = reach + Fraction(norm_up(self.mean)) * sqrt_up(Fraction(entries // len(self.mean)))
        return gamma(2) * Fraction(self.lipschitz) * away + 2 * entries * TINY * (1 + Fraction(self.lipschitz))

    @property
    def how(self) -> str:
        return "greatest scale"


@dataclass(frozen=True, eq=False)
class Householder(Primitive):
    """x - 2v·relu(v·x) on the pairs (i, i + C/2), with stored v = (-sine, cosine). L = max(1, 2‖v‖² - 1)."""

    kind = "householder"
    sine: Tensor
    cosine: Tensor

    def fits(self, shape: Shape) -> bool:
        return len(shape) >= 1 and self.sine.ndim == 1 and self.sine.shape == self.cosine.shape == (shape[0] / 2,)

    def __call__(self, x: Tensor) -> Tensor:
        first, second = x.unflatten(1, (2, -1)).unbind(1)
        sine, cosine = (t.reshape(-1, *[1] * (x.ndim - 2)) for t in (self.sine, self.cosine))
        across = torch.relu(cosine * second - sine * first)
        return torch.cat([first + 2 * sine * across, second - 2 * cosine * across], 1)

    @cached_property
    def square(self) -> Fraction:
        """At least ‖v‖², the greatest over the pairs."""
        pairs = zip(self.sine.tolist(), self.cosine.tolist(), strict=True)
        return max(Fraction(s) ** 2 + Fraction(c) ** 2 for s, c in pairs)

    @property
    def lipschitz(self) -> float:
        return up(max(Fraction(1), 2 * self.square - 1))

    def error(self, reach: Fraction, entries: int) -> Fraction:
        """v·x rounds by γ₂‖v‖‖x‖; its product with v and the last sum by 3 more, of at most (1 + 2‖v‖²)‖x‖."""
        size = (1 + 2 * self.square) * reach
        return (gamma(2) * 2 * self.square + gamma(4)) * size + 8 * entries * TINY * (1 + 2 * self.square)

    @property
    def how(self) -> str:
        return "2‖v‖² - 1 of the stored directions"


@dataclass(frozen=True, eq=False)
class AvgPool(Primitive):
    """The sum over each k × k window, divided by k: its rows are orthonormal and positive."""

    kind = "avg_pool"
    size: int

    def fits(self, shape: Shape) -> bool:
        return len(shape) == 3 and 1 <= self.size <= min(shape[1:])

    def __call__(self, x: Tensor) -> Tensor:
        k, (height, width) = self.size, x.shape[2:]
        x = x[:, :, : height // k * k, : width // k * k]
        return x.unflatten(3, (-1, k)).unflatten(2, (-1, k)).sum((3, 5)) / k

    def error(self, reach: Fraction, entries: int) -> Fraction:
        """k² - 1 additions and a division: γ_{k²} of ‖P|x|‖ ≤ ‖x‖."""
        return gamma(self.size**2) * reach + entries * TINY


PRIMITIVES: dict[str, type[Primitive]] = {
    p.kind: p
    for p in (
        Affine,
        Descent,
        Proximal,
        Series,
        Spectral,
        Center,
        Pointwise,
        GroupSort,
        Householder,
        PadChannels,
        AvgPool,
        MaxPool,
        SpaceToDepth,
        Flatten,
        Truncate,
        Mirror,
        Mean,
    )
}


def is_skew(w: Map) -> bool:
    """Whether the stored weights are skew-symmetric to the last bit."""
    if isinstance(w.op, Dense):
        return w.weight.shape[0] == w.weight.shape[1] and torch.equal(w.weight, -w.weight.T)
    out, grouped, height, width = w.weight.shape
    middles = all(a.stride == 1 and 2 * a.before == 2 * a.after == a.extent - 1 for a in (w.op.rows, w.op.columns))
    blocks = w.weight.reshape(w.op.groups, out // w.op.groups, grouped, height, width)
    return middles and out == grouped * w.op.groups and torch.equal(blocks, -blocks.transpose(1, 2).flip(3, 4))


def _add(y: Tensor, bias: Tensor) -> Tensor:
    """y + b along the second axis."""
    return y + bias.reshape(-1, *[1] * (y.ndim - 2))


def _bias_norm(w: Map, bias: Tensor) -> Fraction:
    """At least the norm of b over all outputs."""
    copies = sqrt_up(Fraction(torch.Size(w.op.out_shape).numel() // len(bias)))
    return Fraction(norm_up(bias)) * copies


def _shape(w: Map) -> str:
    def text(shape: Shape) -> str:
        return "×".join(map(str, shape))

    return f"{text(w.op.in_shape)} → {text(w.op.out_shape)}"
