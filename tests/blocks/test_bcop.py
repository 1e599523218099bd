"""BCOP: Björck's iteration, two-tap convolutions, and kernels of any shape."""

import math

import pytest
import torch

import lipflow
from lipflow.blocks.bcop import bjorck, turn


@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (9, 4), (4, 9), (5, 1), (1, 1)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_bjorck_finds_the_polar_factor(rows, columns, scale):
    m = torch.randn(2, rows, columns, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(m, full_matrices=False)
    m = scale * (u * s.clamp_min(0.05)[:, None]) @ vh
    torch.testing.assert_close(bjorck(m), u @ vh, rtol=1e-9, atol=1e-9)


def test_bjorck_follows_its_recurrence_to_the_end():
    """Singular values s → s(3 - s²)/2, from at most 1: what is left after n iterations is what they say."""
    s = torch.tensor([1.0, 0.3, 1e-4], dtype=torch.float64)
    m = torch.diag(s)
    for iterations in (1, 5, 20):
        values = torch.linalg.svdvals(bjorck(m, iterations))
        expected = s / (s**8).sum() ** 0.125  # ‖(MᵀM)²‖_F^{1/4}
        for _ in range(iterations):
            expected = expected * (3 - expected**2) / 2
        torch.testing.assert_close(values, expected.sort(descending=True).values)
    assert float(values.min()) < 0.9, "20 iterations leave something of so small a value: the bound must say it"


@pytest.mark.parametrize("axis", [0, 1])
def test_a_turn_is_the_two_tap_convolution(axis):
    q = torch.linalg.qr(torch.randn(4, 2, dtype=torch.float64)).Q
    kernel = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    longer = turn(kernel, q, axis).movedim(2 + axis, 0)
    p, taps = q @ q.T, kernel.movedim(2 + axis, 0)
    expected = [torch.einsum("cd,dmk->cmk", p, t) for t in taps] + [torch.zeros_like(taps[0])]
    for j, t in enumerate(taps):
        expected[j + 1] = expected[j + 1] + t - torch.einsum("cd,dmk->cmk", p, t)
    torch.testing.assert_close(longer, torch.stack(expected))


@pytest.mark.parametrize(("into", "out"), [(3, 3), (1, 4), (4, 1), (2, 5), (1, 1)])
@pytest.mark.parametrize("kernel_size", [1, 2, 3, 4, (1, 3), (4, 2)])
def test_kernels_of_every_shape_are_orthogonal(into, out, kernel_size):
    layer = lipflow.bcop_conv(into, out, kernel_size).double()
    height, width = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
    assert layer.weight.kernel().shape == (out, into, height, width)
    assert layer.weight.halves.shape == (height + width - 2, max(into, out), max(into, out) // 2)
    x = torch.randn(1, into, 3, 5, dtype=torch.float64)
    y = (layer(x) - layer(torch.zeros_like(x))).detach()
    if out >= into:
        assert float(y.norm()) == pytest.approx(float(x.norm()), rel=1e-12)
    assert float(y.norm()) <= float(x.norm()) * (1 + 1e-12)
    if isinstance(kernel_size, int) and into > 1 and out > 1:
        assert bool((layer.weight.kernel().detach().flatten(2).norm(dim=(0, 1)) > 1e-3).all()), "every tap is used"


def test_what_bjorck_leaves_is_in_the_bound():
    """Stopped after one iteration, a kernel is not orthogonal; the declared bound is that of the executed one."""
    layer = lipflow.bcop_conv(3, 3, 2, iterations=1, bias=False).double()
    bound = lipflow.lipschitz_bound(layer, in_shape=(3, 4, 4)).lipschitz
    matrix = layer(torch.eye(48, dtype=torch.float64).reshape(48, 3, 4, 4)).flatten(1).detach()
    assert float(torch.linalg.matrix_norm(matrix, 2)) == pytest.approx(bound, rel=1e-8)
    assert not math.isclose(bound, 1, rel_tol=1e-3)


def test_a_state_dict_carries_the_input_size():
    layer, fresh = lipflow.bcop_conv(2, 3), lipflow.bcop_conv(2, 3)
    layer(torch.zeros(1, 2, 6, 5))
    fresh.load_state_dict(layer.state_dict())
    assert fresh.weight.seen.shape == (0, 6, 5)
    torch.testing.assert_close(fresh.weight.kernel(), layer.weight.kernel())


def test_a_first_batch_in_inference_mode_leaves_a_layer_that_can_learn():
    layer, x = lipflow.bcop_conv(2, 3), torch.rand(2, 2, 4, 4)
    with torch.inference_mode():
        layer.eval()(x)
    assert not layer.weight.seen.is_inference()
    layer.load_state_dict({key: value.clone() for key, value in layer.state_dict().items()})
    layer.train()(x).sum().backward()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: lipflow.bcop_conv(0, 3), "in_channels must be an integer of at least 1, not 0"),
        (lambda: lipflow.bcop_conv(3, 3, iterations=0), "iterations must be"),
        (lambda: lipflow.bcop_conv(3, 3)(torch.zeros(1, 2, 4, 4)), r"takes images \(batch, 3, height, width\)"),
        (lambda: lipflow.bjorck_dense(3, 2.5), "out_features must be an integer"),
    ],
)
def test_bad_input_is_answered(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("layer", [lambda: lipflow.bcop_conv(3, 8), lambda: lipflow.bjorck_dense(6, 4)])
def test_autocast_does_not_round_what_is_orthogonal(layer):
    weight = layer().train().weight
    x = torch.zeros(1, 3, 8, 8) if weight.channels[0] == 3 else torch.zeros(1, 6)
    expected = weight(x).weight
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(weight(x).weight, expected)


def test_evaluation_does_not_take_up_another_size():
    layer = lipflow.bcop_conv(3, 4, in_size=(8, 8)).eval()
    layer(torch.rand(1, 3, 10, 10))
    lipflow.lipschitz_bound(layer, in_shape=(3, 10, 10))
    assert layer.weight.seen.shape == (0, 8, 8)
    layer.train()(torch.rand(1, 3, 10, 10))
    assert layer.weight.seen.shape == (0, 10, 10)
