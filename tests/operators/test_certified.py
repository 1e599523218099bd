"""Operators as a frozen network runs them: the same maps, their norms, their rounding, their files, the checker."""

import itertools
import math
from fractions import Fraction

import flint
import numpy as np
import pytest
import torch
from torch import Tensor

import lipflow
from lipflow import check
from lipflow.operators import Adjoint, ConvOperator, DenseOperator, FourierMultiplier
from lipflow.operators.certified import ENTRY, CertifiedFourier, certify, column_transform, row_transform
from lipflow.operators.columns import Columns
from lipflow.primitives import Affine, Gather
from tests.soundness import exact
from tests.soundness.forging import certificate
from tests.soundness.graphs import chain

GEOMETRIES = [
    dict(padding=padding, padding_mode=mode, stride=stride, dilation=dilation, groups=groups)
    for padding, mode, stride, dilation, groups in itertools.product(
        [0, ((1, 2), (0, 3))], ["zeros", "circular"], [1, (2, 3)], [1, (2, 1)], [1, 2]
    )
]


def _matrix(function, shape):
    count = torch.Size(shape).numel()
    return function(torch.eye(count, dtype=torch.float64).reshape(count, *shape)).reshape(count, -1).T


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("channels", [(2, 4), (6, 2)], ids=["widening", "narrowing"])
@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_a_convolution_is_the_operator(geometry, channels, many, monkeypatch):
    monkeypatch.setattr(Columns, "many_channels", many)
    torch.manual_seed(0)
    into, out = channels
    op = ConvOperator(torch.randn(out, into // geometry["groups"], 2, 3), (5, 6), **geometry)
    held = certify(op)
    dense = _matrix(op.with_kernel(op.kernel.double()), op.in_shape)
    torch.testing.assert_close(_matrix(held, op.in_shape), dense, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(_matrix(held.adjoint, op.out_shape), dense.T, rtol=1e-13, atol=1e-13)
    assert float(torch.linalg.matrix_norm(dense, 2)) <= held.norm
    assert float(torch.linalg.matrix_norm(dense.abs(), 2)) <= held.spread


OPERATORS = {
    "matrix": lambda: DenseOperator(torch.randn(4, 7)),
    "zeros": lambda: ConvOperator(torch.randn(4, 2, 3, 3), (4, 5), padding=1),
    "circular": lambda: ConvOperator(torch.randn(4, 2, 3, 3), (4, 5), padding=1, padding_mode="circular"),
    "strided": lambda: ConvOperator(torch.randn(4, 1, 3, 3), (4, 5), padding=0, stride=2, groups=2),
}


@pytest.mark.parametrize("both", ["apply", "adjoint"])
@pytest.mark.parametrize("name", OPERATORS)
def test_transforms_of_torch_func_give_the_matrix(name, both):
    torch.manual_seed(0)
    op = OPERATORS[name]()
    held = certify(op)
    function, shape = (held, op.in_shape) if both == "apply" else (held.adjoint, op.out_shape)
    matrix = _matrix(function, shape)
    x = torch.randn(3, *shape, dtype=torch.float64)
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        of_one = jacobian(lambda v: function(v[None])[0])(x[0])
        torch.testing.assert_close(of_one.reshape(matrix.shape), matrix, rtol=1e-14, atol=1e-14)
    # A batch of batches is run as one, so the numbers are the same.
    assert torch.equal(torch.func.vmap(function)(x[:, None])[:, 0], function(x))
    assert torch.equal(torch.func.vmap(function, in_dims=1)(x[None])[:, 0], function(x))
    assert not bool(torch.func.hessian(lambda v: function(v[None]).sum())(x[0]).any())


@pytest.mark.parametrize("name", OPERATORS)
def test_an_adjoint_has_the_constants_of_its_operator_and_weights_are_copied(name):
    op = OPERATORS[name]()
    held, back = certify(op), certify(Adjoint(op))
    assert back.in_shape == held.out_shape
    assert back.out_shape == held.in_shape
    assert back.norm == held.norm
    assert float(torch.linalg.matrix_norm(_matrix(held, op.in_shape).abs(), 2)) <= held.spread
    torch.testing.assert_close(_matrix(back, op.out_shape), _matrix(held, op.in_shape).T, rtol=0, atol=1e-14)
    assert back.apply_error(Fraction(3)) == held.adjoint_error(Fraction(3))
    assert back.adjoint_error(Fraction(3)) == held.apply_error(Fraction(3))
    assert certify(Adjoint(Adjoint(op))).in_shape == held.in_shape
    op.weight.zero_()
    assert bool(held.weight.any())


def test_operators_that_are_not_known_are_refused():
    class Twice(DenseOperator):
        pass

    with pytest.raises(TypeError, match="FourierMultiplier, not Twice"):
        certify(Twice(torch.eye(2)))


# Fourier multipliers

SIZES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 4), (4, 3), (5, 5), (4, 6)]
PRECISION = 256  # bits; the radius of every ball below is far under an ulp of float64


def _random(h: int, w: int, out: int, into: int, seed: int = 0, scale: float = 1.0) -> CertifiedFourier:
    """Matrices that no convolution has: not even those at mirrored frequencies agree."""
    g = torch.Generator().manual_seed(seed)
    shape = (h, w // 2 + 1, out, into)
    real, imaginary = (scale * torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(2))
    held = certify(FourierMultiplier(torch.complex(real, imaginary), (h, w)))
    assert isinstance(held, CertifiedFourier)
    return held


def _waves(size: int) -> tuple[list[list[flint.arb]], list[list[flint.arb]]]:
    """cos and sin of 2πfj/size in balls."""
    angle = [[flint.arb(flint.fmpq(2 * f * j % (2 * size), size)) for j in range(size)] for f in range(size)]
    return [[a.cos_pi() for a in row] for row in angle], [[a.sin_pi() for a in row] for row in angle]


@pytest.fixture(autouse=True)
def _many_bits():
    before, flint.ctx.prec = flint.ctx.prec, PRECISION
    yield
    flint.ctx.prec = before


def _off(computed: Tensor, p: CertifiedFourier, x: Tensor) -> Fraction:
    """‖computed - exact‖² of one image."""
    return exact.fraction(exact.square(exact.rational(computed) - exact.apply(p, exact.rational(x))))


@pytest.mark.parametrize("scale", [1.0, 1e-160, 1e100])
@pytest.mark.parametrize("size", SIZES)
def test_the_program_is_within_its_error_of_the_exact_map(size, scale):
    p = _random(*size, out=2, into=3, scale=scale)
    for seed, reach in enumerate((1e-3, 1e6)):
        x = torch.randn(3, *size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        x = x * reach / x.norm()
        y, allowed = p(x[None])[0], p.apply_error(Fraction(float(x.norm()) * (1 + 1e-12)))
        assert _off(y, p, x) <= allowed**2
        assert allowed <= Fraction(1e-11) * Fraction(p.norm) * Fraction(reach), "a bound that loose says nothing"
        if scale == 1.0:  # nor is it so loose that a program that loses bits would pass
            assert _off(y.float().double(), p, x) > allowed**2


@pytest.mark.parametrize("n", range(1, 41))
def test_transforms_are_within_their_entries(n):
    """|entry - exact| ≤ 12u·√(c/n), for R and G, against balls."""
    cosine, sine = _waves(n)
    m = n // 2 + 1
    rows, columns = row_transform(n), column_transform(n)
    for f in range(n):
        for j in range(n):
            amplitude = (flint.arb(1) / n).sqrt()
            allowed = float(ENTRY) * float(amplitude)
            for value, wave in (
                (columns[f, j], cosine[f][j]),
                (columns[n + f, n + j], cosine[f][j]),
                (columns[f, n + j], sine[f][j]),
                (columns[n + f, j], -sine[f][j]),
            ):
                assert float(abs(flint.arb(float(value)) - amplitude * wave).upper()) <= allowed
            if f < m:
                amplitude = amplitude if 2 * f % n == 0 else amplitude * flint.arb(2).sqrt()
                allowed = float(ENTRY) * float(amplitude)
                assert float(abs(flint.arb(float(rows[f, j])) - amplitude * cosine[f][j]).upper()) <= allowed
                assert float(abs(flint.arb(float(rows[m + f, j])) + amplitude * sine[f][j]).upper()) <= allowed


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 32])
def test_transforms_are_isometries(n):
    rows, columns = row_transform(n), column_transform(n)
    torch.testing.assert_close(rows.T @ rows, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-14)
    torch.testing.assert_close(columns.T @ columns, torch.eye(2 * n, dtype=torch.float64), rtol=0, atol=1e-14)
    # ‖|R|‖ ≤ √n and ‖|G|‖ ≤ √(2n), which the error counts on
    assert float(torch.linalg.matrix_norm(rows.abs(), 2)) <= math.sqrt(n) * (1 + 1e-12)
    assert float(torch.linalg.matrix_norm(columns.abs(), 2)) <= math.sqrt(2 * n) * (1 + 1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_the_norm_covers_the_map_at_every_frequency(size):
    """Of matrices that are not mirrored, too: at 0 and w/2 the exact map takes a real part, which only shortens."""
    p = _random(*size, out=2, into=2)
    n = 2 * math.prod(size)
    matrix = p(torch.eye(n, dtype=torch.float64).reshape(n, 2, *size)).reshape(n, n)
    norms = torch.linalg.matrix_norm(torch.complex(p.real, p.imaginary), 2)
    assert float(torch.linalg.matrix_norm(matrix, 2)) <= p.norm
    assert float(norms.max()) <= p.norm <= float(norms.max()) * (1 + 1e-8)
    spread = torch.linalg.matrix_norm(p.real.abs() + p.imaginary.abs(), 2).max()
    assert float(spread) <= float(p.spread)


@pytest.mark.parametrize("size", [(4, 4), (3, 5), (5, 4), (1, 6)])
def test_it_is_the_circular_convolution(size):
    """The symbol of a kernel, run by the operator, is the kernel run by torch; derivatives included."""
    torch.manual_seed(0)
    op = lipflow.ConvOperator(torch.randn(3, 2, 3, 3, dtype=torch.float64), size, padding=1, padding_mode="circular")
    p = certify(FourierMultiplier(lipflow.flows.resolvent.symbols(op)[0], size))
    x = torch.randn(4, 2, *size, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(p(x), op(x))
    g = torch.randn(4, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(p(x), x, g)[0], op.adjoint(g))


def test_wrong_inputs_are_refused():
    p = _random(3, 4, 2, 2)
    matrices = torch.complex(p.real, p.imaginary)
    for wrong, size in ((matrices, (3, 6)), (matrices, (4, 4)), (matrices[0], (3, 4)), (matrices[..., :0], (3, 4))):
        with pytest.raises(ValueError, match=r"a Fourier multiplier on .* takes matrices"):
            FourierMultiplier(wrong, size)
    with pytest.raises(ValueError, match=r"affine .* does not take an input of shape \(2, 3, 5\)"):
        Affine(p, None).out_shape((2, 3, 5))
    with pytest.raises(ValueError, match="NaN or infinite"):
        certify(FourierMultiplier(torch.full((2, 2, 1, 1), torch.nan, dtype=torch.complex128), (2, 2)))


# The checker


def test_a_zero_map_is_checked_too(tmp_path):
    zero = FourierMultiplier(torch.zeros(2, 2, 2, 2, dtype=torch.complex128), (2, 3))
    moved = Affine(certify(zero), torch.tensor([0.5, 0.25], dtype=torch.float64))
    still = chain((2, 2, 3), moved, Gather(torch.arange(12), [12]))
    images = torch.rand(2, 2, 2, 3, dtype=torch.float64)
    assert torch.equal(still(images)[0], torch.tensor([0.5] * 6 + [0.25] * 6, dtype=torch.float64))
    certificate(tmp_path, still, images)
    check.check(tmp_path, full=True)


def test_the_checker_derives_the_same_error():
    """Two programs, one derivation: NumPy's error is at most the stated one, and hardly below it."""
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
