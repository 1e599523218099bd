import itertools

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lipflow.operators.fourier import phases, symbol, unit_circle
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


@pytest.mark.parametrize("denominator", [1, 2, 3, 7, 8, 66, 67, 2 * 33 * 33, 1000])
def test_unit_circle_is_within_8u_on_whole_circles(denominator):
    assert worst_error(list(range(denominator)), denominator) <= EIGHT_U


@pytest.mark.parametrize("denominator", [4, 8, 12, 40, 2**20])
def test_unit_circle_is_exact_at_quarter_turns(denominator):
    quarters = torch.arange(-8, 9)
    x, y = unit_circle(quarters * (denominator // 4), denominator)
    assert x.tolist() == [(1, 0, -1, 0)[q % 4] for q in quarters.tolist()]
    assert y.tolist() == [(0, 1, 0, -1)[q % 4] for q in quarters.tolist()]


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


def test_the_symbol_is_the_discrete_fourier_transform_of_the_kernel():
    kernel = torch.randn(4, 3, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    real, imaginary = symbol(kernel, *phases((3, 2), (1, 1), (5, 6), (torch.arange(5), torch.arange(6))))
    expected = torch.fft.fft2(kernel, s=(5, 6)).conj().permute(2, 3, 0, 1).reshape(30, 4, 3)
    torch.testing.assert_close(torch.complex(real, imaginary), expected.resolve_conj(), rtol=0, atol=1e-14)
