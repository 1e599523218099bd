"""norm_estimate is from below, finds the norm, has the gradient v uᵀ, and survives every scale."""

import math
import random

import pytest
import torch
from torch import Tensor

from lipflow import ConvOperator, DenseOperator, norm_estimate
from lipflow.operators.norm import power_iteration, start_vector, top_singular_vector
from tests.operators.geometry import draw_geometry, matrix_of


@pytest.mark.parametrize("seed", range(40))
def test_the_estimate_is_never_above_the_norm(seed):
    geometry = draw_geometry(random.Random(seed).randint)
    op = geometry.conv(gaussian(*geometry.kernel_shape, seed=seed))
    norm = float(torch.linalg.matrix_norm(geometry.matrix(op.kernel), 2))
    # One product and one norm round, by at most γ of the number of entries, and so does the SVD.
    rounding = 16 * (math.prod(op.in_shape) + math.prod(op.out_shape)) * 2.0**-53
    estimates = [float(norm_estimate(op, iterations=n)) for n in (0, 1, 10, 100)]
    assert max(estimates) <= norm * (1 + rounding)
    # Each iteration can only gain: power iteration on WᵀW increases ‖Wu‖.
    assert estimates == sorted(estimates) or max(estimates) == pytest.approx(min(estimates), rel=1e-12)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_estimate_converges_to_the_norm_from_any_start():
    conv = ConvOperator(gaussian(3, 2, 3, 3), (5, 4), padding="same", padding_mode="circular", stride=2)
    for op in (DenseOperator(gaussian(6, 9)), conv):
        norm = float(torch.linalg.matrix_norm(matrix_of(op), 2))
        assert float(norm_estimate(op, iterations=2000)) == pytest.approx(norm, rel=1e-12)
        u = power_iteration(op, start_vector(op.in_shape, op.weight), 2000)
        assert float(norm_estimate(op, u, iterations=0)) == pytest.approx(norm, rel=1e-12)
        assert float(u.norm()) == pytest.approx(1.0, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_the_operator_vanishes_the_estimate_is_zero_and_has_no_nan_gradient(dtype):
    dense, conv = torch.zeros(3, 4, dtype=dtype), torch.zeros(2, 3, 3, 3, dtype=dtype)
    one, u = torch.diag(torch.tensor([1.0, 0.0], dtype=dtype)), torch.tensor([0.0, 1.0], dtype=dtype)
    for weight, make, start in (
        (dense, DenseOperator, None),
        (conv, lambda k: ConvOperator(k, (4, 4)), None),
        (one, DenseOperator, u),
    ):
        estimate = norm_estimate(make(weight.requires_grad_()), start)
        estimate.backward()
        assert float(estimate.detach()) == 0.0
        assert weight.grad is not None
        assert bool(torch.isfinite(weight.grad).all())
    assert torch.equal(power_iteration(DenseOperator(one.detach()), u, 3), u)
    assert float(start_vector((3, 4, 5), dense).double().norm()) == pytest.approx(1.0, rel=1e-6)
    assert start_vector((3, 4, 5), dense).dtype == dtype


def test_the_estimate_is_deterministic_and_leaves_the_generator_alone():
    op = ConvOperator(gaussian(3, 2, 3, 3), (5, 4))
    torch.manual_seed(1)
    first, state = norm_estimate(op), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(norm_estimate(op), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("seed", range(6))
def test_the_gradient_of_a_convolution_is_that_of_its_singular_value(seed):
    geometry = draw_geometry(random.Random(seed).randint)
    kernel = gaussian(*geometry.kernel_shape, seed=seed).requires_grad_()
    estimate = norm_estimate(geometry.conv(kernel), iterations=3000)
    norm = torch.linalg.svdvals(geometry.matrix(kernel))[0]
    (ours,), (autograd,) = (torch.autograd.grad(value, kernel) for value in (estimate, norm))
    torch.testing.assert_close(ours, autograd, rtol=0, atol=1e-7 * float(autograd.abs().max()))


def test_few_iterations_have_the_exact_gradient_of_what_they_compute():
    """‖Wu‖ with u held: what the estimate is, differentiated as it is, near the norm or not."""
    weight = gaussian(4, 3).requires_grad_()
    u = power_iteration(DenseOperator(weight), start_vector((3,), weight), 2)
    assert torch.autograd.gradcheck(lambda w: norm_estimate(DenseOperator(w), u, iterations=0), weight)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float64, 1e-310),
        (torch.float64, 1e-300),
        (torch.float64, 1e-170),
        (torch.float64, 1e170),
        (torch.float64, 1e300),
        (torch.float32, 1e-40),
        (torch.float32, 1e-30),
        (torch.float32, 1e30),
        (torch.float16, 1e-4),
        (torch.float16, 1e3),
        (torch.bfloat16, 1e-30),
    ],
)
def test_the_estimate_scales_without_under_or_overflow(dtype, scale):
    """Squares of these numbers are 0 or ∞; the estimate is neither, and its gradient is finite."""
    accuracy = (
        2 * max(torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / scale) ** 0.5
    )
    dense = gaussian(4, 5).to(dtype)
    kernel = gaussian(2, 3, 3, 3).to(dtype)
    for weight, build in ((dense, DenseOperator), (kernel, lambda k: ConvOperator(k, (4, 4)))):
        scaled = (weight.double() * scale).to(dtype).requires_grad_()
        estimate = norm_estimate(build(scaled))
        estimate.backward()
        expected = scale * float(norm_estimate(build(weight.double())))
        assert float(estimate.detach()) == pytest.approx(expected, rel=min(accuracy, 0.1))
        assert scaled.grad is not None
        assert bool(torch.isfinite(scaled.grad).all())
        assert float(scaled.grad.double().norm()) > 0.1


def test_a_start_vector_of_another_shape_is_refused_with_both_shapes():
    with pytest.raises(ValueError, match=r"shape \(4,\); DenseOperator\(3 → 2\) takes \(3,\)"):
        norm_estimate(DenseOperator(torch.ones(2, 3)), torch.ones(4))
    with pytest.raises(ValueError, match=r"shape \(1, 3, 4, 4\); ConvOperator.* takes \(3, 4, 4\)"):
        norm_estimate(ConvOperator(torch.ones(2, 3, 3, 3), (4, 4)), torch.ones(1, 3, 4, 4))


def test_the_start_vector_is_a_unit_vector_in_the_dtype_of_the_weights():
    for dtype in (torch.float32, torch.float64):
        u = start_vector((3, 4, 5), torch.empty(0, dtype=dtype))
        assert u.dtype == dtype
        assert float(u.double().norm()) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ratio", [1.0, 1.01, 2.0, 1e6])
def test_the_top_singular_vector_is_found_from_another_one(ratio, dtype):
    """The start is the second singular vector to the last bit, in which no power of WᵀW has anything of the first."""
    weight = torch.cat([torch.tensor([ratio, 1.0]), torch.linspace(0.9, 0.1, 198)]).to(dtype).diag()
    start = torch.zeros(200, dtype=dtype)
    start[1] = 1
    u = top_singular_vector(DenseOperator(weight), start)
    assert float(u.norm()) == pytest.approx(1, rel=1e-6)
    assert float((weight @ u).norm()) == pytest.approx(ratio, rel=1e-6)


@pytest.mark.parametrize("scale", [1e-170, 1e170])
def test_the_top_singular_vector_knows_no_scale(scale):
    torch.manual_seed(0)
    weight = torch.randn(40, 60, dtype=torch.float64)
    u = top_singular_vector(DenseOperator(scale * weight), torch.ones(60, dtype=torch.float64))
    assert float((weight @ u).norm()) == pytest.approx(float(torch.linalg.matrix_norm(weight, 2)), rel=1e-12)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_where_there_is_no_top_singular_vector_the_start_stays(value):
    start = torch.ones(3) / 3**0.5
    assert torch.equal(top_singular_vector(DenseOperator(torch.full((2, 3), value)), start), start)
