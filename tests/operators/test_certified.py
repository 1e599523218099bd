"""Operators as a frozen network runs them: the same maps, their norms, their rounding errors, and the checker."""

import itertools
from fractions import Fraction

import flint
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lipflow import check
from lipflow.operators import Adjoint, ConvOperator, DenseOperator, FourierMultiplier
from lipflow.operators.certified import (
    TRANSFORM_ERROR,
    CertifiedFourier,
    certified_operator,
    column_transform,
    row_transform,
)
from lipflow.operators.columns import Columns
from lipflow.primitives import Affine, Gather
from tests.operators.geometry import matrix_of
from tests.operators.test_conv import LAWS, geometries, integers
from tests.soundness import exact
from tests.soundness.forging import certificate
from tests.soundness.graphs import chain


@LAWS
@given(geometries(), st.booleans(), st.integers(0, 10**6))
def test_certified_convolutions_are_the_operator_within_its_bounds(geometry, many, seed):
    kernel = integers(*geometry.kernel_shape, seed=seed)
    op = geometry.conv(kernel)
    dense, certified, adjoint = geometry.matrix(kernel), certified_operator(op), certified_operator(Adjoint(op))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Columns, "many_channels", many)
        assert torch.equal(matrix_of(certified), dense)
        assert torch.equal(matrix_of(adjoint), dense.T)
    assert torch.equal(matrix_of(adjoint.with_weight(2 * adjoint.weight)), 2 * dense.T)
    assert float(torch.linalg.matrix_norm(dense, 2)) <= certified.norm == adjoint.norm
    assert float(torch.linalg.matrix_norm(dense.abs(), 2)) <= certified.spread
    assert (adjoint.in_shape, adjoint.out_shape) == (certified.out_shape, certified.in_shape)
    assert adjoint.apply_error(Fraction(3)) == certified.adjoint_error(Fraction(3))
    assert adjoint.adjoint_error(Fraction(3)) == certified.apply_error(Fraction(3))


OPERATORS = {
    "matrix": lambda: DenseOperator(torch.randn(4, 7)),
    "zeros": lambda: ConvOperator(torch.randn(4, 2, 3, 3), (4, 5), padding=1),
    "circular": lambda: ConvOperator(torch.randn(4, 2, 3, 3), (4, 5), padding=1, padding_mode="circular"),
    "strided": lambda: ConvOperator(torch.randn(4, 1, 3, 3), (4, 5), padding=0, stride=2, groups=2),
}


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_certified_operators_have_the_derivatives_of_their_matrix(name, adjoint):
    op = OPERATORS[name]()
    certified = certified_operator(Adjoint(op) if adjoint else op)
    matrix, x = matrix_of(certified), torch.randn(3, *certified.in_shape, dtype=torch.float64)
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        found = jacobian(lambda v: certified(v[None])[0])(x[0])
        torch.testing.assert_close(found.reshape(matrix.shape), matrix, rtol=1e-14, atol=1e-14)
    # A batch of batches runs as one batch, so the values are the same.
    assert torch.equal(torch.func.vmap(certified)(x[:, None])[:, 0], certified(x))
    assert torch.equal(torch.func.vmap(certified, in_dims=1)(x[None])[:, 0], certified(x))
    assert not bool(torch.func.hessian(lambda v: certified(v[None]).sum())(x[0]).any())


def test_a_certified_operator_owns_a_copy_of_its_weights():
    op = DenseOperator(torch.ones(2, 3, dtype=torch.float64))
    certified = certified_operator(op)
    op.weight.zero_()
    assert bool(certified.weight.any())


SIZES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 4), (4, 3), (5, 5), (4, 6)]
PRECISION = 256  # bits: the radius of every ball is far below an ulp of float64


def _random(h: int, w: int, out: int, into: int, scale: float = 1.0) -> CertifiedFourier:
    """Matrices of no convolution: they do not agree at mirrored frequencies."""
    matrices = torch.randn(h, w // 2 + 1, out, into, dtype=torch.complex128)
    certified = certified_operator(FourierMultiplier(scale * matrices, (h, w)))
    assert isinstance(certified, CertifiedFourier)
    return certified


def _waves(size: int) -> tuple[list[list[flint.arb]], list[list[flint.arb]]]:
    """cos and sin of 2πfj/size in balls."""
    angle = [[flint.arb(flint.fmpq(2 * f * j % (2 * size), size)) for j in range(size)] for f in range(size)]
    return [[a.cos_pi() for a in row] for row in angle], [[a.sin_pi() for a in row] for row in angle]


@pytest.fixture(autouse=True)
def _precision():
    with flint.ctx.workprec(PRECISION):
        yield


def _squared_error(computed: Tensor, p: CertifiedFourier, x: Tensor) -> Fraction:
    """‖computed - exact‖² of one image."""
    true = exact.of(chain(p.in_shape, Affine(p)))(exact.rational(x))
    return exact.square(exact.rational(computed) - true)


@pytest.mark.parametrize("scale", [1.0, 1e-160, 1e100])
@pytest.mark.parametrize("size", SIZES)
def test_fourier_is_within_its_error_of_the_exact_map(size, scale):
    p = _random(*size, out=2, into=3, scale=scale)
    for seed, reach in enumerate((1e-3, 1e6)):
        x = torch.randn(3, *size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        x = x * reach / x.norm()
        y, allowed = p(x[None])[0], p.apply_error(Fraction(float(x.norm()) * (1 + 1e-12)))
        assert _squared_error(y, p, x) <= allowed**2
        assert allowed <= Fraction(1e-11) * Fraction(p.norm) * Fraction(reach)
        if scale == 1.0:  # a program that loses bits would fail
            assert _squared_error(y.float().double(), p, x) > allowed**2


@pytest.mark.parametrize("n", range(1, 41))
def test_transforms_have_accurate_entries(n):
    """|entry - exact| ≤ 12u·√(c/n), for R and G, against balls."""
    cosine, sine = _waves(n)
    m, rows, columns = n // 2 + 1, row_transform(n), column_transform(n)
    for f, j in itertools.product(range(n), range(n)):
        entries = [
            (columns[f, j], cosine[f][j], 1),
            (columns[n + f, n + j], cosine[f][j], 1),
            (columns[f, n + j], sine[f][j], 1),
            (columns[n + f, j], -sine[f][j], 1),
        ]
        if f < m:
            c = 1 if 2 * f % n == 0 else 2
            entries += [(rows[f, j], cosine[f][j], c), (rows[m + f, j], -sine[f][j], c)]
        for value, wave, c in entries:
            amplitude = (flint.arb(c) / n).sqrt()
            error = float(abs(flint.arb(float(value)) - amplitude * wave).upper())
            assert error <= float(TRANSFORM_ERROR) * float(amplitude)


@pytest.mark.parametrize("size", SIZES)
def test_fourier_norm_is_at_least_that_of_the_map(size):
    """Also for matrices that are not mirrored: at 0 and w/2 the map takes real parts, which does not lengthen."""
    p = _random(*size, out=2, into=2)
    norms = torch.linalg.matrix_norm(torch.complex(p.real, p.imaginary), 2)
    assert float(torch.linalg.matrix_norm(matrix_of(p), 2)) <= p.norm
    assert float(norms.max()) <= p.norm <= float(norms.max()) * (1 + 1e-8)
    spread = torch.linalg.matrix_norm(p.real.abs() + p.imaginary.abs(), 2).max()
    assert float(spread) <= float(p.spread)


def test_fourier_rejects_wrong_inputs():
    p = _random(3, 4, 2, 2)
    matrices = torch.complex(p.real, p.imaginary)
    for wrong, size in ((matrices, (3, 6)), (matrices, (4, 4)), (matrices[0], (3, 4)), (matrices[..., :0], (3, 4))):
        with pytest.raises(ValueError, match=r"a Fourier multiplier on .* takes matrices"):
            FourierMultiplier(wrong, size)
    with pytest.raises(ValueError, match=r"affine .* does not take an input of shape \(2, 3, 5\)"):
        Affine(p, None).out_shape((2, 3, 5))
    with pytest.raises(ValueError, match="NaN or infinite"):
        certified_operator(FourierMultiplier(torch.full((2, 2, 1, 1), torch.nan, dtype=torch.complex128), (2, 2)))


def test_checker_accepts_a_zero_map(tmp_path):
    zero = FourierMultiplier(torch.zeros(2, 2, 2, 2, dtype=torch.complex128), (2, 3))
    shift = Affine(certified_operator(zero), torch.tensor([0.5, 0.25], dtype=torch.float64))
    network = chain((2, 2, 3), shift, Gather(torch.arange(12), [12]))
    images = torch.rand(2, 2, 2, 3, dtype=torch.float64)
    assert torch.equal(network(images)[0], torch.tensor([0.5] * 6 + [0.25] * 6, dtype=torch.float64))
    certificate(tmp_path, network, images)
    check.check(tmp_path, full=True)


def test_checker_derives_the_same_error():
    """The error that the checker derives is at most the stated one, and within 2⁻³⁰ of it."""
    p = _random(5, 6, 3, 2)
    twin = check.Fourier(p.real.numpy(), p.imaginary.numpy(), dict(in_size=[5, 6]))
    twin.norm = Fraction(p.norm)
    twin.verify(dict(norm=p.norm), "it")
    with pytest.raises(check.Rejected, match="claimed norm"):
        twin.verify(dict(norm=p.norm * (1 - 1e-6)), "it")
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    stated, derived = p.apply_error(Fraction(7)), twin.apply_error(Fraction(7))
    assert stated * (1 - Fraction(1, 2**30)) <= derived <= stated
    apart = float(np.linalg.norm(twin.apply(x.numpy()) - p(x).numpy()))
    assert apart <= 2 * float(p.apply_error(Fraction(float(x.norm()) * 1.001)))
