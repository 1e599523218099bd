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
        (1e7, 10**7),  # certificates may have any domain
        (5e-324, Fraction(1, 2**1074)),
    ],
)
def test_parse_radius_is_exact(radius, exact):
    assert parse_radius(radius) == exact


@pytest.mark.parametrize(
    ("words", "radii"),
    [
        ("36/255", ["wide", "1e1/2", "1/0", "nan", float("nan"), float("inf"), None, [0.1], torch.ones(2)]),
        ("at least 0", ["-1", -1e-300]),
        (
            "at most 1000000, its exponent within ±300",
            ["1000001", Decimal("1e999999999"), "1e999999999", "1e-999999999", "1e-1_000 "],
        ),
    ],
)
def test_parse_radius_rejects_other_values(words, radii):
    for radius in radii:
        with pytest.raises(ValueError, match=words):
            parse_radius(radius)
