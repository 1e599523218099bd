"""Laws of directed rounding, against exact rationals."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipflow.rounding import (
    TINY,
    U,
    add_up,
    digits_up,
    down,
    gamma,
    mul_up,
    norm_up,
    power_of_two,
    shortened,
    sqrt_up,
    square_sum_bound,
    square_sum_max,
    up,
)

LAWS = settings(max_examples=300)
GREATEST = Fraction(torch.finfo(torch.float64).max)

positive = st.floats(min_value=0, allow_infinity=False, allow_nan=False)
finite = st.floats(allow_infinity=False, allow_nan=False)
# Floats, rationals between two floats, and rationals beyond the range of floats
rationals = st.one_of(
    finite.map(Fraction),
    st.fractions(),
    st.builds(lambda x, n: Fraction(x) * (1 + Fraction(n, 2**60)), finite, st.integers(-200, 200)),
    st.builds(lambda a, n: Fraction(a) * Fraction(2) ** n, st.integers(-(2**70), 2**70), st.integers(-1200, 1200)),
)
tensors = st.lists(finite, max_size=12).map(lambda values: torch.tensor(values, dtype=torch.float64))
batches = st.lists(st.lists(st.floats(-2, 2), min_size=6, max_size=6), min_size=1, max_size=5)


def is_least_above(x: float, q: Fraction) -> bool:
    """Whether x is the least float64 that is at least q and not a positive subnormal; ∞ counts as one."""
    if math.isinf(x):
        return x > 0 and q > GREATEST
    if 0 < q < TINY:
        return Fraction(x) == TINY
    before = math.nextafter(x, -math.inf)
    return Fraction(x) >= q and (math.isinf(before) or Fraction(before) < q)


@LAWS
@given(st.one_of(rationals, st.integers(-(2**1100), 2**1100)))
def test_up_is_the_least_float_above_and_down_the_greatest_below(q):
    assert is_least_above(up(q), q)
    assert is_least_above(-down(q), -q)


@LAWS
@given(rationals.map(abs), st.fractions(min_value=0))
def test_sqrt_up_is_above_the_root_and_exact_for_squares(q, root):
    assert q <= sqrt_up(q) ** 2 <= q * (1 + Fraction(1, 2**60)) ** 2
    assert sqrt_up(root**2) == root
    with pytest.raises(ValueError, match=r"-2\.0"):
        sqrt_up(Fraction(-2))


@LAWS
@given(positive, positive)
def test_add_up_and_mul_up_round_once(a, b):
    assert is_least_above(add_up(a, b), Fraction(a) + Fraction(b))
    assert is_least_above(mul_up(a, b), Fraction(a) * Fraction(b))
    assert add_up(math.inf, a) == add_up(a, math.inf) == math.inf
    assert mul_up(a, math.inf) == mul_up(math.inf, a) == (math.inf if a else 0.0)


@LAWS
@given(st.integers(0, 40), st.integers(0, 2**40), st.integers(0, 2**40))
def test_gamma_covers_n_roundings_and_adds(n, i, j):
    """γ_i + γ_j + γ_i·γ_j ≤ γ_{i+j} (Higham 2002, lemma 3.3)."""
    assert max((1 + U) ** n - 1, 1 - (1 - U) ** n, 1 / (1 - U) ** n - 1) <= gamma(n)
    assert gamma(i) + gamma(j) + gamma(i) * gamma(j) <= gamma(i + j)
    with pytest.raises(ValueError, match=str(2**52)):
        gamma(2**52)


@LAWS
@given(tensors)
def test_norm_up_is_above_the_norm_at_every_scale_and_close(x):
    square = sum((Fraction(v) ** 2 for v in x.tolist()), Fraction(0))
    bound = norm_up(x)
    if math.isinf(bound):
        assert square * (1 + Fraction(1, 10**12)) > GREATEST**2
    else:
        assert Fraction(bound) ** 2 >= square
        assert Fraction(bound) <= max(TINY, sqrt_up(square) * (1 + 32 * U) + 2 * Fraction(1, 2**1074)) * (square > 0)


@LAWS
@given(rationals.map(abs))
def test_shortened_is_above_close_and_short(q):
    assert q <= shortened(q) <= q * (1 + Fraction(1, 2**63))
    mantissa = shortened(q).numerator
    assert (mantissa // (mantissa & -mantissa or 1)).bit_length() <= 65


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_norm_up_takes_other_dtypes_zeros_and_infinities(dtype):
    x = torch.randn(3, 4).to(dtype).requires_grad_()
    assert norm_up(x) == norm_up(x.double())
    assert norm_up(torch.empty(0, dtype=dtype)) == norm_up(torch.zeros(3, 4, dtype=dtype)) == 0.0
    for bad in (math.nan, -math.inf):
        assert norm_up(torch.tensor([1.0, bad], dtype=dtype)) == math.inf


@LAWS
@given(batches)
def test_square_sums_are_above_the_exact_sums_and_close(rows):
    exact = [sum((Fraction(v) ** 2 for v in row), Fraction(0)) for row in rows]
    x = torch.tensor(rows, dtype=torch.float64)
    assert sum(exact) <= square_sum_bound(x) <= sum(exact) * (1 + 80 * U) + 60 * TINY
    assert max(exact) <= square_sum_max(x.reshape(-1, 2, 3)) <= max(exact) * (1 + 40 * U) + 24 * TINY
    assert square_sum_max(x.reshape(-1, 2, 3)[:, :0]) == 0


@LAWS
@given(st.floats(min_value=5e-324, allow_infinity=False, allow_nan=False))
def test_power_of_two_is_just_below_and_normal_with_its_inverse(x):
    power = power_of_two(x)
    assert math.frexp(power)[0] == 0.5
    assert min(power, 1 / power) >= 2.0**-1022
    assert max(power, 1 / power) <= float(GREATEST)
    if 2.0**-1021 <= x < 2.0**1022:
        assert power <= x < 2 * power
    assert power_of_two(0.0) == 0.0


@LAWS
@given(st.floats(0, 1e300, allow_subnormal=False), st.integers(1, 12))
def test_digits_up_is_above_and_close(bound, digits):
    shown = float(f"{digits_up(bound, digits):.{digits}g}")
    assert bound <= shown <= bound * (1 + 10.0 ** (1 - digits))
