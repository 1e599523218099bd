"""The laws of directed rounding, against exact rationals."""

import math
from decimal import Decimal
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
    exactly,
    gamma,
    mul_up,
    norm_up,
    power_of_two,
    sqrt_up,
    square_sum_bound,
    square_sum_max,
    up,
)

LAWS = settings(max_examples=300, deadline=None, derandomize=True)
GREATEST = Fraction(torch.finfo(torch.float64).max)

positive = st.floats(min_value=0, allow_infinity=False, allow_nan=False)
finite = st.floats(allow_infinity=False, allow_nan=False)
# Rationals that are floats, that are between two floats, and that are beyond them on either side.
rationals = st.one_of(
    finite.map(Fraction),
    st.fractions(),
    st.builds(lambda x, n: Fraction(x) * (1 + Fraction(n, 2**60)), finite, st.integers(-200, 200)),
    st.builds(lambda a, n: Fraction(a) * Fraction(2) ** n, st.integers(-(2**70), 2**70), st.integers(-1200, 1200)),
)
tensors = st.lists(finite, max_size=12).map(lambda values: torch.tensor(values, dtype=torch.float64))
moderate = st.lists(st.floats(-2, 2), min_size=1, max_size=12).map(lambda v: torch.tensor(v, dtype=torch.float64))


def is_least_above(x: float, q: Fraction) -> bool:
    """Whether x is the least float64 that is at least q and not a positive subnormal; ∞ counts as one."""
    if math.isinf(x):
        return x > 0 and q > GREATEST
    if 0 < q < TINY:
        return Fraction(x) == TINY
    before = math.nextafter(x, -math.inf)
    return Fraction(x) >= q and (math.isinf(before) or Fraction(before) < q)


@LAWS
@given(rationals)
def test_up_is_the_least_float_above_and_down_the_greatest_below(q):
    assert is_least_above(up(q), q)
    assert is_least_above(-down(q), -q)


@given(st.integers(-(2**1100), 2**1100))
def test_integers_round_too(n):
    assert is_least_above(up(n), Fraction(n))
    assert is_least_above(-down(n), Fraction(-n))


@LAWS
@given(finite)
def test_floats_are_kept_unless_a_processor_might_read_them_as_0(x):
    if 0 < abs(x) < TINY:
        assert up(abs(Fraction(x))) == TINY == -down(-abs(Fraction(x)))
    else:
        assert up(Fraction(x)) == x == down(Fraction(x))


@LAWS
@given(rationals.map(abs))
def test_square_roots_are_above_and_within_their_accuracy(q):
    above, accuracy = sqrt_up(q), 1 + Fraction(1, 2**60)
    assert q <= above**2 <= q * accuracy**2


@LAWS
@given(st.fractions(min_value=0))
def test_the_root_of_a_square_is_exact(root):
    assert sqrt_up(root**2) == root


def test_the_root_of_a_negative_number_is_refused_and_quoted():
    with pytest.raises(ValueError, match=r"-2\.0"):
        sqrt_up(Fraction(-2))


@LAWS
@given(positive, positive)
def test_sums_and_products_are_rounded_up_once(a, b):
    assert is_least_above(add_up(a, b), Fraction(a) + Fraction(b))
    assert is_least_above(mul_up(a, b), Fraction(a) * Fraction(b))


def test_infinity_absorbs_sums_and_a_zero_map_absorbs_infinity():
    assert add_up(math.inf, 1.0) == add_up(1.0, math.inf) == math.inf
    assert mul_up(math.inf, 2.0) == mul_up(2.0, math.inf) == math.inf
    assert mul_up(0.0, math.inf) == mul_up(math.inf, 0.0) == 0.0


@LAWS
@given(st.integers(0, 40))
def test_gamma_covers_n_roundings_in_either_direction(n):
    assert (1 + U) ** n - 1 <= gamma(n)
    assert 1 - (1 - U) ** n <= gamma(n)
    assert 1 / (1 - U) ** n - 1 <= gamma(n)


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_gammas_add_as_in_higham(m, n):
    """γ_m + γ_n + γ_m·γ_n ≤ γ_{m+n} (Higham 2002, lemma 3.3)."""
    assert gamma(m) + gamma(n) + gamma(m) * gamma(n) <= gamma(m + n)


def test_gamma_of_too_many_roundings_is_refused_and_quoted():
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


def test_norm_up_of_what_has_no_norm_is_infinite():
    assert norm_up(torch.tensor([1.0, math.nan])) == math.inf
    assert norm_up(torch.tensor([1.0, -math.inf])) == math.inf


def test_norm_up_of_nothing_and_of_zeros_is_zero():
    assert norm_up(torch.empty(0)) == 0.0
    assert norm_up(torch.zeros(3, 4)) == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_norm_up_takes_any_dtype_as_it_is_stored(dtype):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    assert norm_up(x) == norm_up(x.double())


@LAWS
@given(moderate)
def test_sums_of_squares_are_bounded(x):
    exact = sum((Fraction(v) ** 2 for v in x.tolist()), Fraction(0))
    assert exact <= square_sum_bound(x) <= exact * (1 + 40 * U) + 24 * TINY


def test_the_greatest_sum_of_squares_of_a_batch_is_bounded():
    x = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = max(sum(Fraction(v) ** 2 for v in m.flatten().tolist()) for m in x)
    assert exact <= square_sum_max(x) <= exact * (1 + 40 * U)
    assert square_sum_max(x[:, :0]) == 0


@LAWS
@given(st.floats(min_value=5e-324, allow_infinity=False, allow_nan=False))
def test_the_power_of_two_is_just_below_where_it_and_its_inverse_are_normal(x):
    power = power_of_two(x)
    assert math.frexp(power)[0] == 0.5
    assert is_normal(power)
    assert is_normal(1 / power)
    if 2.0**-1021 <= x < 2.0**1022:
        assert power <= x < 2 * power


def is_normal(x: float) -> bool:
    return 2.0**-1022 <= x <= float(GREATEST)


def test_zero_has_no_power_of_two():
    assert power_of_two(0.0) == 0.0


@pytest.mark.parametrize(
    ("bound", "digits"), [(1.0000004, 6), (2.46e-11, 3), (1.2631697328227658, 12), (0.1, 3), (0.0, 3)]
)
def test_a_bound_is_not_shown_smaller_than_it_is(bound, digits):
    shown = float(f"{digits_up(bound, digits):.{digits}g}")
    assert bound <= shown <= bound * (1 + 10.0 ** (1 - digits))


@pytest.mark.parametrize(
    ("value", "exact"),
    [("36/255", Fraction(36, 255)), (Decimal("0.1"), Fraction(1, 10)), (0.1, Fraction(0.1)), (2**60 + 1, 2**60 + 1)],
)
def test_a_number_is_taken_as_it_is_written_or_stored(value, exact):
    assert exactly(value) == exact
