import itertools

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lipflow.operators.fourier import phases, unit_circle
from tests.operators.test_conv import LAWS

EIGHT_U = mpmath.mpf(8) / 2**53


def worst_error(numerators: list[int], denominator: int):
    """The greatest error of cos and sin of 2πt/denominator, against 60 digits."""
    x, y = unit_circle(torch.tensor(numerators), denominator)
    with mpmath.workdps(60):
        worst = mpmath.mpf(0)
        for t, cosine, sine in zip(numerators, x.tolist(), y.tolist(), strict=True):
            turn = 2 * mpmath.mpf(t % denominator) / denominator
            worst = max(worst, abs(cosine - mpmath.cospi(turn)), abs(sine - mpmath.sinpi(turn)))
        return worst


@LAWS
@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=20), st.integers(1, 2**31))
def test_unit_circle_is_within_8u(numerators, denominator):
    assert worst_error(numerators, denominator) <= EIGHT_U


@pytest.mark.parametrize("twist", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 3), (50, 7)])
def test_phases_are_the_waves_of_a_twisted_torus(twist, dilation):
    sides, kernel_size = (5, 7), (3, 2)
    frequencies = (torch.arange(5), torch.arange(7))
    cosine, sine = phases(kernel_size, dilation, sides, frequencies, twist)
    assert cosine.shape == sine.shape == (6, 5, 7)
    with mpmath.workdps(60):
        for tap, row, column in itertools.product(range(6), range(5), range(7)):
            turn = mpmath.mpf(0)
            for axis, (f, j) in enumerate(((row, tap // 2), (column, tap % 2))):
                turn += mpmath.mpf((2 * f + twist[axis]) * dilation[axis] * j) / sides[axis]
            assert abs(float(cosine[tap, row, column]) - mpmath.cospi(turn)) <= EIGHT_U
            assert abs(float(sine[tap, row, column]) - mpmath.sinpi(turn)) <= EIGHT_U
