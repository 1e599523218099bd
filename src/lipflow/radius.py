"""Radii, as exact rationals."""

from decimal import Decimal
from fractions import Fraction
from numbers import Rational
from typing import SupportsFloat

MAX_RADIUS = 10**6  # of a radius given as text: the diameter of [0, 1]ᵈ for d = 10¹²
MAX_EXPONENT = 300  # of a text or a Decimal: Fraction("1e-999999999") would fill the memory


def parse_radius(radius: SupportsFloat | str) -> Fraction:
    """Return the exact value of a radius: "36/255", 0.25, a number of NumPy or torch."""
    exponent = str(radius).lower().partition("e")[2] if isinstance(radius, str | Decimal) else ""
    try:
        in_range = abs(int(exponent or 0)) <= MAX_EXPONENT
        text = radius if isinstance(radius, Rational | Decimal | float | str) else float(radius)
        value = Fraction(text) if in_range else Fraction(0)
    except (TypeError, ValueError, OverflowError, ZeroDivisionError, RuntimeError):
        raise ValueError(f"a radius is a number such as 36/255 or 0.25, not {radius!r}") from None
    if value < 0:
        raise ValueError(f"a radius is at least 0, not {radius}")
    if not in_range or (isinstance(radius, str) and value > MAX_RADIUS):
        raise ValueError(f"a radius is at most {MAX_RADIUS}, its exponent within ±{MAX_EXPONENT}, not {radius!r}")
    return value
