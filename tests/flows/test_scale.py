"""Scales: the four reshapings and what they bound, and the learned norm."""

import math
import random

import pytest
import torch

import lipflow
from lipflow.flows import ConvWeight, DenseWeight, LearnedScale, ReshapedScale, Skew, SpectralScale
from lipflow.flows.scale import reshapings
from tests.operators.geometry import draw_geometry


@pytest.mark.parametrize("seed", range(30))
def test_four_reshapings_bound_every_convolution(seed):
    """‖W‖ ≤ √(hw)·min of the four, for zero padding, any stride, dilation and groups, on inputs of any size."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    drawn = (draw_geometry(rng.randint, side=4, channels=3) for _ in range(100))
    geometry = next(g for g in drawn if g.mode == "zeros" and min(g.outputs) >= 1)
    kernel = torch.randn(geometry.kernel_shape, generator=generator, dtype=torch.float64)
    norm = float(torch.linalg.matrix_norm(geometry.matrix(kernel), 2))
    least = min(float(torch.linalg.matrix_norm(m, 2)) for m in reshapings(kernel))
    assert norm <= math.sqrt(kernel[0, 0].numel()) * least * (1 + 1e-12)


def test_reshapings_of_a_skew_kernel_are_equal_in_pairs():
    kernel = torch.randn(4, 4, 3, 5, dtype=torch.float64)
    kernel = kernel - kernel.transpose(0, 1).flip(2, 3)
    a, b, c, d = (float(torch.linalg.matrix_norm(m, 2)) for m in reshapings(kernel))
    assert a == pytest.approx(b)
    assert c == pytest.approx(d)
    assert a != pytest.approx(c)


@pytest.mark.parametrize(("kernel_size", "factor"), [(3, 0.7), (1, 1.0)])
def test_soc_scales_by_the_least_of_four(kernel_size, factor):
    torch.manual_seed(0)
    weight = ConvWeight(4, 4, kernel_size, in_size=(5, 5)).double()
    skew = Skew(weight, ReshapedScale(factor)).double()
    x = torch.randn(1, 4, 5, 5, dtype=torch.float64)
    for _ in range(300):
        skew(x)
    m = weight.weight.detach()
    a = (m - m.transpose(0, 1).flip(2, 3)) / 2
    least = min(float(torch.linalg.matrix_norm(r, 2)) for r in reshapings(a))
    torch.testing.assert_close(skew.eval().operator(None).weight.detach(), factor * a / least, rtol=1e-5, atol=1e-7)
    assert lipflow.norm_bound(skew.operator(None)) <= factor * kernel_size * (1 + 1e-5)


def test_a_fresh_scale_is_warm():
    """Power iteration begins at construction, so that a fresh layer already has about the norm it will have."""
    torch.manual_seed(0)
    weight = ConvWeight(8, 8, 3)
    scale = ReshapedScale(1.0)
    Skew(weight, scale)
    a = (weight.weight - weight.weight.transpose(0, 1).flip(2, 3)).detach() / 2
    for i, matrix in enumerate(reshapings(a)):
        estimate = float((matrix @ scale.get_buffer(f"u{i}")).norm())
        assert 0.85 <= estimate / float(torch.linalg.matrix_norm(matrix, 2)) <= 1 + 1e-6


def test_scaled_kernels_are_skew_to_the_last_bit():
    skew = Skew(ConvWeight(3, 3, 3), ReshapedScale(0.7))
    kernel = skew.operator((3, 4, 4)).weight
    assert torch.equal(kernel, -kernel.transpose(0, 1).flip(2, 3))


def test_spectral_norm_makes_a_turn_of_known_size():
    torch.manual_seed(0)
    skew = Skew(DenseWeight(6, 6), SpectralScale()).double()
    x = torch.randn(1, 6, dtype=torch.float64)
    for _ in range(300):
        skew(x)
    assert lipflow.norm_bound(skew.eval().operator(None)) == pytest.approx(1, rel=1e-6)


def test_learned_norm_is_a_parameter_from_the_start():
    skew = Skew(DenseWeight(4, 4), LearnedScale())
    names = [name for name, _ in skew.named_parameters()]
    assert "scale.alpha" in names
    a = skew.operator(None).weight
    m = skew.weight.weight
    torch.testing.assert_close(a, (m - m.T) / 2)
    flow = lipflow.Flow(skew, lipflow.Midpoint())
    flow(torch.randn(2, 4)).sum().backward()
    assert skew.scale.alpha.grad is not None
