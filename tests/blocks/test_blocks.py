"""Activations and shapes, heads, and the errors of all blocks."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import lipflow
from lipflow import blocks


def test_maxmin_sorts_pairs():
    x = torch.tensor([[1.0, 5.0, 3.0, 2.0]])
    assert blocks.MaxMin()(x).tolist() == [[3.0, 5.0, 1.0, 2.0]]


def test_householder_is_maxmin_at_first_and_preserves_norms():
    x, layer = torch.randn(5, 4, 3, 3), blocks.Householder(4)
    torch.testing.assert_close(layer(x), blocks.MaxMin()(x), rtol=1e-5, atol=1e-6)
    nn.init.uniform_(layer.theta, 0, 2 * math.pi)
    torch.testing.assert_close(layer(x).flatten(1).norm(dim=1), x.flatten(1).norm(dim=1))


def test_average_pooling_preserves_the_norm_of_constants():
    x = torch.ones(1, 1, 4, 4)
    assert blocks.AvgPool(2)(x).tolist() == [[[[2.0, 2.0], [2.0, 2.0]]]]
    assert blocks.AvgPool(2)(x).norm() == x.norm()


def test_space_to_depth_is_pixel_unshuffle_in_either_memory_format():
    x = torch.randn(2, 3, 4, 6)
    assert torch.equal(blocks.SpaceToDepth(2)(x), nn.PixelUnshuffle(2)(x))
    folded = blocks.SpaceToDepth(2)(x.contiguous(memory_format=torch.channels_last))
    assert folded.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(folded, nn.PixelUnshuffle(2)(x))


def test_pad_channels_appends_zeros():
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(blocks.PadChannels(5)(x), torch.cat([x, torch.zeros(2, 2, 4, 4)], 1))


def test_normalize_acts_on_channels():
    x = torch.rand(2, 2, 3, 3)
    mean, std = torch.tensor([0.1, 0.2]).reshape(2, 1, 1), torch.tensor([0.5, 0.25]).reshape(2, 1, 1)
    torch.testing.assert_close(blocks.Normalize([0.1, 0.2], [0.5, 0.25])(x), (x - mean) / std)


def pair_bound(head: blocks.Head, features: int) -> float:
    return float(lipflow.freeze(nn.Sequential(head), in_shape=(features,)).pair_bounds[0, 1])


def test_the_pair_constant_of_opposite_unit_rows_is_two():
    head = blocks.LastLayerNormalization(3, 2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[5.0, 0.0, 0.0], [-0.1, 0.0, 0.0]]))
    assert 2 <= pair_bound(head, 3) < 2 + 1e-9
    assert float(head.pair_constants()[0, 1].detach()) == pytest.approx(2, rel=1e-6)


def test_the_pair_bound_of_truncation_is_above_the_root_of_two():
    assert 2 <= Fraction(pair_bound(blocks.Truncate(3), 5)) ** 2 < 2 + Fraction(1, 10**9)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: blocks.GroupSort(1), "at least 2 entries, not 1"),
        (lambda: blocks.GroupSort(3)(torch.zeros(1, 4)), r"not \(1, 4\)"),
        (lambda: blocks.Householder(3), "even number of them, not 3"),
        (lambda: blocks.Householder(4)(torch.zeros(1, 6)), r"4 channels, not \(1, 6\)"),
        (lambda: blocks.PadChannels(2)(torch.zeros(1, 3, 2, 2)), "cannot narrow"),
        (lambda: blocks.TakeChannels(4)(torch.zeros(2, 3)), "cannot widen"),
        (lambda: blocks.TakeChannels(0), "at least 1, not 0"),
        (lambda: blocks.AvgPool(0), "at least 1, not 0"),
        (lambda: blocks.AvgPool(4)(torch.zeros(1, 1, 3, 8)), "at least as large"),
        (lambda: blocks.SpaceToDepth(2)(torch.zeros(1, 1, 3, 4)), r"not \(1, 1, 3, 4\)"),
        (lambda: blocks.Normalize(math.nan), "mean is a finite number"),
        (lambda: blocks.Normalize(0.0, 0.0), "std is a finite number above 0,"),
        (lambda: blocks.Normalize([0.1, 0.2])(torch.zeros(1, 3, 2, 2)), "2 channels"),
        (lambda: blocks.Bias(0), "at least 1, not 0"),
        (lambda: blocks.Bias(3)(torch.zeros(2, 4)), r"not \(2, 4\)"),
        (lambda: blocks.Truncate(4)(torch.zeros(2, 3)), r"not \(2, 3\)"),
        (lambda: blocks.Truncate(0), "at least 1, not 0"),
        (lambda: blocks.LastLayerNormalization(3, 2)(torch.zeros(2, 4)), r"not \(2, 4\)"),
        (lambda: blocks.FlipAverage(nn.Linear(3, 3))(torch.zeros(2, 3)), r"not \(2, 3\)"),
        (lambda: lipflow.ReshapedScale(0.0), "above 0, not 0.0"),
        (lambda: lipflow.bcop_conv(0, 3), "in_channels must be an integer of at least 1, not 0"),
        (lambda: lipflow.bcop_conv(3, 3, iterations=0), "iterations"),
        (lambda: lipflow.bcop_conv(3, 3)(torch.zeros(1, 2, 4, 4)), r"\(batch, 3, height, width\)"),
        (lambda: lipflow.bjorck_dense(3, 2.5), "out_features"),
        (lambda: lipflow.cayley_dense(4, 3)(torch.zeros(2, 5, 4)), r"not \(batch, 5, 4\); flatten"),
        (lambda: lipflow.bjorck_dense(4, 3)(torch.zeros(2, 5, 4)), r"not \(batch, 5, 4\); flatten"),
        (lambda: lipflow.soc_conv(3, 3, 2), "odd kernel, not 2×2"),
    ],
)
def test_wrong_arguments_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_sizes_may_be_integers_of_numpy_and_not_booleans():
    assert blocks.Truncate(np.int64(3))(torch.zeros(2, 5)).shape == (2, 3)
    with pytest.raises(ValueError, match="classes must be an integer of at least 1, not True"):
        blocks.Truncate(True)
