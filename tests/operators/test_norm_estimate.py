"""norm_estimate is from below, converges to the norm, has the gradient v uᵀ, and works at every scale."""

import math
import random

import pytest
import torch
from torch import Tensor

from lipflow import ConvOperator, DenseOperator, norm_estimate
from lipflow.operators.norm import power_iteration, start_vector, top_singular_vector
from tests.operators.geometry import draw_geometry, matrix_of


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(40))
def test_norm_estimate_is_never_above_the_norm(seed):
    geometry = draw_geometry(random.Random(seed).randint)
    op = geometry.conv(gaussian(*geometry.kernel_shape, seed=seed))
    norm = float(torch.linalg.matrix_norm(geometry.matrix(op.kernel), 2))
    # The product, the norm and the SVD round, each by at most γ of the number of entries.
    rounding = 16 * (math.prod(op.in_shape) + math.prod(op.out_shape)) * 2.0**-53
    estimates = [float(norm_estimate(op, iterations=n)) for n in (0, 1, 10, 100)]
    assert max(estimates) <= norm * (1 + rounding)
    # Power iteration on WᵀW never decreases ‖Wu‖.
    assert estimates == sorted(estimates) or max(estimates) == pytest.approx(min(estimates), rel=1e-12)


@pytest.mark.parametrize(
    "op",
    [
        DenseOperator(gaussian(6, 9)),
        ConvOperator(gaussian(3, 2, 3, 3), (5, 4), padding="same", padding_mode="circular", stride=2),
    ],
)
def test_norm_estimate_converges_to_the_norm(op):
    norm = float(torch.linalg.matrix_norm(matrix_of(op), 2))
    assert float(norm_estimate(op, iterations=2000)) == pytest.approx(norm, rel=1e-12)
    u = power_iteration(op, start_vector(op.in_shape, op.weight), 2000)
    assert float(norm_estimate(op, u, iterations=0)) == pytest.approx(norm, rel=1e-12)
    assert float(u.norm()) == pytest.approx(1.0, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norm_estimate_is_zero_with_a_finite_gradient_where_the_operator_vanishes(dtype):
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
        assert bool(torch.isfinite(weight.grad).all())
    assert torch.equal(power_iteration(DenseOperator(one.detach()), u, 3), u)


def test_norm_estimate_is_deterministic_and_does_not_use_the_global_generator():
    op = ConvOperator(gaussian(3, 2, 3, 3), (5, 4))
    state = torch.get_rng_state()
    first = norm_estimate(op)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(norm_estimate(op), first)


@pytest.mark.parametrize("seed", range(6))
def test_norm_estimate_has_the_gradient_of_the_singular_value(seed):
    geometry = draw_geometry(random.Random(seed).randint)
    kernel = gaussian(*geometry.kernel_shape, seed=seed).requires_grad_()
    estimate = norm_estimate(geometry.conv(kernel), iterations=3000)
    norm = torch.linalg.svdvals(geometry.matrix(kernel))[0]
    (ours,), (autograd,) = (torch.autograd.grad(value, kernel) for value in (estimate, norm))
    torch.testing.assert_close(ours, autograd, rtol=0, atol=1e-7 * float(autograd.abs().max()))


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        *((torch.float64, scale) for scale in (1e-310, 1e-300, 1e-170, 1e170, 1e300)),
        *((torch.float32, scale) for scale in (1e-40, 1e-30, 1e30)),
        *((torch.float16, scale) for scale in (1e-4, 1e3)),
        (torch.bfloat16, 1e-30),
    ],
)
def test_norm_estimate_scales_without_under_or_overflow(dtype, scale):
    """Squares of these numbers are 0 or ∞, but the estimate and its gradient are not."""
    info = torch.finfo(dtype)
    accuracy = 2 * max(info.eps, info.smallest_normal * info.eps / scale) ** 0.5
    dense, kernel = gaussian(4, 5).to(dtype), gaussian(2, 3, 3, 3).to(dtype)
    for weight, make in ((dense, DenseOperator), (kernel, lambda k: ConvOperator(k, (4, 4)))):
        scaled = (weight.double() * scale).to(dtype).requires_grad_()
        estimate = norm_estimate(make(scaled))
        estimate.backward()
        expected = scale * float(norm_estimate(make(weight.double())))
        assert float(estimate.detach()) == pytest.approx(expected, rel=min(accuracy, 0.1))
        assert bool(torch.isfinite(scaled.grad).all())
        assert float(scaled.grad.double().norm()) > 0.1


def test_norm_estimate_rejects_start_vectors_of_another_shape():
    with pytest.raises(ValueError, match=r"shape \(4,\); DenseOperator\(3 → 2\) takes \(3,\)"):
        norm_estimate(DenseOperator(torch.ones(2, 3)), torch.ones(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ratio", [1.0, 1.01, 2.0, 1e6])
def test_top_singular_vector_is_found_from_an_orthogonal_start(ratio, dtype):
    """The start is exactly the second singular vector, so power iteration would never find the first."""
    weight = torch.cat([torch.tensor([ratio, 1.0]), torch.linspace(0.9, 0.1, 198)]).to(dtype).diag()
    start = torch.zeros(200, dtype=dtype)
    start[1] = 1
    u = top_singular_vector(DenseOperator(weight), start)
    assert float(u.norm()) == pytest.approx(1, rel=1e-6)
    assert float((weight @ u).norm()) == pytest.approx(ratio, rel=1e-6)


@pytest.mark.parametrize("scale", [1e-170, 1e170])
def test_top_singular_vector_is_found_at_every_scale(scale):
    weight = gaussian(40, 60)
    u = top_singular_vector(DenseOperator(scale * weight), torch.ones(60, dtype=torch.float64))
    assert float((weight @ u).norm()) == pytest.approx(float(torch.linalg.matrix_norm(weight, 2)), rel=1e-12)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_top_singular_vector_is_the_start_if_there_is_none(value):
    start = torch.ones(3) / 3**0.5
    assert torch.equal(top_singular_vector(DenseOperator(torch.full((2, 3), value)), start), start)
