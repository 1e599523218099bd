"""The proximal solver: its a-priori rate, its derivatives, and the geometry of the map it computes.

Everything is in float64. Exact solutions are closed forms, or long runs whose residual r is checked: as I + h∇f is
1-strongly monotone, ‖z - z*‖ ≤ ‖r‖.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import lipflow
from lipflow.bound import lipschitz_bound
from lipflow.flows import ConvexPotential, DenseWeight, Flow, ImplicitEuler, Midpoint
from lipflow.flows.proximal import contraction, iterations_for, proximal

Gradient = Callable[[Tensor], Tensor]

ELLS = [2.0**-6, 0.3, 1.0, 10.0, 100.0, 1e4]
SOLVED = 2.0**-95  # the iteration stops where so little is left
ITERATIONS = [1, 2, 3, 5, 10, 30, 100]
SIGMAS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "tanh": torch.tanh, "identity": lambda y: y}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def random_potentials(sigma: str, ell: float, count: int = 40) -> tuple[Gradient, Tensor]:
    """∇f(z) = Wᵀσ(Wz + b) for many W with ‖W‖² = ℓ at once, and starts around their kinks."""
    w = torch.randn(count, 6, 4, dtype=torch.float64)
    w = w * math.sqrt(ell) / torch.linalg.matrix_norm(w, 2)[:, None, None]
    b = (
        torch.randn(count, 6, dtype=torch.float64)
        * math.sqrt(ell)
        * torch.logspace(-2, 2, count, dtype=torch.float64)[:, None]
    )

    def gradient(z: Tensor) -> Tensor:
        return torch.einsum("nij,ni->nj", w, SIGMAS[sigma](torch.einsum("nij,nj->ni", w, z) + b))

    return gradient, 10 * torch.randn(count, 4, dtype=torch.float64)


def solve(gradient: Gradient, x: Tensor, ell: float, h: float = 1.0) -> tuple[Tensor, Tensor]:
    """z by a long run, and a bound on its distance from z* for each member of the batch."""
    with torch.no_grad():
        z = proximal(gradient, x, h, ell, iterations_for(ell, 1e-17))
        return z, (z + h * gradient(z) - x).norm(dim=1)


# The rate


def runs(gradient: Gradient, x: Tensor, ell: float) -> Iterator[tuple[float, Tensor]]:
    """The promised factor and the z after some iterations, for as long as the factor is far above rounding."""
    for n in ITERATIONS:
        if contraction(ell, n) > 1e-10:
            yield contraction(ell, n), proximal(gradient, x, 1.0, ell, n)


def require_rate(gradient: Gradient, x: Tensor, ell: float) -> None:
    """No member of the batch is ever further from its z* than promised."""
    best, residual = solve(gradient, x, ell)
    rounding = 1e-11 * (1 + x.norm(dim=1) + best.norm(dim=1))
    assert bool((residual <= (1 + ell) * rounding).all())
    for factor, z in runs(gradient, x, ell):
        allowed = factor * ((x - best).norm(dim=1) + residual) + residual + rounding
        assert bool(((z - best).norm(dim=1) <= allowed).all())


@pytest.mark.parametrize("ell", ELLS)
def test_quadratics_reach_the_rate_and_never_exceed_it(ell: float):
    # ∇f(z) = λz - 1 with λ over the whole spectrum [0, ℓ], both ends included: z* = (x + 1)/(1 + λ).
    ends = torch.linspace(0, ell, 2001, dtype=torch.float64), ell * torch.logspace(-8, 0, 2001, dtype=torch.float64)
    eigenvalues = torch.cat(ends)[:, None]
    x, exact = torch.zeros_like(eigenvalues), 1 / (1 + eigenvalues)
    for factor, z in runs(lambda z: eigenvalues * z - 1, x, ell):
        ratio = ((z - exact).abs() / exact).max().item()
        # The bound is exact on quadratics (Taylor and Drori, Lemma 2), so this test bites from both sides.
        assert factor * (1 - 1e-3) - 1e-12 <= ratio <= factor + 1e-12


@pytest.mark.parametrize("ell", ELLS)
@pytest.mark.parametrize("sigma", ["relu", "tanh"])
def test_kinked_potentials_never_exceed_the_rate(sigma: str, ell: float):
    # One dimension, f' = ℓσ(z - b) - c: the kink b and the start's distance from z* are searched on a grid.
    grid = torch.linspace(-3, 3, 61, dtype=torch.float64)
    b, c = (t.reshape(-1, 1) for t in torch.meshgrid(grid, grid * (1 + ell), indexing="ij"))
    require_rate(lambda z: ell * SIGMAS[sigma](z - b) - c, torch.zeros_like(b), ell)


@pytest.mark.parametrize("ell", ELLS)
@pytest.mark.parametrize("sigma", SIGMAS)
def test_random_potentials_never_exceed_the_rate(sigma: str, ell: float):
    require_rate(*random_potentials(sigma, ell), ell)


class At(NamedTuple):
    """The objective Φ(z) = ½‖z - x‖² + f(z) and its gradient at a point."""

    point: Tensor
    value: Tensor
    slope: Tensor


def interpolation_gap(a: At, b: At, smooth: float) -> Tensor:
    """Φ(a) less its lower bound from b, for a 1-strongly convex and L-smooth Φ: at least 0."""
    apart, bend = a.point - b.point, a.slope - b.slope
    curved = ((apart - bend / smooth) ** 2).sum() / (1 - 1 / smooth)
    return a.value - b.value - (b.slope * apart).sum() - (bend**2).sum() / smooth / 2 - curved / 2


@pytest.mark.parametrize("ell", [3.0, 30.0, 1000.0])
def test_the_lyapunov_function_falls_by_exactly_two_inequalities(ell: float):
    # The proof in docs/theory.md, on the iterates of the code: φₖ = (1 - q)Aₖψₖ + (L + Aₖ)‖zₖ - z*‖².
    smooth, q, steps = 1 + ell, 1 / (1 + ell), 8
    w = torch.randn(5, 3, dtype=torch.float64)
    w = w * math.sqrt(ell) / torch.linalg.matrix_norm(w, 2)
    x = 3 * torch.randn(1, 3, dtype=torch.float64)
    visited: list[Tensor] = []

    def gradient(z: Tensor) -> Tensor:
        visited.append(z)
        return 4 * torch.sigmoid(z @ w.T) @ w  # σ = 4·sigmoid has slopes in [0, 1]

    def at(z: Tensor) -> At:
        value = ((z - x) ** 2).sum() / 2 + 4 * torch.logaddexp(z @ w.T, torch.zeros(5, dtype=z.dtype)).sum()
        return At(z, value, z - x + gradient(z))

    best = at(proximal(gradient, x, 1.0, ell, iterations_for(ell, 1e-17)))
    zs = [proximal(gradient, x, 1.0, ell, k) for k in range(steps + 1)]
    visited.clear()
    with torch.no_grad():
        proximal(gradient, x, 1.0, ell, steps)
    ys = [at(y) for y in (x, *visited[:steps])]
    a, weights = 0.0, [0.0]
    for _ in range(steps):
        a = ((1 + q) * a + 2 * (1 + math.sqrt((1 + a) * (1 + q * a)))) / (1 - q) ** 2
        weights.append(a)
    phis = [
        (1 - q) * a * interpolation_gap(y, best, smooth) + (smooth + a) * ((z - best.point) ** 2).sum()
        for a, y, z in zip(weights, ys, zs, strict=True)
    ]
    for k in range(steps):
        first = interpolation_gap(ys[k], ys[k + 1], smooth)
        second = interpolation_gap(best, ys[k + 1], smooth)
        assert min(first, second) >= -1e-9
        fall = (1 - q) * (weights[k] * first + (weights[k + 1] - weights[k]) * second)
        assert abs(phis[k] - phis[k + 1] - fall) <= 1e-9 * (phis[k] + 1)


@pytest.mark.parametrize("ell", ELLS)
def test_the_rate_has_the_stated_closed_form_bound(ell: float):
    q = 1 / (1 + ell)
    for n in range(1, 40):
        stated = (1 + math.sqrt(q)) / (2 * math.sqrt(q)) * (1 - math.sqrt(q)) ** n * (1 + 1e-12)
        assert contraction(ell, n) <= max(stated, SOLVED)


def test_the_rate_falls_with_iterations_and_rises_with_stiffness():
    assert contraction(5.0, 0) == 1.0
    for ell, stiffer in itertools.pairwise(ELLS):
        rates = [contraction(ell, n) for n in range(20)]
        assert all(after < before or before < SOLVED for before, after in itertools.pairwise(rates))
        assert all(contraction(stiffer, n) > rates[n] or rates[n] < SOLVED for n in range(1, 20))


@pytest.mark.parametrize("ell", [0.0, *ELLS])
@pytest.mark.parametrize("factor", [1.0, 0.5, 1e-3, 2.0**-26, 1e-15])
def test_iterations_for_is_the_least_number_that_reaches_the_factor(ell: float, factor: float):
    n = iterations_for(ell, factor)
    assert contraction(ell, n) <= factor * (1 + 1e-12)
    assert n == 0 or contraction(ell, n - 1) > factor


def test_it_takes_a_fifth_of_the_iterations_of_gradient_descent_at_100():
    ell, factor = 100.0, 2.0**-26
    n = iterations_for(ell, factor)
    # The best fixed step of gradient descent, 2/(2 + ℓ), contracts by ℓ/(2 + ℓ) at both ends of the spectrum.
    descent = math.ceil(math.log(factor) / math.log(ell / (2 + ell)))
    assert 5 * n < descent
    eigenvalues = torch.linspace(0, ell, 101, dtype=torch.float64)[:, None]
    x = torch.zeros_like(eigenvalues)
    exact = 1 / (1 + eigenvalues)
    z = x
    for _ in range(n):
        z = z - 2 / (2 + ell) * (z - x + eigenvalues * z - 1)
    ours = proximal(lambda z: eigenvalues * z - 1, x, 1.0, ell, n)
    assert ((ours - exact).abs() / exact).max() <= factor * (1 + 1e-6)
    assert ((z - exact).abs() / exact).max() >= 1e6 * factor


@pytest.mark.parametrize("ell", [-1.0, math.inf, math.nan])
def test_a_smoothness_that_is_none_is_refused(ell: float):
    with pytest.raises(ValueError, match="smoothness"):
        contraction(ell, 3)


# The derivatives


def test_the_implicit_gradient_is_that_of_the_closed_form():
    # f(z) = ½zᵀSz - c·z: z = (I + hS)⁻¹(x + hc), differentiated through the solve.
    root = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    c = torch.randn(4, dtype=torch.float64, requires_grad=True)
    h = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 4, dtype=torch.float64)
    inputs = (x, root, c, h)

    def stiffness() -> Tensor:
        return root @ root.T

    ell = 1.01 * float((h * torch.linalg.matrix_norm(stiffness(), 2)).detach())
    z = proximal(lambda z: z @ stiffness() - c, x, h, ell, iterations_for(ell, 1e-17))
    closed = torch.linalg.solve(torch.eye(4, dtype=torch.float64) + h * stiffness(), (x + h * c).T).T
    torch.testing.assert_close(z, closed, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad((weights * z).sum(), inputs)
    exact = torch.autograd.grad((weights * closed).sum(), inputs)
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("sigma", [torch.tanh, torch.sigmoid, torch.nn.functional.softplus])
def test_gradcheck_in_the_input_the_step_and_the_parameters(sigma: Callable[[Tensor], Tensor]):
    w = (2 * torch.randn(5, 3, dtype=torch.float64)).requires_grad_()
    b = torch.randn(5, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    h = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    ell = 1.1 * float(h.detach() * torch.linalg.matrix_norm(w.detach(), 2) ** 2)

    def layer(x: Tensor, w: Tensor, b: Tensor, h: Tensor) -> Tensor:
        return proximal(lambda z: sigma(z @ w.T + b) @ w, x, h, ell, iterations_for(ell, 1e-17))

    assert torch.autograd.gradcheck(layer, (x, w, b, h), eps=1e-5, atol=1e-7, rtol=1e-6)


def test_derivatives_are_those_of_the_solution_even_after_few_iterations():
    # Three iterations leave z far from z*; the derivative is still (I + hH)⁻¹ at the z that was reached.
    diagonal = torch.tensor([0.0, 1.0, 50.0], dtype=torch.float64)
    x = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)
    z = proximal(lambda z: diagonal * z, x, 1.0, 50.0, 3)
    (slope,) = torch.autograd.grad(z.sum(), x)
    torch.testing.assert_close(slope[0], 1 / (1 + diagonal), rtol=1e-12, atol=0)


def test_members_of_a_batch_do_not_touch_each_other():
    w = torch.randn(60, 30, dtype=torch.float64)

    def gradient(z: Tensor) -> Tensor:
        return torch.tanh(z @ w.T) @ w

    def slopes(x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        z = proximal(gradient, x, 1.0, float(torch.linalg.matrix_norm(w, 2)) ** 2, 40)
        return z.detach(), torch.autograd.grad((scales * z).sum(), x)[0] / scales

    # Gradients of very different sizes: a stopping rule over the whole batch would leave the small ones unsolved.
    scales = torch.tensor([1e-12, 1.0, 1e12, 1e-3], dtype=torch.float64)[:, None]
    x = torch.randn(4, 30, dtype=torch.float64) * torch.tensor([1e-6, 1.0, 1e3, 0.0], dtype=torch.float64)[:, None]
    together = slopes(x, scales)
    for i in range(4):
        for ours, alone in zip(together, slopes(x[i : i + 1], scales[i : i + 1]), strict=True):
            torch.testing.assert_close(ours[i], alone[0], rtol=1e-11, atol=1e-13)


# The map


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("ell", [0.3, 10.0, 1e3])
def test_the_proximal_map_is_firmly_nonexpansive_and_its_reflection_nonexpansive(sigma: str, ell: float):
    gradient, x = random_potentials(sigma, ell, count=200)
    y = x + torch.randn_like(x) * torch.logspace(-3, 2, len(x), dtype=torch.float64)[:, None]
    (p, error), (q, other) = solve(gradient, x, ell), solve(gradient, y, ell)
    slack = 2 * (error + other) * ((x - y).norm(dim=1) + error + other) + 1e-12 * (x - y).norm(dim=1) ** 2
    moved, apart = p - q, x - y
    assert bool(((moved * moved).sum(1) <= (moved * apart).sum(1) + slack).all())
    reflected = 2 * moved - apart
    assert bool((reflected.norm(dim=1) ** 2 <= apart.norm(dim=1) ** 2 + 4 * slack).all())


def layer(step: ImplicitEuler | Midpoint, sigma: str = "tanh") -> Flow:
    flow = Flow(ConvexPotential(DenseWeight(4, 12), sigma), step).double().eval()
    with torch.no_grad():
        flow.field.weight.weight.mul_(4)
        flow.field.weight.u.copy_(torch.linalg.svd(flow.field.weight.weight).Vh[0])
    return flow


@pytest.mark.parametrize("sigma", ["relu", "tanh", "softplus"])
def test_the_layers_solve_the_equations_of_their_steps(sigma: str):
    x, h = 3 * torch.randn(20, 4, dtype=torch.float64), 0.7
    implicit = layer(ImplicitEuler(h, iterations=300), sigma)
    z = implicit(x)
    torch.testing.assert_close(z, x + h * implicit.field(z), rtol=0, atol=1e-12)
    midpoint = layer(Midpoint(h, iterations=300), sigma)
    z = midpoint(x)
    torch.testing.assert_close(z, x + h * midpoint.field((x + z) / 2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sigma", ["relu", "tanh", "softplus"])
@pytest.mark.parametrize("kind", [ImplicitEuler, Midpoint])
def test_the_declared_tolerance_covers_what_is_left_unsolved(kind: type, sigma: str):
    short = layer(kind(1.0, iterations=3), sigma)
    exact = Flow(short.field, kind(1.0, iterations=400)).eval()
    bound = lipschitz_bound(short, in_shape=(4,), domain=(-2.0, 2.0))
    assert bound.lipschitz == 1.0
    x = torch.rand(500, 4, dtype=torch.float64) * 4 - 2
    x[:100] = x[:100].sign() * 2  # corners
    left = (short(x) - exact(x)).norm(dim=1).max().item()
    assert 0 < left <= bound.tolerance < math.inf
    wider = lipschitz_bound(short, in_shape=(4,), domain=(-20.0, 20.0))
    assert wider.tolerance >= bound.tolerance


def test_an_estimate_that_is_far_too_low_promises_no_rate(monkeypatch):
    flow = layer(ImplicitEuler(1.0))
    assert lipschitz_bound(flow, in_shape=(4,)).tolerance < 1e-6
    usual = ConvexPotential.smoothness_estimate
    monkeypatch.setattr(ConvexPotential, "smoothness_estimate", lambda *args: 0.7 * usual(*args))
    assert lipschitz_bound(flow, in_shape=(4,)).tolerance == math.inf


@pytest.mark.parametrize(("ell", "iterations"), [(2.0**-6, 100), (1.0, 400), (100.0, 5000)])
def test_more_iterations_than_anyone_needs_do_no_harm(ell, iterations):
    """Aₙ would overflow; the iteration stops before, and so does the rate that is claimed for it."""
    x = torch.linspace(-2, 2, 5, dtype=torch.float64)[None]
    z = proximal(lambda v: ell * v, x, 1.0, ell, iterations)
    torch.testing.assert_close(z, x / (1 + ell), rtol=1e-12, atol=1e-13)
    assert 2.0**-110 < contraction(ell, iterations) < 2.0**-90


def test_second_derivatives_are_refused():
    x = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)
    layer = lipflow.proximal(3, 6, sigma="tanh").double().eval()
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_a_constant_gradient_is_differentiable():
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    proximal(torch.ones_like, x, 1.0, 1.0, 10).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("step", [ImplicitEuler(), Midpoint()])
def test_after_a_layer_that_autocast_has_rounded(step):
    """It is solved, forwards and backwards, in full precision."""
    torch.manual_seed(0)
    first, implicit = lipflow.Sequential(lipflow.cpl_dense(6, 6)), Flow(ConvexPotential(DenseWeight(6, 6)), step)
    x = torch.randn(4, 6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        middle = first(x)
        y = implicit(middle)
    assert (middle.dtype, y.dtype) == (torch.bfloat16, torch.float32)
    y.square().sum().backward()
    given = middle.detach().float().requires_grad_()
    weight = implicit.field.weight.weight
    (expected,) = torch.autograd.grad(implicit.eval()(given).square().sum(), weight)
    torch.testing.assert_close(weight.grad, expected, rtol=1e-3, atol=1e-3)
    assert x.grad is not None
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 alone
        assert implicit.double()(torch.zeros(1, 6, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("step", [ImplicitEuler(iterations=60), Midpoint(iterations=60)])
def test_all_ways_to_differentiate_agree(step):
    torch.manual_seed(0)
    layer = Flow(ConvexPotential(DenseWeight(4, 6), "tanh"), step).double().eval()
    x = torch.randn(1, 4, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(layer, x)
    for way in (torch.func.jacfwd, torch.func.jacrev):
        torch.testing.assert_close(way(layer)(x), expected, rtol=1e-6, atol=1e-7)
    assert float(torch.linalg.matrix_norm(expected[0, :, 0], 2)) <= 1 + 1e-6


def test_backward_within_autocast_is_in_full_precision():
    torch.manual_seed(0)
    layer = Flow(ConvexPotential(DenseWeight(6, 6)), ImplicitEuler()).eval()
    x = torch.randn(4, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
