"""The proximal solver: its a-priori rate, its derivatives, and the properties of the proximal map.

All tests are in float64. Exact solutions are closed forms, or long runs with a residual r: as I + h∇f is 1-strongly
monotone, ‖z - z*‖ ≤ ‖r‖.
"""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import lipflow
from lipflow.bound import lipschitz_bound
from lipflow.flows import ConvexPotential, DenseWeight, Flow, ImplicitEuler, Midpoint
from lipflow.flows.proximal import contraction, iterations_for, proximal

Gradient = Callable[[Tensor], Tensor]

ELLS = [2.0**-6, 0.3, 1.0, 10.0, 100.0, 1e4]
ITERATIONS = [1, 2, 3, 5, 10, 30, 100]
SIGMAS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "tanh": torch.tanh, "identity": lambda y: y}


def random_potentials(sigma: str, ell: float, count: int = 40) -> tuple[Gradient, Tensor]:
    """∇f(z) = Wᵀσ(Wz + b) for many W with ‖W‖² = ℓ, and starts around their kinks."""
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


def solve(gradient: Gradient, x: Tensor, ell: float) -> tuple[Tensor, Tensor]:
    """z by a long run, and a bound on its distance from z* for each member of the batch."""
    with torch.no_grad():
        z = proximal(gradient, x, 1.0, ell, iterations_for(ell, 1e-17))
        return z, (z + gradient(z) - x).norm(dim=1)


# The rate


def runs(gradient: Gradient, x: Tensor, ell: float) -> Iterator[tuple[float, Tensor]]:
    """The contraction and z after some iterations, while the contraction is far above rounding."""
    for n in ITERATIONS:
        if contraction(ell, n) > 1e-10:
            yield contraction(ell, n), proximal(gradient, x, 1.0, ell, n)


def kinked_potentials(sigma: str, ell: float) -> tuple[Gradient, Tensor]:
    """f' = ℓσ(z - b) - c in one dimension, for a grid of kinks b and of distances of the start from z*."""
    grid = torch.linspace(-3, 3, 61, dtype=torch.float64)
    b, c = (t.reshape(-1, 1) for t in torch.meshgrid(grid, grid * (1 + ell), indexing="ij"))
    return lambda z: ell * SIGMAS[sigma](z - b) - c, torch.zeros_like(b)


@pytest.mark.parametrize("ell", ELLS)
@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("potentials", [kinked_potentials, random_potentials])
def test_contraction_bounds_the_error(
    potentials: Callable[[str, float], tuple[Gradient, Tensor]], sigma: str, ell: float
):
    gradient, x = potentials(sigma, ell)
    best, residual = solve(gradient, x, ell)
    rounding = 1e-11 * (1 + x.norm(dim=1) + best.norm(dim=1))
    assert bool((residual <= (1 + ell) * rounding).all())
    for factor, z in runs(gradient, x, ell):
        allowed = factor * ((x - best).norm(dim=1) + residual) + residual + rounding
        assert bool(((z - best).norm(dim=1) <= allowed).all())


@pytest.mark.parametrize("ell", ELLS)
def test_contraction_is_attained_by_quadratics(ell: float):
    # ∇f(z) = λz - 1 with λ over the whole spectrum [0, ℓ], both ends included: z* = (x + 1)/(1 + λ).
    ends = torch.linspace(0, ell, 2001, dtype=torch.float64), ell * torch.logspace(-8, 0, 2001, dtype=torch.float64)
    eigenvalues = torch.cat(ends)[:, None]
    x, exact = torch.zeros_like(eigenvalues), 1 / (1 + eigenvalues)
    for factor, z in runs(lambda z: eigenvalues * z - 1, x, ell):
        ratio = ((z - exact).abs() / exact).max().item()
        # The bound is exact on quadratics (Taylor and Drori, Lemma 2).
        assert factor * (1 - 1e-3) - 1e-12 <= ratio <= factor + 1e-12


@pytest.mark.parametrize("ell", [0.0, *ELLS])
@pytest.mark.parametrize("factor", [1.0, 0.5, 1e-3, 2.0**-26, 1e-15])
def test_iterations_for_is_the_least_number_for_the_factor(ell: float, factor: float):
    n = iterations_for(ell, factor)
    assert contraction(ell, n) <= factor * (1 + 1e-12)
    assert n == 0 or contraction(ell, n - 1) > factor


@pytest.mark.parametrize("ell", [-1.0, math.inf, math.nan])
def test_contraction_refuses_a_negative_or_infinite_smoothness(ell: float):
    with pytest.raises(ValueError, match="smoothness"):
        contraction(ell, 3)


# The derivatives


def test_derivatives_are_those_of_the_exact_map_after_few_iterations():
    # Three iterations leave z far from z*; the derivative is still (I + hH)⁻¹ at the z that was reached.
    diagonal = torch.tensor([0.0, 1.0, 50.0], dtype=torch.float64)
    x = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)
    z = proximal(lambda z: diagonal * z, x, 1.0, 50.0, 3)
    (slope,) = torch.autograd.grad(z.sum(), x)
    torch.testing.assert_close(slope[0], 1 / (1 + diagonal), rtol=1e-12, atol=0)


@pytest.mark.parametrize("sigma", [torch.tanh, torch.sigmoid])
def test_derivatives_in_the_input_the_step_and_the_parameters(sigma: Callable[[Tensor], Tensor]):
    w = (2 * torch.randn(5, 3, dtype=torch.float64)).requires_grad_()
    b, x = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5,), (2, 3)))
    h = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    ell = 1.1 * float(h.detach() * torch.linalg.matrix_norm(w.detach(), 2) ** 2)

    def step(x: Tensor, w: Tensor, b: Tensor, h: Tensor) -> Tensor:
        return proximal(lambda z: sigma(z @ w.T + b) @ w, x, h, ell, iterations_for(ell, 1e-17))

    assert torch.autograd.gradcheck(step, (x, w, b, h), eps=1e-5, atol=1e-7, rtol=1e-6)


def test_derivatives_of_images_are_independent():
    """Gradients have very different sizes: one stopping rule for the batch would leave the small ones unsolved."""
    w = torch.randn(60, 30, dtype=torch.float64)

    def slopes(x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        z = proximal(lambda z: torch.tanh(z @ w.T) @ w, x, 1.0, float(torch.linalg.matrix_norm(w, 2)) ** 2, 40)
        return z.detach(), torch.autograd.grad((scales * z).sum(), x)[0] / scales

    scales = torch.tensor([1e-12, 1.0, 1e12, 1e-3], dtype=torch.float64)[:, None]
    x = torch.randn(4, 30, dtype=torch.float64) * torch.tensor([1e-6, 1.0, 1e3, 0.0], dtype=torch.float64)[:, None]
    together = slopes(x, scales)
    for i in range(4):
        for ours, alone in zip(together, slopes(x[i : i + 1], scales[i : i + 1]), strict=True):
            torch.testing.assert_close(ours[i], alone[0], rtol=1e-11, atol=1e-13)


# The map and the layers


def layer(step: ImplicitEuler | Midpoint, sigma: str = "tanh") -> Flow:
    flow = Flow(ConvexPotential(DenseWeight(4, 12), sigma), step).double().eval()
    with torch.no_grad():
        flow.field.weight.weight.mul_(4)
    flow.field.weight.reset_estimate()
    return flow


@pytest.mark.parametrize("sigma", ["relu", "tanh", "softplus"])
def test_layers_solve_the_equations_of_their_steps(sigma: str):
    x, h = 3 * torch.randn(20, 4, dtype=torch.float64), 0.7
    implicit, midpoint = (layer(kind(h, iterations=300), sigma) for kind in (ImplicitEuler, Midpoint))
    z = implicit(x)
    torch.testing.assert_close(z, x + h * implicit.field(z), rtol=0, atol=1e-12)
    z = midpoint(x)
    torch.testing.assert_close(z, x + h * midpoint.field((x + z) / 2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sigma", ["relu", "tanh", "softplus"])
@pytest.mark.parametrize("kind", [ImplicitEuler, Midpoint])
@pytest.mark.parametrize("domain", [(-3.0, 5.0), (0.0, 1.0), (-1e-9, 1e-9)])  # in the last, ∇f is its biases
def test_the_tolerance_of_the_bound_covers_the_error_of_few_iterations(
    kind: type, domain: tuple[float, float], sigma: str
):
    short = layer(kind(1.0, iterations=3), sigma)
    with torch.no_grad():
        short.field.bias.fill_(1.0)
    exact = Flow(short.field, kind(1.0, iterations=400)).eval()
    bound = lipschitz_bound(short, (4,), domain)
    assert bound.lipschitz == 1.0
    low, high = domain
    x = torch.rand(500, 4, dtype=torch.float64)
    x[:100] = x[:100].round()  # corners
    x = low + (high - low) * x
    error = (short(x) - exact(x)).norm(dim=1).max().item()
    assert 0 < error <= bound.tolerance < math.inf
    wider = lipschitz_bound(short, (4,), (low - 1, high + 1)).tolerance
    assert wider > bound.tolerance or sigma == "tanh"  # which is bounded, and so is ∇f


def test_a_reflection_has_twice_the_tolerance_of_its_implicit_step():
    implicit = layer(ImplicitEuler(1.0, iterations=3))
    midpoint = Flow(implicit.field, Midpoint(2.0, iterations=3)).eval()
    one, two = (lipschitz_bound(flow, in_shape=(4,)).tolerance for flow in (implicit, midpoint))
    assert two == 2 * one


def test_the_tolerance_is_infinite_if_the_estimate_is_far_too_low(monkeypatch):
    flow = layer(ImplicitEuler(1.0))
    assert lipschitz_bound(flow, in_shape=(4,)).tolerance < 1e-6
    usual = ConvexPotential.smoothness_estimate
    monkeypatch.setattr(ConvexPotential, "smoothness_estimate", lambda *args: 0.7 * usual(*args))
    assert lipschitz_bound(flow, in_shape=(4,)).tolerance == math.inf


@pytest.mark.parametrize(("ell", "iterations"), [(2.0**-6, 100), (1.0, 400), (100.0, 5000)])
def test_very_many_iterations_do_not_overflow(ell, iterations):
    """Aₙ would overflow, so the iteration stops before, and so does `contraction`."""
    x = torch.linspace(-2, 2, 5, dtype=torch.float64)[None]
    z = proximal(lambda v: ell * v, x, 1.0, ell, iterations)
    torch.testing.assert_close(z, x / (1 + ell), rtol=1e-12, atol=1e-13)
    assert 2.0**-110 < contraction(ell, iterations) < 2.0**-90


def test_second_derivatives_and_batches_of_gradients_are_refused():
    x = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)
    layer = lipflow.proximal(3, 6, sigma="tanh").double().eval()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="vectorize"):
        torch.autograd.functional.jacobian(layer, x, vectorize=True)


def test_a_constant_gradient_is_differentiable():
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    proximal(torch.ones_like, x, 1.0, 1.0, 10).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("step", [ImplicitEuler(), Midpoint()])
def test_autocast_rounds_neither_the_solution_nor_its_gradient(step):
    first, implicit = lipflow.Sequential(lipflow.cpl_dense(6, 6)), Flow(ConvexPotential(DenseWeight(6, 6)), step).eval()
    x, weight = torch.randn(4, 6, requires_grad=True), implicit.field.weight.weight
    with torch.autocast("cpu", torch.bfloat16):
        middle = first(x)
        y = implicit(middle)
        z = implicit(x)
        (slope,) = torch.autograd.grad(z.square().sum(), x)
    assert (middle.dtype, y.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(slope, torch.autograd.grad(implicit(x).square().sum(), x)[0], rtol=1e-5, atol=1e-6)
    found, through = torch.autograd.grad(y.square().sum(), (weight, x))
    (expected,) = torch.autograd.grad(implicit(middle.detach().float()).square().sum(), weight)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert bool(through.any())
    with torch.autocast("cpu", torch.bfloat16):
        assert implicit.double()(torch.zeros(1, 6, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("step", [ImplicitEuler(iterations=60), Midpoint(iterations=60)])
def test_reverse_and_forward_mode_agree(step):
    layer = Flow(ConvexPotential(DenseWeight(4, 6), "tanh"), step).double().eval()
    x = torch.randn(1, 4, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(layer, x)
    for way in (torch.func.jacfwd, torch.func.jacrev):
        torch.testing.assert_close(way(layer)(x), expected, rtol=1e-6, atol=1e-7)
    assert float(torch.linalg.matrix_norm(expected[0, :, 0], 2)) <= 1 + 1e-6
