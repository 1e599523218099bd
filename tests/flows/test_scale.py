"""Scales: the four reshapings and the norms that they bound, and the learned scale."""

import math
import random

import pytest
import torch

import lipflow
from lipflow.flows import ConvWeight, DenseWeight, LearnedScale, ReshapedScale, Skew
from lipflow.flows.scale import reshapings
from tests.operators.geometry import draw_geometry


def norm(matrix: torch.Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


@pytest.mark.parametrize("seed", range(30))
def test_reshapings_bound_every_convolution(seed):
    """‖W‖ ≤ √(hw)·min of the four, for zero padding, any stride, dilation and groups, on inputs of any size."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    drawn = (draw_geometry(rng.randint, side=4, channels=3) for _ in range(100))
    geometry = next(g for g in drawn if g.mode == "zeros" and min(g.outputs) >= 1)
    kernel = torch.randn(geometry.kernel_shape, generator=generator, dtype=torch.float64)
    least = min(map(norm, reshapings(kernel)))
    assert norm(geometry.matrix(kernel)) <= math.sqrt(kernel[0, 0].numel()) * least * (1 + 1e-12)


def test_reshapings_of_a_skew_kernel_are_equal_in_pairs():
    kernel = torch.randn(4, 4, 3, 5, dtype=torch.float64)
    a, b, c, d = map(norm, reshapings(kernel - kernel.transpose(0, 1).flip(2, 3)))
    assert a == pytest.approx(b)
    assert c == pytest.approx(d)
    assert a != pytest.approx(c)


@pytest.mark.parametrize(("kernel_size", "factor"), [(3, 0.7), (1, 1.0)])
def test_reshaped_scale_divides_by_the_least_of_four(kernel_size, factor):
    weight = ConvWeight(4, 4, kernel_size, in_size=(5, 5)).double()
    m = weight.weight.detach()
    a = (m - m.transpose(0, 1).flip(2, 3)) / 2
    scale = ReshapedScale(factor)
    skew = Skew(weight, scale).double()
    for i, matrix in enumerate(reshapings(a)):  # the first estimates are close to the norms
        assert 0.85 <= float((matrix @ scale.get_buffer(f"u{i}")).norm()) / norm(matrix) <= 1 + 1e-6
    for _ in range(300):
        skew(torch.zeros(1, 4, 5, 5, dtype=torch.float64))
    scaled = skew.eval().operator(None)
    expected = factor * a / min(map(norm, reshapings(a)))
    torch.testing.assert_close(scaled.weight.detach(), expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(scaled.weight, -scaled.weight.transpose(0, 1).flip(2, 3))
    assert lipflow.norm_bound(scaled) <= factor * kernel_size * (1 + 1e-5)


def test_learned_scale_has_a_parameter_from_the_start_and_changes_nothing_at_first():
    skew = Skew(DenseWeight(4, 4), LearnedScale())
    assert "scale.alpha" in dict(skew.named_parameters())
    m = skew.weight.weight
    torch.testing.assert_close(skew.operator(None).weight, (m - m.T) / 2)
    lipflow.Flow(skew, lipflow.Midpoint())(torch.randn(2, 4)).sum().backward()
    assert skew.scale.alpha.grad is not None
