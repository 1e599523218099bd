"""The field × step table: the exact matrix and constant of each layer, and the layers that are refused."""

import math

import pytest
import torch

import lipflow
from lipflow import (
    ConvexPlusSkew,
    ConvexPotential,
    ConvWeight,
    DenseWeight,
    ExplicitEuler,
    Exponential,
    Flow,
    ImplicitEuler,
    Midpoint,
    Nonlinearity,
    Potential,
    Skew,
    Split,
)
from tests.operators.geometry import affine_matrix

SKEW = {
    "dense": (lambda: DenseWeight(5, 5), (5,)),
    "conv": (lambda: ConvWeight(2, 2, padding_mode="circular"), (2, 4, 5)),
    "conv, dilated": (lambda: ConvWeight(2, 2, 3, padding_mode="circular", dilation=2), (2, 5, 6)),
    "conv, grouped": (lambda: ConvWeight(4, 4, (1, 3), padding_mode="circular", groups=2), (4, 3, 5)),
}


@pytest.mark.parametrize("kind", SKEW)
@pytest.mark.parametrize("h", [0.5, 2.0])
def test_steps_of_a_skew_field_are_exact(kind, h):
    weight, shape = SKEW[kind]
    field = Skew(weight().double())
    a = affine_matrix(field, shape)
    torch.testing.assert_close(a, -a.T)
    eye = torch.eye(len(a), dtype=torch.float64)
    expected = {
        ExplicitEuler(h, expand=True): eye + h * a,
        ImplicitEuler(h): torch.linalg.inv(eye - h * a),
        Midpoint(h): torch.linalg.solve(eye - h / 2 * a, eye + h / 2 * a),
        Exponential(h, terms=30): torch.linalg.matrix_exp(h * a),
    }
    for step, matrix in expected.items():
        layer = Flow(field, step).eval()
        torch.testing.assert_close(affine_matrix(layer, shape), matrix, rtol=1e-10, atol=1e-10)
        values = torch.linalg.svdvals(affine_matrix(layer, shape))
        bound = lipflow.lipschitz_bound(layer, shape).lipschitz
        assert float(values.max()) <= bound * (1 + 1e-12)
        if isinstance(step, ExplicitEuler) and kind == "dense":
            assert bound == pytest.approx(float(values.max()), rel=1e-8)
        if isinstance(step, Midpoint):
            assert float(values.min()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("terms", [1, 2, 3, 5])
def test_the_bound_of_a_series_covers_its_remainder(terms):
    """A rotation by θ: the series is Σ (iθ)ʲ/j!, and its norm is the modulus."""
    weight, theta = DenseWeight(2, 2).double(), 1.3
    weight.weight.data = torch.tensor([[0.0, theta], [-theta, 0.0]], dtype=torch.float64)
    layer = Flow(Skew(weight), Exponential(1.0, terms)).eval()
    norm = float(torch.linalg.matrix_norm(affine_matrix(layer, (2,)), 2))
    exact = abs(sum((1j * theta) ** j / math.factorial(j) for j in range(terms)))
    assert norm == pytest.approx(exact, rel=1e-12)
    assert norm <= lipflow.lipschitz_bound(layer, (2,)).lipschitz <= 1 + theta**terms / math.factorial(terms) + 1e-8


@pytest.mark.parametrize("h", [0.3, 1.0, 4.0])
def test_steps_of_a_quadratic_potential_are_exact(h):
    """f(x) = ½xᵀHx: every step is a rational function of H."""
    q = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    hessian = q @ torch.diag(torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=torch.float64)) @ q.T
    gradient = torch.nn.Linear(4, 4, bias=False).double()
    gradient.weight.data = hessian
    field = Potential(gradient, smoothness=2.0)
    eye = torch.eye(4, dtype=torch.float64)
    expected = {
        ExplicitEuler(h): (eye - h * hessian, max(1.0, 2 * h - 1)),
        ImplicitEuler(h): (torch.linalg.inv(eye + h * hessian), 1.0),
        Midpoint(h): (torch.linalg.solve(eye + h / 2 * hessian, eye - h / 2 * hessian), 1.0),
    }
    for step, (matrix, constant) in expected.items():
        layer = Flow(field, step)
        bound = lipflow.lipschitz_bound(layer, (4,), domain=(-2.0, 2.0))
        assert bound.lipschitz == pytest.approx(constant)
        error = float(torch.linalg.matrix_norm(affine_matrix(layer, (4,)) - matrix, 2))
        assert error <= 4 * bound.tolerance + 1e-12
        assert float(torch.linalg.matrix_norm(matrix, 2)) <= bound.lipschitz + 1e-12


@pytest.mark.parametrize("sigma", ["relu", "softplus", "tanh", "sigmoid", "hardtanh"])
def test_nonlinearities_have_their_slopes_and_bounds(sigma):
    function, low, high, sup = lipflow.flows.NONLINEARITIES[sigma]
    x = torch.linspace(-60, 60, 200_001, dtype=torch.float64)
    slopes = function(x).diff() / x.diff()
    assert float(slopes.min()) >= low - 1e-9
    assert high - 1e-3 <= float(slopes.max()) <= high + 1e-9
    assert float(function(x).abs().max()) <= sup


def test_cpl_dense_is_the_formula_of_the_paper():
    layer = lipflow.cpl_dense(6, 4).double().eval()
    w, b = layer.field.weight.weight, layer.field.bias
    x = torch.randn(3, 6, dtype=torch.float64)
    norm = torch.linalg.matrix_norm(w, 2)
    torch.testing.assert_close(layer(x), x - 2 / norm**2 * torch.relu(x @ w.T + b) @ w)


def test_the_constants_of_split_multiply():
    convex, skew = ConvexPotential(DenseWeight(5, 7)), Skew(DenseWeight(5, 5))
    first, second = ExplicitEuler(3.0), ExplicitEuler(1.0, expand=True)
    x = torch.randn(4, 5)
    both = Flow(ConvexPlusSkew(convex, skew), Split(first, second))
    torch.testing.assert_close(both(x), Flow(skew, second)(Flow(convex, first)(x)))
    one, other = (lipflow.lipschitz_bound(Flow(*pair), (5,)).lipschitz for pair in ((convex, first), (skew, second)))
    bound = lipflow.lipschitz_bound(both, (5,))
    assert one > 1
    assert one * other * (1 - 1e-15) <= bound.lipschitz <= one * other * (1 + 1e-12)
    assert bound.tolerance == 0
    torch.testing.assert_close(ConvexPlusSkew(convex, skew)(x), convex(x) + skew(x))


def _convex() -> ConvexPotential:
    return ConvexPotential(DenseWeight(3, 3))


def _skew(**options) -> Skew:
    return Skew(ConvWeight(3, 3, **options)) if options else Skew(DenseWeight(3, 3))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Flow(_convex(), Exponential()), TypeError, "closed form"),
        (lambda: Flow(_skew(), ExplicitEuler(1.0)), TypeError, "stretch"),
        (lambda: Flow(_skew(), ExplicitEuler(expand=True)), TypeError, "give h"),
        (lambda: Flow(ConvexPlusSkew(_convex(), _skew()), Midpoint()), TypeError, "Split"),
        (lambda: Flow(_convex(), Split(ExplicitEuler(), Midpoint())), TypeError, "ConvexPlusSkew"),
        (lambda: Flow(_skew(padding_mode="zeros"), Midpoint()), TypeError, "circular"),
        (lambda: Flow(_skew(kernel_size=2), Exponential()), ValueError, "2×2"),
        (lambda: Flow(_skew(stride=2), Exponential()), ValueError, "stride 1"),
        (lambda: Flow(_skew(padding=0), Exponential()), ValueError, "padding 'same'"),
        (lambda: Skew(DenseWeight(3, 4)), ValueError, "maps 3 to 4"),
        (lambda: Flow(torch.nn.ReLU(), Midpoint()), TypeError, "a field is .* not ReLU"),
        (lambda: Flow(_convex(), 0.5), TypeError, "a step is .* not 0.5"),
        (lambda: ExplicitEuler(-1.0), ValueError, "above 0, not -1.0"),
        (lambda: ExplicitEuler(math.nan), ValueError, "above 0, not nan"),
        (lambda: ImplicitEuler(iterations=0), ValueError, "at least 1 and at most 10000, not 0"),
        (lambda: Exponential(terms=0), ValueError, "at least 1 and at most 10000, not 0"),
        (lambda: ConvexPotential(DenseWeight(3, 3), "gelu"), ValueError, "sigma is one of relu, .* not 'gelu'"),
        (lambda: ConvexPotential(DenseWeight(3, 3), Nonlinearity(torch.neg, -1, -1)), ValueError, "where σ decreases"),
        (lambda: Potential(torch.nn.Identity(), math.inf), ValueError, "finite number of at least 0, not inf"),
    ],
)
def test_unsupported_pairs_and_wrong_arguments_are_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()
