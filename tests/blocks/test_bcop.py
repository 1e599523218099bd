"""BCOP: Björck's iteration, two-tap convolutions, and orthogonal kernels of any shape."""

import math

import pytest
import torch

import lipflow
from lipflow.blocks.bcop import bjorck, compose_two_taps
from tests.operators.geometry import affine_matrix


@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (9, 4), (4, 9), (5, 1), (1, 1)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_bjorck_converges_to_the_polar_factor(rows, columns, scale):
    u, s, vh = torch.linalg.svd(torch.randn(2, rows, columns, dtype=torch.float64), full_matrices=False)
    m = scale * (u * s.clamp_min(0.05)[:, None]) @ vh
    torch.testing.assert_close(bjorck(m), u @ vh, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("iterations", [1, 5, 20])
def test_bjorck_has_the_singular_values_of_its_recurrence(iterations):
    """s → s(3 - s²)/2, from s/‖(MᵀM)²‖_F^{1/4}."""
    s = torch.tensor([1.0, 0.3, 1e-4], dtype=torch.float64)
    expected = s / (s**8).sum() ** 0.125
    for _ in range(iterations):
        expected = expected * (3 - expected**2) / 2
    values = torch.linalg.svdvals(bjorck(torch.diag(s), iterations))
    torch.testing.assert_close(values, expected.sort(descending=True).values)
    assert float(values.min()) < 0.9  # so the norm must be bounded, and is not 1 by construction


@pytest.mark.parametrize("axis", [0, 1])
def test_turn_composes_with_the_two_tap_convolution(axis):
    q = torch.linalg.qr(torch.randn(4, 2, dtype=torch.float64)).Q
    kernel = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    p, taps = q @ q.T, kernel.movedim(2 + axis, 0)
    expected = torch.zeros(3, *taps.shape[1:], dtype=torch.float64)
    for j, tap in enumerate(taps):
        first = torch.einsum("cd,dmk->cmk", p, tap)
        expected[j] += first
        expected[j + 1] += tap - first
    torch.testing.assert_close(compose_two_taps(kernel, q, axis).movedim(2 + axis, 0), expected)


@pytest.mark.parametrize(("into", "out"), [(3, 3), (1, 4), (4, 1), (2, 5), (1, 1)])
@pytest.mark.parametrize("kernel_size", [1, 2, 3, 4, (1, 3), (4, 2)])
def test_kernels_of_every_shape_are_orthogonal(into, out, kernel_size):
    layer = lipflow.bcop_conv(into, out, kernel_size, bias=False).double()
    height, width = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
    kernel = layer.weight.kernel().detach()
    assert kernel.shape == (out, into, height, width)
    assert layer.weight.halves.shape == (height + width - 2, max(into, out), max(into, out) // 2)
    x = torch.randn(1, into, 3, 5, dtype=torch.float64)
    norm, expected = float(layer(x).detach().norm()), float(x.norm())
    assert norm <= expected * (1 + 1e-12)
    assert norm >= expected * (1 - 1e-12) or out < into
    if isinstance(kernel_size, int) and into > 1 and out > 1:
        assert bool((kernel.flatten(2).norm(dim=(0, 1)) > 1e-3).all()), "every tap is used"


def test_the_bound_covers_the_error_of_one_iteration():
    layer = lipflow.bcop_conv(3, 3, 2, iterations=1, bias=False).double()
    bound = lipflow.lipschitz_bound(layer, in_shape=(3, 4, 4)).lipschitz
    assert float(torch.linalg.matrix_norm(affine_matrix(layer, (3, 4, 4)), 2)) == pytest.approx(bound, rel=1e-8)
    assert not math.isclose(bound, 1, rel_tol=1e-3)


@pytest.mark.parametrize(
    ("make", "shape"), [(lambda: lipflow.bcop_conv(3, 8), (3, 8, 8)), (lambda: lipflow.bjorck_dense(6, 4), (6,))]
)
def test_autocast_does_not_round_the_weight(make, shape):
    weight, x = make().train().weight, torch.zeros(1, *shape)
    expected = weight(x).weight
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(weight(x).weight, expected)
