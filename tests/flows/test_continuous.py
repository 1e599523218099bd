"""The continuous flows behind the steps: dx/dt = -∇f(x) + Ax never separates two points (Corollary 1), and the
symmetric part of the Jacobian bounds the distance from both sides (Proposition 2).

The flows are integrated with the classical Runge-Kutta method, in float64, by steps so fine that its own error is
far below what is tested.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from lipflow.flows import ConvexPlusSkew, ConvexPotential, ConvWeight, DenseWeight, Nonlinearity, Potential, Skew

VectorField = Callable[[float, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


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
    pairs = len(x)
    times, states = zip(*trajectory(field, torch.cat([x, z]), time, steps), strict=True)
    return torch.tensor(times, dtype=torch.float64), torch.stack(
        [(s[:pairs] - s[pairs:]).flatten(1).norm(dim=1) for s in states]
    )


def dense_field(sigma: str) -> tuple[ConvexPlusSkew, Tensor]:
    field = ConvexPlusSkew(ConvexPotential(DenseWeight(6, 9), sigma), Skew(DenseWeight(6, 6))).double()
    return field, torch.randn(64, 6, dtype=torch.float64)


def conv_field(sigma: str) -> tuple[ConvexPlusSkew, Tensor]:
    field = ConvexPlusSkew(ConvexPotential(ConvWeight(2, 3), sigma), Skew(ConvWeight(2, 2))).double()
    return field, torch.randn(16, 2, 5, 4, dtype=torch.float64)


@pytest.mark.parametrize("sigma", ["softplus", "tanh", "sigmoid"])
@pytest.mark.parametrize("build", [dense_field, conv_field])
def test_no_pair_of_trajectories_ever_moves_apart(build: Callable[[str], tuple[ConvexPlusSkew, Tensor]], sigma: str):
    field, x = build(sigma)
    with torch.no_grad():
        field.convex.weight.weight.mul_(3)
        field.skew.weight.weight.mul_(6)
    # Pairs from very close to far apart, scaled for σ to be curved, saturated, or flat between them.
    apart = torch.randn_like(x) * torch.logspace(-3, 1, len(x), dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1))
    _, distance = distances(lambda t, x: field(x), x, x + apart, time=2.0, steps=400)
    growth = distance[1:] / distance[:-1]
    assert growth.max() <= 1 + 1e-9
    assert bool((distance[-1] < 0.999 * distance[0]).any())  # and it is no isometry: the potential does contract


def test_a_skew_field_alone_keeps_every_distance():
    field = Skew(DenseWeight(6, 6)).double()
    with torch.no_grad():
        field.weight.weight.mul_(3)
    x, z = torch.randn(2, 32, 6, dtype=torch.float64)
    _, distance = distances(lambda t, x: field(x), x, z, time=2.0, steps=400)
    torch.testing.assert_close(distance, distance[:1].expand_as(distance), rtol=1e-9, atol=0)
    final = list(trajectory(lambda t, x: field(x), x, 2.0, 400))[-1][1]
    exact = x @ torch.matrix_exp(2.0 * field.operator((6,)).weight.detach()).T
    torch.testing.assert_close(final, exact, rtol=1e-8, atol=1e-8)
    assert (final - x).norm() > 1  # it does turn


def pace(t: Tensor | float) -> Tensor:
    """A speed 2 + cos t, for a field that changes with time; its integral is 2t + sin t."""
    return 2 + torch.as_tensor(t, dtype=torch.float64).cos()


def require_between(low: float, high: float, times: Tensor, distance: Tensor) -> None:
    """‖x₀ - z₀‖·e^{∫μ} ≤ ‖x_t - z_t‖ ≤ ‖x₀ - z₀‖·e^{∫λ} at all times, with μ = low·pace and λ = high·pace."""
    elapsed = (2 * times + times.sin())[:, None]
    assert bool((distance >= (low * elapsed).exp() * distance[0] * (1 - 1e-7)).all())
    assert bool((distance <= (high * elapsed).exp() * distance[0] * (1 + 1e-7)).all())


def test_a_quadratic_potential_keeps_between_the_exponentials_of_its_spectrum():
    # f(x) = ½xᵀSx + c·x with the spectrum of S in [0.2, 3]: S(∇F) = -S, so μ = -3 and λ = -0.2.
    basis = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    spectrum = torch.tensor([0.2, 0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
    gradient = nn.Linear(5, 5).double()
    with torch.no_grad():
        gradient.weight.copy_(basis @ spectrum.diag() @ basis.T)
    field = ConvexPlusSkew(Potential(gradient, smoothness=3.0), Skew(DenseWeight(5, 5)).double())
    with torch.no_grad():
        field.skew.weight.weight.mul_(4)
    x, z = torch.randn(2, 200, 5, dtype=torch.float64)
    times, distance = distances(lambda t, x: pace(t) * field(x), x, z, time=1.5, steps=600)
    require_between(-3.0, -0.2, times, distance)

    # The flow is linear, so that its end is known: a check of the integrator, and of the field.
    jacobian = (field.skew.operator((5,)).weight - gradient.weight).detach()
    elapsed = 2 * times[-1] + times[-1].sin()
    exact = ((x - z) @ torch.matrix_exp(elapsed * jacobian).T).norm(dim=1)
    torch.testing.assert_close(distance[-1], exact, rtol=1e-7, atol=0)


def test_both_exponentials_are_reached_without_a_skew_part():
    spectrum = torch.tensor([0.2, 3.0], dtype=torch.float64)
    gradient = nn.Linear(2, 2, bias=False).double()
    with torch.no_grad():
        gradient.weight.copy_(spectrum.diag())
    field = Potential(gradient, smoothness=3.0)
    x = torch.zeros(2, 2, dtype=torch.float64)
    times, distance = distances(lambda t, x: pace(t) * field(x), x, torch.eye(2, dtype=torch.float64), 1.5, 600)
    elapsed = (2 * times + times.sin())[:, None]
    torch.testing.assert_close(distance, (-spectrum * elapsed).exp(), rtol=1e-7, atol=0)


def test_a_nonlinear_potential_keeps_between_the_exponentials_of_its_slopes():
    # σ(y) = y + tanh y has slopes in [1, 2] and W is invertible: σmin(W)²·I ⪯ ∇²f ⪯ 2σmax(W)²·I.
    field = ConvexPotential(DenseWeight(4, 6), Nonlinearity(lambda y: y + y.tanh(), 1.0, 2.0)).double()
    values = torch.linalg.svdvals(field.weight.weight.detach())
    skew = Skew(DenseWeight(4, 4)).double()
    # Starts close to the origin feel the upper slope, starts far away the lower one.
    x, z = torch.randn(2, 200, 4, dtype=torch.float64) * torch.logspace(-2, 2, 200, dtype=torch.float64)[:, None]
    total = ConvexPlusSkew(field, skew)
    times, distance = distances(lambda t, x: pace(t) * total(x), x, z, time=1.5, steps=600)
    require_between(-2 * values[0].item() ** 2, -(values[-1].item() ** 2), times, distance)
