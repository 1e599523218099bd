"""Distances of the rows of a matrix, which bound pairs of classes, against exact ones."""

from fractions import Fraction

import pytest
import torch

from lipflow.graph.fold import row_distances


@pytest.mark.parametrize("scale", [1.0, 1e-170, 1e-300, 1e150])
def test_row_distances_are_never_below_the_exact_ones(scale):
    torch.manual_seed(0)
    rows = torch.randn(5, 7, dtype=torch.float64) * scale
    rows[1] = rows[0]
    rows[1, 3] += rows[0, 3].abs() * 1e-13
    rows[2, :5] = 0
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


def test_rows_of_zeros_are_no_distance_apart():
    assert not bool((row_distances(torch.zeros(3, 4, dtype=torch.float64)) > 1e-100).any())


def test_rows_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="NaN or infinite"):
        row_distances(torch.tensor([[float("nan")], [0.0]]))
