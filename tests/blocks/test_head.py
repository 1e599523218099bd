"""Heads: pair bounds against exact distances."""

from fractions import Fraction

import pytest
import torch

import lipflow
from lipflow import blocks
from lipflow.blocks.head import row_distances


@pytest.mark.parametrize("scale", [1.0, 1e-170, 1e-300, 1e150])
def test_row_distances_are_never_below_the_exact_ones(scale):
    torch.manual_seed(0)
    rows = torch.randn(5, 7, dtype=torch.float64) * scale
    rows[1] = rows[0]
    rows[1, 3] += rows[0, 3].abs() * 1e-13
    distances = row_distances(rows)
    for i in range(5):
        for j in range(5):
            exact = sum(
                (Fraction(a) - Fraction(b)) ** 2 for a, b in zip(rows[i].tolist(), rows[j].tolist(), strict=True)
            )
            assert Fraction(float(distances[i, j])) ** 2 >= exact
            if exact > Fraction(scale) ** 2 / 100:
                assert Fraction(float(distances[i, j])) ** 2 <= exact * (1 + Fraction(1, 10**12))


def test_rows_that_differ_by_less_than_squares_can_hold():
    rows = torch.tensor([[1.0, 0.0, 1e-170], [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert float(row_distances(rows)[0, 1]) >= 1e-170


def test_unit_rows_can_differ_by_two():
    head = blocks.LastLayerNormalization(3, 2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[5.0, 0.0, 0.0], [-0.1, 0.0, 0.0]]))
    assert 2 <= float(head.pair_bounds()[0, 1]) < 2 + 1e-9


def test_truncation_is_root_two_from_above():
    bound = Fraction(float(blocks.Truncate(3).pair_bounds()[0, 1]))
    assert 2 <= bound**2 < 2 + Fraction(1, 10**14)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: blocks.Truncate(4)(torch.zeros(2, 3)), r"at least as many, not \(2, 3\)"),
        (lambda: blocks.Truncate(0), "at least 1, not 0"),
        (lambda: blocks.LastLayerNormalization(3, 2)(torch.zeros(2, 4)), r"\(batch, 3\) features, not \(2, 4\)"),
        (lambda: row_distances(torch.tensor([[float("nan")], [0.0]])), "NaN or infinite"),
        (lambda: lipflow.cpl_dense(4, 4)(torch.zeros(2, 3, 4)), r"takes \(batch, 4\), not \(batch, 3, 4\); flatten"),
    ],
)
def test_bad_input_is_answered(call, words):
    with pytest.raises(ValueError, match=words):
        call()
