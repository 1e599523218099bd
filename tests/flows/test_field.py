"""Two points of dx/dt = F(x) approach: d/dt ½‖x - z‖² = ⟨F(x) - F(z), x - z⟩ ≤ 0 (Corollary 1, Proposition 2)."""

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


def rates(field: nn.Module, x: Tensor, z: Tensor) -> Tensor:
    """⟨F(x) - F(z), x - z⟩/‖x - z‖² of every pair."""
    apart = (x - z).flatten(1)
    return ((field(x) - field(z)).detach().flatten(1) * apart).sum(1) / apart.square().sum(1)


@pytest.mark.parametrize("sigma", ["relu", "softplus", "tanh", "sigmoid", "hardtanh"])
@pytest.mark.parametrize(
    ("weight", "skew", "shape"),
    [(DenseWeight(6, 9), DenseWeight(6, 6), (64, 6)), (ConvWeight(2, 3), ConvWeight(2, 2), (16, 2, 5, 4))],
)
def test_no_pair_of_points_moves_apart(weight: Weight, skew: Weight, shape: tuple[int, ...], sigma: str):
    field = ConvexPlusSkew(ConvexPotential(weight, sigma), Skew(skew)).double()
    nn.init.normal_(weight.weight)
    nn.init.normal_(skew.weight)
    x = torch.randn(shape, dtype=torch.float64)
    # Pairs from very close to far apart, so that σ is curved, saturated, or flat between them.
    apart = torch.randn_like(x) * torch.logspace(-3, 1, len(x), dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1))
    found = rates(field, x, x + apart)
    assert float(found.max()) <= 1e-9
    assert float(found.min()) < -0.01  # the potential contracts


def quadratic() -> tuple[Potential, float, float]:
    """∇²f has its spectrum in [0.2, 3]."""
    basis, gradient = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q, nn.Linear(4, 4).double()
    gradient.weight.data = basis @ torch.tensor([0.2, 0.5, 1.0, 3.0], dtype=torch.float64).diag() @ basis.T
    return Potential(gradient, smoothness=3.0), 0.2, 3.0


def curved() -> tuple[ConvexPotential, float, float]:
    """σ(y) = y + tanh y has slopes in [1, 2] and W is injective: σmin(W)²·I ⪯ ∇²f ⪯ 2σmax(W)²·I."""
    field = ConvexPotential(DenseWeight(4, 6), Nonlinearity(lambda y: y + y.tanh(), 1.0, 2.0)).double()
    values = torch.linalg.svdvals(field.weight.weight.detach())
    return field, float(values[-1]) ** 2, 2 * float(values[0]) ** 2


@pytest.mark.parametrize("make", [quadratic, curved])
def test_points_approach_each_other_at_a_rate_within_the_spectrum_of_the_hessian(make):
    """The skew part changes no distance."""
    convex, least, greatest = make()
    field = ConvexPlusSkew(convex, Skew(DenseWeight(4, 4)).double())
    # Near the origin the slope of `curved` is 2, and far away it is 1.
    x, z = torch.randn(2, 200, 4, dtype=torch.float64) * torch.logspace(-2, 2, 200, dtype=torch.float64)[:, None]
    found = -rates(field, x, z)
    assert least * (1 - 1e-9) <= float(found.min()) <= float(found.max()) <= greatest * (1 + 1e-9)
