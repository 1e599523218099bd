"""The vector field F of a flow dx/dt = F(x).

The paper's fields are F(x) = -∇f(x) + Ax, with f convex and A skew-symmetric. Along their flows, the distance of two
points never grows (Meunier et al. 2022, Corollary 1).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lipflow.flows.cache import Cache
from lipflow.flows.scale import Scale
from lipflow.flows.weight import ConvWeight, Weight, new_bias
from lipflow.operators import ConvOperator, LinearOperator
from lipflow.operators.norm import two_over
from lipflow.operators.operator import add_bias
from lipflow.primitives import NONLINEARITIES, Nonlinearity, Norm
from lipflow.primitives.nonlinearity import name_of
from lipflow.rounding import mul_up
from lipflow.shapes import Shape

Parts = tuple[LinearOperator, Tensor | None, Nonlinearity]  # W, b and σ of ∇f(x) = Wᵀσ(Wx + b)


class Convex(nn.Module, ABC):
    """The field -∇f of a convex potential f."""

    @abstractmethod
    def gradient(self, x: Tensor) -> Tensor:
        """∇f(x)."""

    @abstractmethod
    def smoothness_estimate(self, shape: Shape | None, iterations: int = 1) -> Tensor:
        """ℓ̂, an estimate from below of the Lipschitz constant of ∇f, differentiable; see `Weight.estimate`."""

    @abstractmethod
    def smoothness(self, shape: Shape | None, norm: Norm) -> float:
        """ℓ, the Lipschitz constant of ∇f on inputs of a shape: a bound if `norm` is `lipflow.norm_bound`."""

    def parts(self, x: Tensor) -> Parts | None:
        """W, b and σ on inputs like x, if ∇f(x) = Wᵀσ(Wx + b): then a step can run in certified arithmetic."""
        return None

    def step_size(self, shape: Shape | None) -> Tensor:
        """h = 2/ℓ̂."""
        return two_over(self.smoothness_estimate(shape))

    def forward(self, x: Tensor) -> Tensor:
        """F(x) = -∇f(x)."""
        return -self.gradient(x)


class ConvexPotential(Convex):
    """The field -∇f with f(x) = Σ φ(wᵢ·x + bᵢ), so ∇f(x) = Wᵀσ(Wx + b) with σ = φ'.

    f is convex because σ is non-decreasing, and s‖W‖²-smooth because the slopes of σ are in [0, s] (Meunier et al.
    2022, section 4.1).
    """

    def __init__(self, weight: Weight, sigma: str | Nonlinearity = "relu", bias: bool = True) -> None:
        super().__init__()
        self.weight, self.sigma = weight, monotone(sigma)
        self.bias = new_bias(weight.channels[1], weight.weight[0].numel()) if bias else None

    def gradient(self, x: Tensor) -> Tensor:
        """Wᵀσ(Wx + b)."""
        W = self.weight(x)
        return W.adjoint(self.sigma.function(add_bias(W(x), self.bias)))

    def smoothness_estimate(self, shape: Shape | None, iterations: int = 1) -> Tensor:
        """s‖Wu‖² for the unit vector u of the weight."""
        return self.sigma.high * self.weight.estimate(self.weight.operator(shape), iterations) ** 2

    def smoothness(self, shape: Shape | None, norm: Norm) -> float:
        """s‖W‖²."""
        length = float(norm(self.weight.operator(shape)))
        return mul_up(self.sigma.high, mul_up(length, length))

    def parts(self, x: Tensor) -> Parts | None:
        return self.weight(x), self.bias, self.sigma

    def extra_repr(self) -> str:
        return f"sigma={name_of(self.sigma)}, bias={self.bias is not None}"


class Potential(Convex):
    """The field -∇f of any convex f: `gradient` is a module that computes ∇f, and `smoothness` bounds its constant.

    Proposition 3 of the paper. It is not checked that f is convex and that ∇f is `smoothness`-Lipschitz.
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
    """The field F(x) = Ax with A = (M - Mᵀ)/2, so Aᵀ = -A: its flow e^{tA} is orthogonal.

    For a convolution M, Mᵀ has the kernel of M with its channels transposed and its taps reversed. So M must have as
    many output channels as input channels, a kernel of odd size, and padding "same". A is multiplied by the `scale`, if
    there is one: `ReshapedScale` for SOC.
    """

    def __init__(self, weight: Weight, scale: Scale | None = None) -> None:
        super().__init__()
        inputs, outputs = weight.channels
        if inputs != outputs:
            raise ValueError(f"a skew-symmetric map is square; this weight maps {inputs} to {outputs}")
        self.groups = 1
        if isinstance(weight, ConvWeight):
            _require_symmetric_window(weight)
            self.groups = weight.geometry["groups"]
        self.weight, self.scale, self.cache = weight, scale, Cache()
        if scale is not None:
            scale.begin(skew_kernel(weight.weight, self.groups))

    def operator(self, shape: Shape | None) -> LinearOperator:
        """A as an operator on inputs of a shape; None is the shape of u."""
        return self.skew(self.weight.operator(shape))

    def on(self, x: Tensor) -> LinearOperator:
        """A as an operator on the inputs x."""
        m = self.weight(x)
        return m.with_weight(self.cached(lambda: self.skew(m).weight, m))

    def skew(self, m: LinearOperator) -> LinearOperator:
        """A of M, scaled."""
        a = m.with_weight(skew_kernel(m.weight, self.groups))
        return a if self.scale is None else a.with_weight(a.weight * self.scale(a, self.weight))

    def cached(self, compute: Callable[[], Tensor], m: LinearOperator, *key: float) -> Tensor:
        """compute(), a function of A and of the key; cached in evaluation."""
        scale = () if self.scale is None else self.scale.parameters()
        return self.cache.transform(compute, m.weight, *scale, training=self.training, key=(m.in_shape, *key))

    def forward(self, x: Tensor) -> Tensor:
        """F(x) = Ax."""
        return self.on(x)(x)


class ConvexPlusSkew(nn.Module):
    """The field F(x) = -∇f(x) + Ax, for the step `Split`."""

    def __init__(self, convex: Convex, skew: Skew) -> None:
        super().__init__()
        self.convex, self.skew = convex, skew

    def forward(self, x: Tensor) -> Tensor:
        return self.convex(x) + self.skew(x)


Field = Convex | Skew | ConvexPlusSkew


def monotone(sigma: str | Nonlinearity) -> Nonlinearity:
    """σ, from a name or a Nonlinearity. Raise if it decreases somewhere, has unbounded slopes, or has parameters."""
    accepted = f"sigma is one of {', '.join(NONLINEARITIES)}, or a Nonlinearity with its slopes, not {sigma!r}"
    if isinstance(sigma, str):
        if sigma not in NONLINEARITIES:
            raise ValueError(accepted)
        return NONLINEARITIES[sigma]
    if not isinstance(sigma, Nonlinearity):
        raise TypeError(accepted)
    if _has_parameters(sigma):
        raise ValueError(f"σ = {sigma.function} has parameters, which a Convex Potential Layer would not train")
    if not 0 <= sigma.low <= sigma.high < math.inf or sigma.high == 0:
        raise ValueError(
            f"a convex potential needs a σ with slopes in [0, s], 0 < s < ∞, not [{sigma.low}, {sigma.high}]: "
            "where σ decreases, its potential is not convex"
        )
    return sigma


def _has_parameters(sigma: Nonlinearity) -> bool:
    if isinstance(sigma.function, nn.Module):
        return any(p.requires_grad for p in sigma.function.parameters())
    with torch.enable_grad():
        return sigma.function(torch.zeros(())).requires_grad


def skew_kernel(weight: Tensor, groups: int) -> Tensor:
    """(M - Mᵀ)/2 of a matrix or of a kernel."""
    if weight.ndim == 2:
        return (weight - weight.T) / 2
    blocks = weight.unflatten(0, (groups, -1))
    return (weight - blocks.transpose(1, 2).flip(3, 4).reshape(weight.shape)) / 2


def _require_symmetric_window(weight: ConvWeight) -> None:
    height, width = weight.weight.shape[2:]
    large = (8 * height, 8 * width)  # whether a window is centred does not depend on the size of the image
    op = ConvOperator(weight.weight, large, **weight.geometry)
    for axis in (op.rows, op.columns):
        if axis.kernel % 2 == 0:
            raise ValueError(f"a skew-symmetric convolution needs an odd kernel, not {height}×{width}")
        if not axis.is_centred:
            raise ValueError("a skew-symmetric convolution keeps the image size: use stride 1 and padding 'same'")
