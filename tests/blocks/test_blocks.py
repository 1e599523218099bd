"""Activations and shapes: what they compute, and what they refuse."""

import math

import pytest
import torch
from torch import nn

from lipflow import blocks


def test_maxmin_sorts_pairs():
    x = torch.tensor([[1.0, 5.0, 3.0, 2.0]])
    assert blocks.MaxMin()(x).tolist() == [[3.0, 5.0, 1.0, 2.0]]


def test_groupsort_sorts_each_group():
    x = torch.randn(2, 6, 3)
    expected = x.reshape(2, 3, 2, 3).sort(1, descending=True).values.reshape(2, 6, 3)
    assert torch.equal(blocks.GroupSort(3)(x), expected)


def test_householder_starts_as_maxmin_and_preserves_norms():
    x = torch.randn(5, 4, 3, 3)
    layer = blocks.Householder(4)
    torch.testing.assert_close(layer(x), blocks.MaxMin()(x), rtol=1e-5, atol=1e-6)
    nn.init.uniform_(layer.theta, 0, 2 * math.pi)
    torch.testing.assert_close(layer(x).flatten(1).norm(dim=1), x.flatten(1).norm(dim=1))


def test_average_pooling_keeps_constants_at_full_length():
    x = torch.ones(1, 1, 4, 4)
    assert blocks.AvgPool(2)(x).tolist() == [[[[2.0, 2.0], [2.0, 2.0]]]]
    assert blocks.AvgPool(2)(x).norm() == x.norm()


def test_space_to_depth_is_pixel_unshuffle():
    x = torch.randn(2, 3, 4, 6)
    assert torch.equal(blocks.SpaceToDepth(2)(x), nn.PixelUnshuffle(2)(x))
    folded = blocks.SpaceToDepth(2)(x.contiguous(memory_format=torch.channels_last))
    assert folded.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(folded, nn.PixelUnshuffle(2)(x))


def test_padding_appends_zero_channels():
    x = torch.randn(2, 3, 4, 4)
    padded = blocks.PadChannels(5)(x)
    assert torch.equal(padded[:, :3], x)
    assert not padded[:, 3:].any()


def test_center_scales_by_channel():
    x = torch.rand(2, 2, 3, 3)
    mean, std = torch.tensor([0.1, 0.2]).reshape(2, 1, 1), torch.tensor([0.5, 0.25]).reshape(2, 1, 1)
    torch.testing.assert_close(blocks.Normalize([0.1, 0.2], [0.5, 0.25])(x), (x - mean) / std)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: blocks.GroupSort(1), "at least 2 entries, not 1"),
        (lambda: blocks.GroupSort(3)(torch.zeros(1, 4)), r"that 3 divides, not \(1, 4\)"),
        (lambda: blocks.Householder(3), "even number of them, not 3"),
        (lambda: blocks.Householder(4)(torch.zeros(1, 6)), r"with 4 channels, not \(1, 6\)"),
        (lambda: blocks.PadChannels(2)(torch.zeros(1, 3, 2, 2)), "cannot narrow an input of 3"),
        (lambda: blocks.AvgPool(0), "at least 1, not 0"),
        (lambda: blocks.AvgPool(4)(torch.zeros(1, 1, 3, 8)), "at least as large"),
        (lambda: blocks.SpaceToDepth(2)(torch.zeros(1, 1, 3, 4)), r"sides it divides, not \(1, 1, 3, 4\)"),
        (lambda: blocks.Normalize(math.nan), "mean is a finite number"),
        (lambda: blocks.Normalize(0.0, 0.0), "std is a finite number above 0.0"),
        (lambda: blocks.Normalize([0.1, 0.2])(torch.zeros(1, 3, 2, 2)), "Normalize has 2 channels"),
    ],
)
def test_bad_input_is_answered(call, words):
    with pytest.raises(ValueError, match=words):
        call()
