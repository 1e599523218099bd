"""What moves: the vector field F of a flow dx/dt = F(x).

The paper's fields are F(x) = -∇f(x) + Ax, with f convex and A skew-symmetric; their flows never separate two
points (Meunier et al. 2022, Corollary 1).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lipflow.fast.descent import shift, two_over
from lipflow.flows.cache import Cache
from lipflow.flows.scale import Scale
from lipflow.flows.weight import ConvWeight, Weight
from lipflow.operators import ConvOperator, LinearOperator
from lipflow.primitives import NONLINEARITIES, Nonlinearity, Norm
from lipflow.primitives.nonlinearity import name_of
from lipflow.rounding import mul_up
from lipflow.shapes import Shape


class Parts(NamedTuple):
    """W, b and σ of a potential with ∇f(x) = Wᵀσ(Wx + b)."""

    op: LinearOperator
    bias: Tensor | None
    sigma: Nonlinearity


class Convex(nn.Module, ABC):
    """The field -∇f of a convex potential f."""

    @abstractmethod
    def gradient(self, x: Tensor) -> Tensor:
        """∇f(x)."""

    @abstractmethod
    def smoothness_estimate(self, shape: Shape | None, iterations: int = 1) -> Tensor:
        """The Lipschitz constant of ∇f, from below, differentiable; see `Weight.estimate`."""

    @abstractmethod
    def smoothness(self, shape: Shape | None, norm: Norm) -> float:
        """The Lipschitz constant of ∇f on inputs of a shape, with `norm` for the norms of operators: from above for
        `lipflow.norm_bound`."""

    def parts(self, x: Tensor) -> Parts | None:
        """W, b and σ on inputs like x, if ∇f(x) = Wᵀσ(Wx + b): such steps can run in certified arithmetic."""
        return None

    def step_size(self, shape: Shape | None) -> Tensor:
        """2/ℓ̂, with the estimated smoothness ℓ̂."""
        return two_over(self.smoothness_estimate(shape))

    def current_gradient(self) -> Callable[[Tensor], Tensor]:
        """∇f with the numbers that it has now: `functional_call` may have put them in for a while."""
        held = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return lambda z: -functional_call(self, held, (z,))

    def forward(self, x: Tensor) -> Tensor:
        """F(x) = -∇f(x)."""
        return -self.gradient(x)


class ConvexPotential(Convex):
    """The field -∇f with f(x) = Σ φ(wᵢ·x + bᵢ), so ∇f(x) = Wᵀσ(Wx + b) with σ = φ'.

    f is convex as σ does not decrease, and s‖W‖²-smooth as σ has slopes in [0, s] (Meunier et al. 2022, section 4.1).
    """

    def __init__(self, weight: Weight, sigma: str | Nonlinearity = "relu", bias: bool = True) -> None:
        super().__init__()
        self.weight, self.sigma = weight, monotone(sigma)
        fan_in = math.prod(weight.weight.shape[1:])
        rows = weight.channels[1]
        self.bias = nn.Parameter(torch.empty(rows).uniform_(-1, 1) / math.sqrt(fan_in)) if bias else None

    def gradient(self, x: Tensor) -> Tensor:
        """Wᵀσ(Wx + b)."""
        op = self.weight(x)
        return op.adjoint(self.sigma.function(shift(op(x), self.bias)))

    def smoothness_estimate(self, shape: Shape | None, iterations: int = 1) -> Tensor:
        """s‖Wu‖²."""
        return self.sigma.high * self.weight.estimate(self.weight.operator(shape), iterations) ** 2

    def smoothness(self, shape: Shape | None, norm: Norm) -> float:
        length = float(norm(self.weight.operator(shape)))
        return mul_up(self.sigma.high, mul_up(length, length))

    def parts(self, x: Tensor) -> Parts | None:
        return Parts(self.weight(x), self.bias, self.sigma)

    def extra_repr(self) -> str:
        return f"sigma={name_of(self.sigma)}, bias={self.bias is not None}"


class Potential(Convex):
    """The field -∇f of any convex f, given as a module that computes ∇f, and its smoothness (Proposition 3).

    That f is convex and `smoothness`-smooth is taken on your word.
    """

    def __init__(self, gradient: nn.Module, smoothness: float) -> None:
        super().__init__()
        if not (math.isfinite(smoothness) and smoothness >= 0):
            raise ValueError(f"the smoothness of a potential is a finite number of at least 0, not {smoothness}")
        self.module, self.declared = gradient, float(smoothness)

    def gradient(self, x: Tensor) -> Tensor:
        return self.module(x)

    def smoothness_estimate(self, shape: Shape | None, iterations: int = 1) -> Tensor:
        return torch.tensor(self.declared, dtype=torch.float64)

    def smoothness(self, shape: Shape | None, norm: Norm) -> float:
        return self.declared

    def extra_repr(self) -> str:
        return f"smoothness={self.declared}"


class Skew(nn.Module):
    """The field F(x) = Ax with A = (M - Mᵀ)/2, so Aᵀ = -A: it turns, and neither stretches nor shrinks.

    For a convolution the adjoint's kernel is M with its channels transposed and its taps reversed, so M must be
    square in channels, of odd size, and padded evenly. With a `scale`, A is multiplied by it: `ReshapedScale` for SOC.
    """

    def __init__(self, weight: Weight, scale: Scale | None = None) -> None:
        super().__init__()
        into, out = weight.channels
        if into != out:
            raise ValueError(f"a skew-symmetric map is square; this weight maps {into} to {out}")
        if isinstance(weight, ConvWeight):
            _require_symmetric_window(weight)
        self.weight, self.scale, self.cache = weight, scale, Cache()
        if scale is not None:
            scale.begin(skew_kernel(weight.weight, groups_of(weight)))

    def operator(self, shape: Shape | None) -> LinearOperator:
        """A as an operator on inputs of a shape, or of the shape last seen."""
        return self.skew(self.weight.operator(shape))

    def on(self, x: Tensor) -> LinearOperator:
        """A as an operator on the inputs x, whose shape it takes up."""
        m = self.weight(x)
        return m.with_weight(self.cached(lambda: self.skew(m).weight, m))

    def skew(self, m: LinearOperator) -> LinearOperator:
        """A of M, scaled."""
        a = skew_part(m)
        return a if self.scale is None else a.with_weight(a.weight * self.scale(a, self.weight))

    def cached(self, compute: Callable[[], Tensor], m: LinearOperator, *key: float) -> Tensor:
        """compute(), a function of A, made of M, and of the key alone: once in evaluation."""
        if self.training:
            return compute()
        scale = () if self.scale is None else self.scale.parameters()
        return self.cache.transform(compute, m.weight, *scale, key=(m.in_shape, *key))

    def forward(self, x: Tensor) -> Tensor:
        """F(x) = Ax."""
        return self.on(x)(x)


class ConvexPlusSkew(nn.Module):
    """The field F(x) = -∇f(x) + Ax, for `Split` to step through in two parts."""

    def __init__(self, convex: Convex, skew: Skew) -> None:
        super().__init__()
        self.convex, self.skew = convex, skew

    def forward(self, x: Tensor) -> Tensor:
        return self.convex(x) + self.skew(x)


Field = Convex | Skew | ConvexPlusSkew


def monotone(sigma: str | Nonlinearity) -> Nonlinearity:
    """σ by name or as given; one that decreases somewhere, or has no finite slope, is refused."""
    takes = f"sigma is one of {', '.join(NONLINEARITIES)}, or a Nonlinearity with its slopes, not {sigma!r}"
    if isinstance(sigma, str):
        if sigma not in NONLINEARITIES:
            raise ValueError(takes)
        return NONLINEARITIES[sigma]
    if not isinstance(sigma, Nonlinearity):
        raise TypeError(takes)
    if _learns(sigma):
        raise ValueError("σ has parameters of its own, which a Convex Potential Layer would not train")
    if not 0 <= sigma.low <= sigma.high < math.inf or sigma.high == 0:
        raise ValueError(
            f"a convex potential needs a σ with slopes in [0, s], 0 < s < ∞, not [{sigma.low}, {sigma.high}]: "
            "where σ decreases, its potential is not convex"
        )
    return sigma


def _learns(sigma: Nonlinearity) -> bool:
    if isinstance(sigma.function, nn.Module):
        return any(p.requires_grad for p in sigma.function.parameters())
    with torch.enable_grad():
        return sigma.function(torch.zeros(())).requires_grad


def skew_part(op: LinearOperator) -> LinearOperator:
    """A = (M - Mᵀ)/2 of a square operator M."""
    return op.with_weight(skew_kernel(op.weight, op.groups if isinstance(op, ConvOperator) else 1))


def skew_kernel(weight: Tensor, groups: int = 1) -> Tensor:
    """(M - Mᵀ)/2 of a matrix, or of a kernel, whose adjoint has its channels transposed and its taps reversed."""
    if weight.ndim == 2:
        return (weight - weight.T) / 2
    blocks = weight.unflatten(0, (groups, -1))
    return (weight - blocks.transpose(1, 2).flip(3, 4).reshape(weight.shape)) / 2


def groups_of(weight: Weight) -> int:
    """The groups of a convolution; a matrix is one."""
    return weight.geometry["groups"] if isinstance(weight, ConvWeight) else 1


def _require_symmetric_window(weight: ConvWeight) -> None:
    height, width = weight.weight.shape[2:]
    op = ConvOperator(weight.weight, (height * 8, width * 8), **weight.geometry)
    for axis in (op.rows, op.columns):
        if axis.kernel % 2 == 0:
            raise ValueError(
                f"a skew-symmetric convolution needs an odd kernel, not {height}×{width}: an even one has no middle"
            )
        if axis.stride != 1 or axis.before != axis.after or 2 * axis.before != axis.extent - 1:
            raise ValueError("a skew-symmetric convolution keeps the size: stride 1 and padding 'same'")
