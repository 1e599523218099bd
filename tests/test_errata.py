"""Tests of docs/errata.md, by its numbers: what the library computes contradicts the paper, or confirms a remark."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lipflow.blocks import Householder
from lipflow.bound import lipschitz_bound
from lipflow.flows import (
    ConvexPotential,
    DenseWeight,
    ExplicitEuler,
    Exponential,
    Flow,
    ImplicitEuler,
    Midpoint,
    Nonlinearity,
    Skew,
)
from lipflow.operators import ConvOperator, DenseOperator, norm_bound, norm_estimate


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def identity(d: int) -> Tensor:
    return torch.eye(d, dtype=torch.float64)


def norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix.detach(), 2))


LINEAR = Nonlinearity(lambda y: y, 1.0, 1.0)


def descent(weight: Tensor, h: float | None, sigma: Nonlinearity | str = "relu", bias: Tensor | None = None) -> Flow:
    """x - hWᵀσ(Wx + b); without h, h = 2/‖W‖²."""
    units, features = weight.shape
    field = ConvexPotential(DenseWeight(features, units), sigma, bias=bias is not None).double()
    with torch.no_grad():
        field.weight.weight.copy_(weight)
        field.weight.reset_estimate()
        if bias is not None:
            field.bias.copy_(bias)
    return Flow(field, ExplicitEuler(h)).eval()


# 1. Expressivity: every linear contraction is a product of symmetric contractions


def orthogonal(d: int, determinant: float) -> Tensor:
    q = torch.linalg.qr(random(d, d)).Q
    q[:, 0] *= determinant * torch.linalg.det(q).sign()
    return q


def with_rank(d: int, rank: int) -> Tensor:
    m = random(d, rank) @ random(rank, d)
    return m / norm(m) if rank else m


CONTRACTIONS: dict[str, Callable[[int], Tensor]] = {
    "generic": lambda d: with_rank(d, d),
    "rotation": lambda d: orthogonal(d, 1.0),
    "rotation and reflection": lambda d: orthogonal(d, -1.0),
    "half rank": lambda d: with_rank(d, d // 2),
    "rank one": lambda d: with_rank(d, 1),
    "nilpotent shift": lambda d: torch.diag(torch.ones(d - 1, dtype=torch.float64), 1),
    "cyclic shift": lambda d: identity(d).roll(1, 0),
    "identity": identity,
    "minus identity": lambda d: -identity(d),
}
every_contraction = pytest.mark.parametrize(("kind", "d"), [(kind, d) for kind in CONTRACTIONS for d in (1, 2, 3, 7)])


def polar(m: Tensor) -> tuple[Tensor, Tensor]:
    """M = QP with Q orthogonal and P symmetric, 0 ⪯ P ⪯ ‖M‖."""
    u, s, vh = torch.linalg.svd(m)
    return u @ vh, vh.T @ s.diag() @ vh


def reversing_involution(q: Tensor) -> Tensor:
    """A symmetric S with S² = I and SQS = Qᵀ: it reflects each plane that Q rotates, and fixes the eigenvectors."""
    s, left = torch.zeros_like(q), identity(len(q))  # `left` is an orthonormal basis of the remaining subspace
    while left.shape[1]:
        v = left @ torch.linalg.eigh(left.T @ (q + q.T) @ left).eigenvectors[:, 0]
        s, done = s + torch.outer(v, v), [v]
        w = q @ v - (v @ q @ v) * v  # 0 for an eigenvector, otherwise v and w span a plane that Q rotates
        if w.norm() > 1e-6:
            w = w / w.norm()
            s, done = s - torch.outer(w, w), [v, w]
        left = left @ torch.linalg.svd(left.T @ torch.stack(done, 1)).U[:, len(done) :]
    return s


def three_factors(m: Tensor) -> list[Tensor]:
    """Symmetric contractions whose product is M, in any dimension."""
    q, p = polar(m)
    second = reversing_involution(q)
    return [q @ second, second, p]


def convex_potential_step(s: Tensor) -> Flow:
    """S = I - 2T as the layer x - 2∇f(x), with f(x) = ½xᵀTx, T = (I - S)/2 and 0 ⪯ T ⪯ I."""
    values, vectors = torch.linalg.eigh((identity(len(s)) - s) / 2)
    return descent(values.clamp(0, 1).sqrt()[:, None] * vectors.T, 2.0, LINEAR)


def layer_with_relu(s: Tensor, far: float) -> Flow:
    """S as a Convex Potential Layer with ReLU and h = 2/‖W‖², for ‖x‖ well below `far`."""
    values, vectors = torch.linalg.eigh((identity(len(s)) - s) / 2)
    values = values.clamp(0, 1)
    rows = (values / 2).sqrt()[:, None] * vectors.T
    inactive = (1 - values[-1:]).sqrt()[:, None] * vectors.T[-1:]
    bias = torch.tensor([far] * (2 * len(s)) + [-far])
    return descent(torch.cat([rows, -rows, inactive]), 2.0, bias=bias)


@every_contraction
def test_a_linear_contraction_is_three_steps_and_on_a_bounded_set_three_layers_with_relu(kind: str, d: int):
    m, x = CONTRACTIONS[kind](d), random(20, d)
    far, factors = 2 * float(x.norm(dim=1).max()), three_factors(m)[::-1]
    for layers in (map(convex_potential_step, factors), (layer_with_relu(s, far) for s in factors)):
        network = nn.Sequential(*layers).eval()
        torch.testing.assert_close(network(x), x @ m.T, rtol=0, atol=1e-9)
        for layer in network:  # h = 2 is at most 2/‖W‖², the hypothesis of Proposition 3
            length = norm(layer.field.weight.weight)
            assert length <= 1 + 1e-12
            assert length == pytest.approx(1, abs=1e-12) or layer.field.bias is None


# 2, 3 and 9. Steps through a skew field


def skew(d: int = 6, scale: float = 3.0) -> Skew:
    field = Skew(DenseWeight(d, d)).double()
    with torch.no_grad():
        field.weight.weight.mul_(scale)
    return field


@pytest.mark.parametrize("h", [0.1, 1.0, 10.0])
def test_implicit_euler_through_a_skew_field_contracts(h: float):
    field = skew()
    x, y = random(2, 50, 6)
    apart, after = x - y, Flow(field, ImplicitEuler(h))(x) - Flow(field, ImplicitEuler(h))(y)
    squares = (after**2).sum(1) + h**2 * (field(after) ** 2).sum(1)
    torch.testing.assert_close((apart**2).sum(1), squares, rtol=1e-11, atol=0)
    assert bool((after.norm(dim=1) < apart.norm(dim=1)).all())


@pytest.mark.parametrize("h", [0.1, 1.0, 10.0])
def test_explicit_euler_through_a_skew_field_is_pythagorean(h: float):
    field, step = skew(), ExplicitEuler(h, expand=True)
    x, y = random(2, 50, 6)
    before, after = x - y, Flow(field, step)(x) - Flow(field, step)(y)
    moved = h * field(before)
    torch.testing.assert_close((after**2).sum(1), (before**2).sum(1) + (moved**2).sum(1), rtol=1e-11, atol=0)
    as_printed = after.norm(dim=1) - before.norm(dim=1) - moved.norm(dim=1)
    assert bool((as_printed < -1e-3).all())  # without the squares it is not an identity


def test_the_exact_flow_over_one_step_is_exp_a_and_not_exp_half_a():
    field = skew()
    x = nn.functional.normalize(random(50, 6))

    def error(h: float, time: float) -> Tensor:
        return (Flow(field, Midpoint(h))(x) - Flow(field, Exponential(time))(x)).norm(dim=1).max()

    assert 7.9 < error(0.02, 0.02) / error(0.01, 0.01) < 8.1  # second order: h³ for each step
    assert 1.9 < error(0.02, 0.01) / error(0.01, 0.005) < 2.1  # e^{A/2} is not consistent with the midpoint rule


# 5. The spectral norm


def test_a_hundred_iterations_leave_a_layer_that_stretches():
    """Two close singular values, and a start with a small component, or none, along the first singular vector."""
    op = DenseOperator(torch.tensor([1.0, 0.99], dtype=torch.float64).diag())
    start = torch.tensor([0.05, 1.0], dtype=torch.float64)
    below = norm_estimate(op, start / start.norm(), iterations=100).item()
    flow = descent(op.weight, 2 / below**2, LINEAR)
    stretch = flow(torch.tensor([[1.0, 0.0]], dtype=torch.float64)).detach().norm().item()
    assert 1.001 < stretch <= lipschitz_bound(flow, in_shape=(2,)).lipschitz
    orthogonal_start = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert norm_estimate(op, orthogonal_start, iterations=1000).item() <= 0.99 < 1 <= norm_bound(op)


# 6. The proof for implicit flows


def test_the_inner_product_of_the_implicit_proof_is_with_the_new_points():
    field = ConvexPotential(DenseWeight(4, 8), "softplus").double()
    layer = Flow(field, ImplicitEuler(1.0, iterations=80)).eval()
    x, z = 3 * random(2, 50, 4)
    old, new = x - z, layer(x) - layer(z)
    bend = field.gradient(layer(x)) - field.gradient(layer(z))
    ends = (new**2).sum(1) + (bend**2).sum(1)
    torch.testing.assert_close((old**2).sum(1), ends + 2 * (new * bend).sum(1), rtol=1e-10, atol=0)
    as_printed = ends + 2 * (old * bend).sum(1)
    torch.testing.assert_close(as_printed - (old**2).sum(1), 2 * (bend**2).sum(1), rtol=1e-8, atol=1e-12)
    assert bool((as_printed > (old**2).sum(1)).all())


# 7. Reshaped kernels


def test_an_orthogonal_reshaped_kernel_stretches():
    kernel = torch.full((1, 1, 1, 3), 1 / math.sqrt(3), dtype=torch.float64)
    reshaped = kernel.reshape(1, 3)
    torch.testing.assert_close(reshaped @ reshaped.T, identity(1))
    op = ConvOperator(kernel, (1, 8), padding_mode="circular", padding="same")
    constant = torch.ones(1, 1, 1, 8, dtype=torch.float64)
    torch.testing.assert_close(op(constant), math.sqrt(3) * constant)


# 11. Gradients are controlled from above


def active(weight: Tensor, bias: float = 100.0) -> Flow:
    """x - (2/‖W‖²)Wᵀrelu(Wx + b); with the large bias every row is active near 0."""
    return descent(weight, None, bias=torch.full((len(weight),), bias))


def test_a_gradient_never_grows_and_may_be_lost():
    layer = active(torch.diag(torch.tensor([1.0, 0.5], dtype=torch.float64).sqrt()))
    jacobian = torch.func.jacrev(layer)(torch.ones(1, 2, dtype=torch.float64)).reshape(2, 2)
    torch.testing.assert_close(jacobian, torch.diag(torch.tensor([-1.0, 0.0], dtype=torch.float64)), rtol=0, atol=1e-6)

    weight, g = random(6, 8), random(8)
    passed = torch.func.vjp(active(weight), random(1, 8))[1](g[None])[0][0]
    hessian = 2 / norm(weight) ** 2 * weight.T @ weight
    lost = g @ hessian @ (2 * g - hessian @ g)
    assert float(lost) > 0.1
    torch.testing.assert_close(g.square().sum() - passed.square().sum(), lost, rtol=1e-3, atol=0)


@pytest.mark.parametrize("bias", [100.0, 0.0], ids=["all rows active", "some rows active"])
def test_orthonormal_rows_lose_no_gradient(bias: float):
    layer, g, x = active(torch.linalg.qr(random(8, 6)).Q.T, bias), random(8), random(1, 8)
    rows = layer.field.weight(x)(x) + bias > 0
    assert bool(rows.any())
    assert bool(rows.all()) == (bias > 0)
    passed = torch.func.vjp(layer, x)[1](g[None])[0][0]
    torch.testing.assert_close(passed.norm(), g.norm(), rtol=1e-9, atol=0)


# The Householder activation


@pytest.mark.parametrize("theta", [0.0, 0.3, math.pi / 2, 2.0, math.pi, -2.5])
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_a_convex_potential_layer_of_one_row_is_the_householder_activation(theta: float, scale: float):
    activation = Householder(2).double()
    nn.init.constant_(activation.theta, theta)
    row = torch.tensor([[-math.sin(theta / 2), math.cos(theta / 2)]], dtype=torch.float64)
    x = random(200, 2)
    # In training one power iteration runs first, which is exact for one row.
    torch.testing.assert_close(descent(scale * row, None).train()(x), activation(x), rtol=0, atol=1e-12)
