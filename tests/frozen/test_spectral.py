"""The spectral primitive: its exact map in ball arithmetic, what it rounds, its norm, its file and its checker."""

import hashlib
import json
import math
from fractions import Fraction

import flint
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lipflow
from lipflow import check, record
from lipflow.frozen.spectral import ENTRY, Spectral, column_transform, row_transform, spectral
from lipflow.rounding import sqrt_up

SIZES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 4), (4, 3), (5, 5), (4, 6)]
PRECISION = 256  # bits; the radius of every ball below is far under an ulp of float64


def _random(h: int, w: int, out: int, into: int, seed: int = 0, scale: float = 1.0) -> Spectral:
    """Matrices that no convolution has: not even those at mirrored frequencies agree."""
    g = torch.Generator().manual_seed(seed)
    shape = (h, w // 2 + 1, out, into)
    real, imaginary = (scale * torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(2))
    return Spectral(real, imaginary, w)


def _waves(size: int) -> tuple[list[list[flint.arb]], list[list[flint.arb]]]:
    """cos and sin of 2πfj/size in balls."""
    angle = [[flint.arb(flint.fmpq(2 * f * j % (2 * size), size)) for j in range(size)] for f in range(size)]
    return [[a.cos_pi() for a in row] for row in angle], [[a.sin_pi() for a in row] for row in angle]


def exact_spectral(p: Spectral, x: np.ndarray) -> np.ndarray:
    """The exact map on an array of arb (in, h, w), by the definition: Re F*(M · Fx) with F the unitary transform.

    The half that is not stored is the conjugate mirror of the stored one, except in the columns 0 and w/2, which are
    stored whole and taken as they are. This is not how the primitive computes; it is what it should equal.
    """
    (h, m, out, into), w = p.real.shape, p.width
    (ch, sh), (cw, sw) = _waves(h), _waves(w)
    zero = flint.arb(0)

    def wave(f: int, g: int, a: int, b: int) -> tuple[flint.arb, flint.arb]:
        """cos and sin of 2π(fa/h + gb/w)."""
        return ch[f][a] * cw[g][b] - sh[f][a] * sw[g][b], sh[f][a] * cw[g][b] + ch[f][a] * sw[g][b]

    y = np.full((out, h, w), zero, dtype=object)
    for f in range(h):
        for g in range(m):
            twice = 1 if 2 * g % w == 0 else 2
            re, im = [zero] * into, [zero] * into
            for c in range(into):
                for a in range(h):
                    for b in range(w):
                        cosine, sine = wave(f, g, a, b)
                        re[c], im[c] = re[c] + x[c, a, b] * cosine, im[c] - x[c, a, b] * sine
            for o in range(out):
                row = [
                    (flint.arb(float(p.real[f, g, o, c])), flint.arb(float(p.imaginary[f, g, o, c])))
                    for c in range(into)
                ]
                z_re = sum((r * re[c] - i * im[c] for c, (r, i) in enumerate(row)), zero)
                z_im = sum((r * im[c] + i * re[c] for c, (r, i) in enumerate(row)), zero)
                for a in range(h):
                    for b in range(w):
                        cosine, sine = wave(f, g, a, b)
                        y[o, a, b] += twice * (z_re * cosine - z_im * sine) / (h * w)
    return y


def _balls(x: Tensor) -> np.ndarray:
    values = np.empty(x.shape, dtype=object)
    for index in np.ndindex(*x.shape):
        values[index] = flint.arb(float(x[index]))
    return values


def _distance(computed: Tensor, exact: np.ndarray) -> float:
    """‖computed - exact‖, from above."""
    total = flint.arb(0)
    for index in np.ndindex(*exact.shape):
        total += (flint.arb(float(computed[index])) - exact[index]) ** 2
    return float(total.sqrt().upper())


@pytest.fixture(autouse=True)
def _many_bits():
    before, flint.ctx.prec = flint.ctx.prec, PRECISION
    yield
    flint.ctx.prec = before


@pytest.mark.parametrize("scale", [1.0, 1e-160, 1e100])
@pytest.mark.parametrize("size", SIZES)
def test_the_program_is_within_its_error_of_the_exact_map(size, scale):
    p = _random(*size, out=2, into=3, scale=scale)
    for seed, reach in enumerate((1e-3, 1.0, 1e6)):
        x = torch.randn(3, *size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        x = x * reach / x.norm()
        off = _distance(p(x[None])[0], exact_spectral(p, _balls(x)))
        allowed = p.error(Fraction(float(x.norm()) * (1 + 1e-12)), x.numel())
        assert Fraction(off) <= allowed
        assert allowed <= Fraction(1e-11) * Fraction(p.norm) * Fraction(reach), "a bound that loose says nothing"


def test_the_error_is_found_to_be_real():
    """A program that loses a bit is caught: the bound is not so loose that anything would pass."""
    p = _random(4, 6, 2, 3)
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    exact = exact_spectral(p, _balls(x))
    allowed = p.error(Fraction(float(x.norm()) * (1 + 1e-12)), x.numel())
    assert Fraction(_distance(p(x[None])[0].float().double(), exact)) > allowed


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
            for value, exact in (
                (columns[f, j], cosine[f][j]),
                (columns[n + f, n + j], cosine[f][j]),
                (columns[f, n + j], sine[f][j]),
                (columns[n + f, j], -sine[f][j]),
            ):
                assert float(abs(flint.arb(float(value)) - amplitude * exact).upper()) <= allowed
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
    assert sqrt_up(Fraction(0)) == 0
    spread = torch.linalg.matrix_norm(p.real.abs() + p.imaginary.abs(), 2).max()
    assert float(spread) <= float(p.spread)


@pytest.mark.parametrize("size", [(4, 4), (3, 5), (5, 4), (1, 6)])
def test_it_is_the_circular_convolution(size):
    """The symbol of a kernel, run by the primitive, is the kernel run by torch; derivatives included."""
    torch.manual_seed(0)
    op = lipflow.Conv2d(torch.randn(3, 2, 3, 3, dtype=torch.float64), size, padding=1, padding_mode="circular")
    p = spectral(lipflow.flows.resolvent.symbols(op)[0], size[1])
    x = torch.randn(4, 2, *size, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(p(x), op(x))
    g = torch.randn(4, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(p(x), x, g)[0], op.adjoint(g))


def test_wrong_inputs_are_refused():
    p = _random(3, 4, 2, 2)
    assert p.fits((2, 3, 4))
    assert not p.fits((2, 3, 5))
    for real, imaginary, width in [
        (p.real, p.imaginary, 6),
        (p.real, p.imaginary[:2], 4),
        (p.real[0], p.imaginary[0], 4),
    ]:
        with pytest.raises(ValueError, match="a spectral primitive cannot be built"):
            Spectral(real, imaginary, width)
    with pytest.raises(ValueError, match="NaN or infinite"):
        spectral(torch.full((2, 2, 1, 1), torch.nan, dtype=torch.complex128), 2)


# The file, and the checker


def _write(folder, model: nn.Module, shape: tuple[int, ...]) -> lipflow.Frozen:
    frozen = lipflow.freeze(nn.Sequential(model, nn.Flatten()), in_shape=shape)
    images = torch.rand(6, *shape, dtype=torch.float64)
    certificates = lipflow.certify(frozen, images)
    record.write(folder, frozen, certificates, images, certificates.label)
    return frozen


@pytest.mark.parametrize(("into", "out", "size"), [(2, 3, (4, 4)), (3, 2, (3, 5)), (1, 1, (1, 1)), (2, 2, (2, 7))])
def test_frozen_certified_written_and_checked(into, out, size, tmp_path):
    torch.manual_seed(0)
    if (into, size) == (1, (1, 1)):
        model = nn.Sequential(lipflow.cayley_conv(1, 1), lipflow.blocks.PadChannels(2))
    else:
        model = lipflow.cayley_conv(into, out, 3)
    frozen = _write(tmp_path, model.double(), (into, *size))
    assert "the scores of 6 of 6 images" in check.check(tmp_path, full=True)
    assert frozen.lipschitz <= 1 + 1e-8
    loaded = lipflow.Frozen.load(tmp_path / record.WEIGHTS)
    assert (loaded.digest, loaded.rounding) == (frozen.digest, frozen.rounding)


def test_a_zero_map_is_checked_too(tmp_path):
    layer = lipflow.Flow(lipflow.Skew(lipflow.ConvWeight(2, 2, padding_mode="circular")), lipflow.ImplicitEuler())
    frozen = lipflow.freeze(nn.Sequential(layer, nn.Flatten()), in_shape=(2, 2, 3))
    p = frozen.primitives[0]
    still = lipflow.Frozen([Spectral(0 * p.real, 0 * p.imaginary, p.width), *frozen.primitives[1:]], (2, 2, 3))
    images = torch.rand(2, 2, 2, 3, dtype=torch.float64)
    certificates = lipflow.certify(still, images)
    record.write(tmp_path, still, certificates, images, certificates.label)
    check.check(tmp_path, full=True)


def _sign(folder, claims):
    claims.pop("digest", None)
    claims["files"] = {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in (record.WEIGHTS, record.ROWS)}
    (folder / record.CLAIMS).write_text(json.dumps(dict(claims, digest=record.digest(claims))))


@pytest.mark.parametrize(
    ("field", "change", "words"),
    [
        ("norm", lambda v: v * (1 - 1e-6), "claimed norm"),
        ("norm", lambda v: -v, "a norm is not negative"),
        ("norm", lambda v: 0.0, "claimed norm is not above"),
        ("lipschitz", lambda v: v * (1 - 1e-6), "L = .* stated too low"),
        ("rounding", lambda v: v * (1 - 1e-6), "rounding is stated too low"),
        ("norm", None, "cannot be read"),
    ],
)
def test_false_claims_are_rejected(field, change, words, tmp_path):
    torch.manual_seed(0)
    _write(tmp_path, lipflow.cayley_conv(2, 3).double(), (2, 3, 4))
    claims = json.loads((tmp_path / record.CLAIMS).read_text())
    if change is None:
        del claims["primitives"][0][field]
    else:
        claims["primitives"][0][field] = change(claims["primitives"][0][field])
    _sign(tmp_path, claims)
    with pytest.raises(check.Rejected, match=words):
        check.check(tmp_path)


def test_the_checker_derives_the_same_error():
    """Two programs, one derivation: NumPy's error is at most the stated one, and hardly below it."""
    p = _random(5, 6, 3, 2)
    twin = check.Spectral(dict(width=6), dict(real=p.real.numpy(), imaginary=p.imaginary.numpy()), Fraction(p.norm))
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    stated, derived = p.error(Fraction(7), 60), twin.error(Fraction(7), 60)
    assert stated * (1 - Fraction(1, 2**30)) <= derived <= stated
    apart = float(np.linalg.norm(twin.run(x.numpy()) - p(x).numpy()))
    assert apart <= 2 * float(p.error(Fraction(float(x.norm()) * 1.001), 60))
