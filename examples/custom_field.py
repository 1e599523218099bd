"""Fields and a step of your own: their declared pair (L, ε), compared with ratios of distances of pairs of points.

    python examples/custom_field.py

`SmoothVariation` is a gradient for `lipflow.Potential`, with a given smoothness. `LogSumExp` is a learned field; its
smoothness depends on its weights. `Strang` is a step in three parts. Each field works with every step of the table, and
each step with every field that it does not refuse.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import lipflow
from lipflow import ExplicitEuler, Flow, ImplicitEuler, Midpoint
from lipflow.flows import Convex, DenseWeight, Field, Step
from lipflow.node import Node
from lipflow.primitives import Norm
from lipflow.rounding import mul_up
from lipflow.shapes import Shape


class SmoothVariation(nn.Module):
    """∇f for f(x) = Σ √(δ² + (xᵢ₊₁ - xᵢ)²), a smooth total variation: Dᵀψ(Dx) with ψ(t) = t/√(δ² + t²).

    ψ has slopes in [0, 1/δ] and ‖D‖ ≤ 2, as |xᵢ₊₁ - xᵢ|² ≤ 2|xᵢ₊₁|² + 2|xᵢ|². So f is convex and 4/δ-smooth.
    """

    def __init__(self, delta: float) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, x: Tensor) -> Tensor:
        difference = x.diff(dim=1)
        slope = difference / torch.sqrt(self.delta**2 + difference**2)
        return nn.functional.pad(slope, (1, 0)) - nn.functional.pad(slope, (0, 1))


class LogSumExp(Convex):
    """The field -∇f of f(x) = log Σ exp(wᵢ·x + bᵢ), a soft maximum of planes: ∇f(x) = Wᵀ softmax(Wx + b).

    ∇²f = Wᵀ(diag(p) - ppᵀ)W, and 0 ⪯ diag(p) - ppᵀ ⪯ ½ for probabilities p: f is convex and ½‖W‖²-smooth.
    W is a matrix. With a convolution, each position would have its own p.
    """

    def __init__(self, weight: DenseWeight) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(weight.channels[1]))

    def gradient(self, x: Tensor) -> Tensor:
        op = self.weight(x)
        return op.adjoint(torch.softmax(op(x) + self.bias, 1))

    def smoothness_estimate(self, shape: Shape | None, iterations: int = 1) -> Tensor:
        """An estimate from below, differentiable, for training."""
        return self.weight.estimate(self.weight.operator(shape), iterations) ** 2 / 2

    def smoothness(self, shape: Shape | None, norm: Norm) -> float:
        """½‖W‖² rounded up: a bound from above if `norm` is `lipflow.norm_bound`."""
        length = float(norm(self.weight.operator(shape)))
        return mul_up(0.5, mul_up(length, length))


@dataclass(frozen=True)
class Strang(Step):
    """A step through -∇f + Ax: a half step through Ax, a step through -∇f, a half step through Ax (Strang 1968).

    The constants multiply. It consists of lipflow's own steps, so `lipflow.freeze` accepts it.
    """

    convex_step: Step
    half_step: Step

    def require(self, field: Field) -> None:
        if not isinstance(field, lipflow.ConvexPlusSkew):
            raise self.refusal(field, "Strang steps through a ConvexPlusSkew(convex, skew)")
        self.convex_step.require(field.convex)
        self.half_step.require(field.skew)

    def __call__(self, field: Field, x: Tensor) -> Tensor:
        assert isinstance(field, lipflow.ConvexPlusSkew)
        first = self.half_step(field.skew, x)
        return self.half_step(field.skew, self.convex_step(field.convex, first))

    def lower(self, field: Field, x: Node) -> Node:
        assert isinstance(field, lipflow.ConvexPlusSkew)
        first = self.half_step.lower(field.skew, x)
        return self.half_step.lower(field.skew, self.convex_step.lower(field.convex, first))


def largest_ratio(layer: nn.Module, tolerance: float, steps: int = 100) -> float:
    """The largest (‖layer(x) - layer(y)‖ - 2ε)/‖x - y‖ that gradient ascent finds: an estimate of L from below."""
    x = nn.functional.normalize(torch.randn(200, 8)) * 5
    y = x + torch.randn(200, 8)
    optimiser = torch.optim.Adam([x.requires_grad_(), y.detach_().requires_grad_()], 0.01)
    largest = 0.0
    for _ in range(steps):
        ratios = ((layer(x) - layer(y)).norm(dim=1) - 2 * tolerance) / (x - y).norm(dim=1)
        largest = max(largest, float(ratios.detach().max()))
        optimiser.zero_grad()
        ratios.sum().neg().backward()
        optimiser.step()
    return largest


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    variation = lipflow.Potential(SmoothVariation(delta=0.5), smoothness=4 / 0.5)
    learned = LogSumExp(DenseWeight(8, 32))
    both = lipflow.ConvexPlusSkew(learned, lipflow.Skew(DenseWeight(8, 8)))
    layers = {
        "SmoothVariation, ExplicitEuler": Flow(variation, ExplicitEuler()),
        "SmoothVariation, ExplicitEuler(0.5)": Flow(variation, ExplicitEuler(0.5)),
        "SmoothVariation, ImplicitEuler(2)": Flow(variation, ImplicitEuler(2.0)),
        "LogSumExp, ExplicitEuler": Flow(learned, ExplicitEuler()),
        "LogSumExp, Midpoint": Flow(learned, Midpoint()),
        "ConvexPlusSkew, Strang": Flow(both, Strang(ExplicitEuler(), Midpoint(0.5))),
    }
    print("layer                                declares L     ε        largest ratio found")
    for name, layer in layers.items():
        bound = lipflow.lipschitz_bound(layer.eval(), in_shape=(8,), domain=(-10.0, 10.0))
        found = largest_ratio(layer, bound.tolerance)
        print(f"{name:<36} {bound.lipschitz:<14.8g} {bound.tolerance:<8.2g} {found:.4f}")
        assert found <= bound.lipschitz + 1e-12, "the bound does not hold"  # 1e-12: rounding of the ratio


if __name__ == "__main__":
    main()
