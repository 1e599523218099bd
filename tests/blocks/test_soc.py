"""SOC layers as published: channels, stride, and the number of terms."""

import pytest
import torch
from torch.nn import functional as F

import lipflow
from lipflow.blocks import SpaceToDepth


def _published(layer, x, convolutions):
    """The layer by its definition: shuffle, pad, convolve, truncate, add the bias."""
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
def test_soc_conv_is_the_published_layer(into, out, kernel_size, stride):
    layer = lipflow.soc_conv(into, out, kernel_size, stride=stride).double()
    x = torch.randn(2, into, 4, 6, dtype=torch.float64)
    layer(x)
    expected = _published(layer.eval(), x, 12)
    assert expected.shape == (2, out, 4 // stride, 6 // stride)
    torch.testing.assert_close(layer(x), expected)
    layer.train()  # 5 convolutions
    for _ in range(300):
        layer(x)
    torch.testing.assert_close(layer(x), _published(layer, x, 5), rtol=1e-6, atol=1e-6)
