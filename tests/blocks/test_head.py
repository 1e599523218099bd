"""Heads: constants of pairs of classes, as losses see them and as certificates do."""

from fractions import Fraction

import pytest
import torch
from torch import nn

import lipflow
from lipflow import blocks


def certified_pairs(head: blocks.Head, features: int) -> torch.Tensor:
    return lipflow.freeze(nn.Sequential(head), in_shape=(features,)).pair_bounds


def test_unit_rows_can_differ_by_two():
    head = blocks.LastLayerNormalization(3, 2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[5.0, 0.0, 0.0], [-0.1, 0.0, 0.0]]))
    assert 2 <= float(certified_pairs(head, 3)[0, 1]) < 2 + 1e-9
    assert float(head.pair_constants()[0, 1].detach()) == pytest.approx(2, rel=1e-6)


def test_truncation_is_root_two_from_above():
    head = blocks.Truncate(3)
    bound = Fraction(float(certified_pairs(head, 5)[0, 1]))
    assert 2 <= bound**2 < 2 + Fraction(1, 10**9)
    assert float(head.pair_constants()[0, 1]) == pytest.approx(float(bound), rel=1e-9)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: blocks.Truncate(4)(torch.zeros(2, 3)), r"features ≥ 4\), not \(2, 3\)"),
        (lambda: blocks.Truncate(0), "at least 1, not 0"),
        (lambda: blocks.LastLayerNormalization(3, 2)(torch.zeros(2, 4)), r"\(batch, 3\) features, not \(2, 4\)"),
        (lambda: lipflow.cpl_dense(4, 4)(torch.zeros(2, 3, 4)), r"takes \(batch, 4\), not \(batch, 3, 4\); flatten"),
    ],
)
def test_bad_input_is_answered(call, words):
    with pytest.raises(ValueError, match=words):
        call()
