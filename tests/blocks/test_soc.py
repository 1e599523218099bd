"""SOC layers as published: channels, stride, and the number of terms."""

import pytest
import torch
from torch.nn import functional as F

import lipflow
from lipflow.blocks import Bias, PadChannels, SpaceToDepth, TakeChannels


def _published(layer, x, convolutions):
    """The layer by its definition: shuffle, pad, convolve so many times, cut, shift."""
    skew = next(m for m in layer.modules() if isinstance(m, lipflow.Skew))
    kernel = skew.operator(None).weight
    if any(isinstance(m, SpaceToDepth) for m in layer):
        x = F.pixel_unshuffle(x, 2)
    term = total = F.pad(x, (0, 0, 0, 0, 0, len(kernel) - x.shape[1]))
    for j in range(1, convolutions + 1):
        term = F.conv2d(term, kernel, padding=kernel.shape[-1] // 2) / j
        total = total + term
    bias = layer[-1].bias
    return total[:, : len(bias)] + bias[:, None, None]


@pytest.mark.parametrize(
    ("into", "out", "kernel_size", "stride"), [(2, 2, 3, 1), (2, 5, 3, 1), (3, 2, 3, 2), (1, 6, 3, 2), (4, 2, 1, 1)]
)
def test_the_layer_is_the_published_one(into, out, kernel_size, stride):
    layer = lipflow.soc_conv(into, out, kernel_size, stride=stride).double()
    x = torch.randn(2, into, 4, 6, dtype=torch.float64)
    layer(x)
    expected = _published(layer.eval(), x, 12)
    assert expected.shape == (2, out, 4 // stride, 6 // stride)
    torch.testing.assert_close(layer(x), expected)
    layer.train()  # convolves 5 times, and follows the norms of kernels
    for _ in range(300):
        layer(x)
    torch.testing.assert_close(layer(x), _published(layer, x, 5), rtol=1e-6, atol=1e-6)


def test_channels_are_changed_as_published():
    kinds = [type(m) for m in lipflow.soc_conv(2, 5, bias=False)]
    assert kinds == [PadChannels, lipflow.Flow]
    assert [type(m) for m in lipflow.soc_conv(2, 3, stride=2)] == [SpaceToDepth, lipflow.Flow, TakeChannels, Bias]
    assert [type(m) for m in lipflow.soc_dense(3, 3)] == [lipflow.Flow, Bias]


def test_the_remainder_is_priced():
    """Peers' SOC can exceed 1. With one term left out too many, the bound must say so, and with 13 almost nothing."""
    few, many = (lipflow.soc_conv(4, 4, terms=k, bias=False).double().eval() for k in (3, 13))
    for layer, most in ((few, 2.0), (many, 1 + 1e-6)):
        bound = lipflow.lipschitz_bound(layer, in_shape=(4, 5, 5)).lipschitz
        matrix = layer(torch.eye(100, dtype=torch.float64).reshape(100, 4, 5, 5)).flatten(1).detach()
        norm = float(torch.linalg.matrix_norm(matrix, 2))
        assert norm <= bound * (1 + 1e-12)
        assert bound <= most
    few_matrix = few(torch.eye(100, dtype=torch.float64).reshape(100, 4, 5, 5)).flatten(1).detach()
    assert float(torch.linalg.matrix_norm(few_matrix, 2)) > 1.001, "three terms stretch, and the bound covers it"


@pytest.mark.parametrize(("kernel_size", "words"), [(2, "odd kernel, not 2×2"), (4, "odd kernel, not 4×4")])
def test_even_kernels_are_refused(kernel_size, words):
    with pytest.raises(ValueError, match=words):
        lipflow.soc_conv(3, 3, kernel_size)
