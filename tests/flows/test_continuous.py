"""The continuous flow dx/dt = -∇f(x) + Ax never separates two points (Corollary 1), and the symmetric part of the
Jacobian bounds their distance from both sides (Proposition 2).

The flows are integrated by the classical Runge-Kutta method in float64, with steps so small that its error is far below
the tolerances.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from lipflow.flows import (
    ConvexPlusSkew,
    ConvexPotential,
    ConvWeight,
    DenseWeight,
    Nonlinearity,
    Potential,
    Skew,
    Weight,
)

VectorField = Callable[[float, Tensor], Tensor]


@torch.no_grad()
def trajectory(field: VectorField, x: Tensor, time: float, steps: int) -> Iterator[tuple[float, Tensor]]:
    """(t, x_t) from t = 0 to `time`, by the classical Runge-Kutta method of order 4."""
    h = time / steps
    yield 0.0, x
    for i in range(steps):
        t = i * h
        k1 = field(t, x)
        k2 = field(t + h / 2, x + h / 2 * k1)
        k3 = field(t + h / 2, x + h / 2 * k2)
        k4 = field(t + h, x + h * k3)
        x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        yield t + h, x


def distances(field: VectorField, x: Tensor, z: Tensor, time: float, steps: int) -> tuple[Tensor, Tensor]:
    """Times, and ‖x_t - z_t‖ for every pair  # (steps + 1, pairs)."""
    times, states = zip(*trajectory(field, torch.cat([x, z]), time, steps), strict=True)
    differences = [x_t - z_t for x_t, z_t in (state.chunk(2) for state in states)]
    return torch.tensor(times, dtype=torch.float64), torch.stack([d.flatten(1).norm(dim=1) for d in differences])


def pace(t: Tensor | float) -> Tensor:
    """A speed 2 + cos t, for a field that depends on time; its integral is 2t + sin t."""
    return 2 + torch.as_tensor(t, dtype=torch.float64).cos()


def require_between(low: float, high: float, times: Tensor, distance: Tensor) -> None:
    """‖x₀ - z₀‖·e^{∫μ} ≤ ‖x_t - z_t‖ ≤ ‖x₀ - z₀‖·e^{∫λ} at all times, with μ = low·pace and λ = high·pace."""
    elapsed = (2 * times + times.sin())[:, None]
    assert bool((distance >= (low * elapsed).exp() * distance[0] * (1 - 1e-7)).all())
    assert bool((distance <= (high * elapsed).exp() * distance[0] * (1 + 1e-7)).all())


@pytest.mark.parametrize("sigma", ["softplus", "tanh", "sigmoid"])
@pytest.mark.parametrize(
    ("weight", "skew", "shape"),
    [(DenseWeight(6, 9), DenseWeight(6, 6), (64, 6)), (ConvWeight(2, 3), ConvWeight(2, 2), (16, 2, 5, 4))],
)
def test_no_pair_of_trajectories_moves_apart(weight: Weight, skew: Weight, shape: tuple[int, ...], sigma: str):
    field = ConvexPlusSkew(ConvexPotential(weight, sigma), Skew(skew)).double()
    nn.init.normal_(weight.weight)
    nn.init.normal_(skew.weight)
    x = torch.randn(shape, dtype=torch.float64)
    # Pairs from very close to far apart, so that σ is curved, saturated, or flat between them.
    apart = torch.randn_like(x) * torch.logspace(-3, 1, len(x), dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1))
    _, distance = distances(lambda t, x: field(x), x, x + apart, time=2.0, steps=400)
    assert (distance[1:] / distance[:-1]).max() <= 1 + 1e-9
    assert bool((distance[-1] < 0.999 * distance[0]).any())  # the potential contracts


def test_the_distance_is_between_the_exponentials_of_a_linear_field():
    # ∇f has its spectrum in [0.2, 3]: S(∇F) = -S, so μ = -3 and λ = -0.2.
    basis, gradient = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q, nn.Linear(5, 5).double()
    gradient.weight.data = basis @ torch.tensor([0.2, 0.5, 1.0, 2.0, 3.0], dtype=torch.float64).diag() @ basis.T
    field = ConvexPlusSkew(Potential(gradient, smoothness=3.0), Skew(DenseWeight(5, 5)).double())
    nn.init.normal_(field.skew.weight.weight)
    x, z = torch.randn(2, 200, 5, dtype=torch.float64)
    times, distance = distances(lambda t, x: pace(t) * field(x), x, z, time=1.5, steps=600)
    require_between(-3.0, -0.2, times, distance)
    # The flow is linear, so its end is known: a test of the integrator and of the field.
    jacobian = (field.skew.operator((5,)).weight - gradient.weight).detach()
    elapsed = 2 * times[-1] + times[-1].sin()
    exact = ((x - z) @ torch.matrix_exp(elapsed * jacobian).T).norm(dim=1)
    torch.testing.assert_close(distance[-1], exact, rtol=1e-7, atol=0)


def test_the_distance_is_between_the_exponentials_of_a_nonlinear_field():
    # σ(y) = y + tanh y has slopes in [1, 2] and W is invertible: σmin(W)²·I ⪯ ∇²f ⪯ 2σmax(W)²·I.
    field = ConvexPotential(DenseWeight(4, 6), Nonlinearity(lambda y: y + y.tanh(), 1.0, 2.0)).double()
    values = torch.linalg.svdvals(field.weight.weight.detach())
    # Near the origin the slope is 2, and far away it is 1.
    x, z = torch.randn(2, 200, 4, dtype=torch.float64) * torch.logspace(-2, 2, 200, dtype=torch.float64)[:, None]
    total = ConvexPlusSkew(field, Skew(DenseWeight(4, 4)).double())
    times, distance = distances(lambda t, x: pace(t) * total(x), x, z, time=1.5, steps=600)
    require_between(-2 * values[0].item() ** 2, -(values[-1].item() ** 2), times, distance)
