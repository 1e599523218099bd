from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from lipflow.radius import parse_radius


@pytest.mark.parametrize(
    ("radius", "exact"),
    [
        ("36/255", Fraction(36, 255)),
        ("2.5e-1", Fraction(1, 4)),
        (Decimal("0.1"), Fraction(1, 10)),
        (0.1, Fraction(0.1)),
        (np.float32(0.1), Fraction(float(np.float32(0.1)))),
        (torch.tensor(0.25), Fraction(1, 4)),
        (0, 0),
    ],
)
def test_parse_radius_is_exact(radius, exact):
    assert parse_radius(radius) == exact


@pytest.mark.parametrize("radius", ["wide", "1e1/2", "1/0", "nan", float("nan"), float("inf"), None, "-1", -0.1])
def test_parse_radius_refuses_what_is_no_radius(radius):
    with pytest.raises(ValueError, match=r"a radius is (a number such as 36/255|at least 0)"):
        parse_radius(radius)


@pytest.mark.parametrize("radius", ["1000001", 1e7, "1e999999999", "1e-999999999"])
def test_parse_radius_refuses_what_would_fill_the_memory(radius):
    with pytest.raises(ValueError, match=r"a radius is at most 1000000, its exponent within ±300"):
        parse_radius(radius)
