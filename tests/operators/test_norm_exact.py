"""norm_bound against exact references: LDLᵀ over the rationals, and closed forms in ball arithmetic."""

import math
import random
from fractions import Fraction

import flint
import pytest
import torch
from torch import Tensor

from lipflow import DenseOperator, norm_bound
from lipflow.operators import gram
from tests.operators.geometry import Geometry, draw_geometry

# Powers of two near 1e-310 (subnormal), 1e-300, 1e-170, 1, 1e20 and 1e300: multiplying by them is exact.
EXPONENTS = [-1030, -997, -565, 0, 66, 996]


def is_above_norm(bound: Fraction, matrix: Tensor) -> bool:
    """Whether bound > ‖W‖, decided exactly: bound²·I - WWᵀ is positive definite iff its LDLᵀ has D > 0."""
    rows, columns = matrix.shape
    entries = [[flint.fmpq(*x.as_integer_ratio()) for x in row] for row in matrix.tolist()]
    w = flint.fmpq_mat(entries)
    gram = w * w.transpose() if rows <= columns else w.transpose() * w
    size = gram.nrows()
    square = flint.fmpq(bound.numerator, bound.denominator) ** 2
    m = [[(square if i == j else 0) - gram[i, j] for j in range(size)] for i in range(size)]
    for i in range(size):
        pivot = m[i][i]
        if pivot <= 0:
            return False
        for j in range(i + 1, size):
            factor = m[j][i] / pivot
            if factor != 0:
                for k in range(i + 1, size):
                    m[j][k] -= factor * m[i][k]
    return True


def test_is_above_norm_decides_on_both_sides():
    matrix = torch.tensor([[3.0, 0.0], [4.0, 5.0]], dtype=torch.float64)  # ‖W‖² = 45
    root = Fraction(math.isqrt(45 * 10**60), 10**30)
    assert is_above_norm(root + Fraction(1, 10**30), matrix)
    assert not is_above_norm(root, matrix)
    assert not is_above_norm(Fraction(5), torch.tensor([[5.0]], dtype=torch.float64))


def exact_case(seed: int) -> tuple[Geometry, Tensor]:
    """A small convolution whose matrix has exact entries: integers with circular padding, where taps are added."""
    rng, generator = random.Random(1000 + seed), torch.Generator().manual_seed(seed)
    while True:
        geometry = draw_geometry(rng.randint, side=4, channels=2)
        rows = geometry.out * geometry.groups * math.prod(geometry.outputs)
        columns = geometry.grouped * geometry.groups * math.prod(geometry.size)
        if min(rows, columns) <= 16:
            break
    if geometry.mode == "circular":
        return geometry, torch.randint(-5, 6, geometry.kernel_shape, generator=generator).double()
    return geometry, torch.randn(geometry.kernel_shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(80))
def test_norm_bound_of_a_small_convolution_is_above_the_exact_norm(seed):
    geometry, kernel = exact_case(seed)
    if bool(kernel.any()):
        assert is_above_norm(Fraction(norm_bound(geometry.conv(kernel))), geometry.matrix(kernel))


@pytest.mark.parametrize("seed", range(20))
def test_norm_bound_of_a_small_matrix_is_above_the_exact_norm_and_tight(seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    weight = torch.randn(rng.randint(1, 12), rng.randint(1, 12), generator=generator, dtype=torch.float64)
    bound = Fraction(norm_bound(DenseOperator(weight)))
    assert is_above_norm(bound, weight)
    assert not is_above_norm(bound * (1 - Fraction(1, 10**9)), weight)


def kernel(*rows: list[float]) -> Tensor:
    return torch.tensor([[list(rows)]], dtype=torch.float64)


KERNELS = {
    "blur": torch.ones(1, 1, 3, 3, dtype=torch.float64),
    "laplacian": kernel([0, 1, 0], [1, -4, 1], [0, 1, 0]),
    "sobel": kernel([1, 0, -1], [2, 0, -2], [1, 0, -1]),
    "second difference": kernel([1, -2, 1], [-2, 4, -2], [1, -2, 1]),
}
ONES, TWOS, THREES = (1, 1), (2, 2), (3, 3)
GEOMETRIES = {
    "same": Geometry((4, 3), THREES, ONES, ONES),
    "torus": Geometry((4, 3), THREES, ONES, ONES, "circular"),
    "strided": Geometry((5, 4), THREES, ONES, ONES, stride=TWOS),
    "strided torus that does not fit": Geometry((5, 4), THREES, ONES, ONES, "circular", (2, 3)),
    "dilated": Geometry(THREES, THREES, TWOS, TWOS, dilation=TWOS),
    "dilated past the torus": Geometry((2, 3), THREES, (4, 4), (4, 4), "circular", ONES, (2, 3)),
    "leading padding": Geometry(TWOS, THREES, TWOS, (0, 0)),
    "trailing padding": Geometry(TWOS, THREES, (0, 0), TWOS),
    "padding beyond the torus": Geometry((2, 3), THREES, (5, 4), (3, 7), "circular"),
    "single pixel": Geometry(ONES, THREES, ONES, ONES),
    "single pixel, wide padding": Geometry(ONES, THREES, TWOS, TWOS),
    "single pixel on a torus": Geometry(ONES, THREES, ONES, ONES, "circular"),
}
HADAMARD = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]], dtype=torch.float64)
# Two taps at a distance of 2 meet on a torus of side 2 and cancel: the operator is 0, the kernel is not.
CANCELS = Geometry((1, 2), (1, 3), (0, 1), (0, 1), "circular"), kernel([1, 0, -1])
HARD: dict[str, tuple[Geometry, Tensor]] = {
    **{f"{name}, {where}": (geometry, KERNELS[name]) for name in KERNELS for where, geometry in GEOMETRIES.items()},
    "taps that cancel": CANCELS,
    # Output 4 has the position of output 0: the torus alone gives 2, the norm is 2.3277…
    "circular padding that does not fit the kernel": (
        Geometry((1, 4), (1, 2), (0, 1), (0, 1), "circular"),
        kernel([1, 1]),
    ),
    "stride beyond the kernel": (Geometry((6, 5), TWOS, (0, 1), (0, 0), stride=(3, 4)), kernel([1, 1], [1, 1])),
    "wide leading padding": (Geometry((2, 1), (4, 1), (3, 0), (0, 0)), kernel([1], [-2], [3], [5])),
    "even kernel": (Geometry((9, 1), (2, 1), (0, 0), (1, 0)), kernel([1], [1])),
    "padded point with a stride": (Geometry((3, 4), ONES, (1, 2), (2, 0), stride=(2, 3)), kernel([3])),
    "point on a torus with a stride": (Geometry((3, 4), ONES, (1, 2), (2, 5), "circular", (2, 3)), kernel([3])),
    "groups": (
        Geometry(TWOS, THREES, ONES, ONES, groups=2),
        torch.cat([KERNELS["sobel"] / 64, KERNELS["laplacian"] / 8]),
    ),
    "groups with a stride": (
        Geometry((4, 3), ONES, (0, 0), (0, 0), stride=(2, 1), groups=2, out=2, grouped=2),
        torch.arange(-4, 4).double().reshape(4, 2, 1, 1),
    ),
    "orthogonal channels": (Geometry(TWOS, ONES, (0, 0), (0, 0), out=4, grouped=4), HADAMARD.reshape(4, 4, 1, 1)),
}


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("family", HARD)
def test_norm_bound_of_a_hard_convolution_is_above_the_exact_norm_at_every_scale(family, exponent):
    geometry, unscaled = HARD[family]
    scaled = torch.ldexp(unscaled, torch.tensor(float(exponent), dtype=torch.float64))
    bound = Fraction(norm_bound(geometry.conv(scaled))) / Fraction(2) ** exponent
    assert is_above_norm(bound, geometry.matrix(unscaled))


def test_norm_bound_of_a_kernel_that_cancels_on_its_torus_is_rounding():
    geometry, difference = CANCELS
    assert not geometry.matrix(difference).any()
    assert norm_bound(geometry.conv(difference)) < 1e-13


DENSE: dict[str, Tensor] = {
    "identity": torch.eye(4, dtype=torch.float64),
    "orthogonal": HADAMARD,
    "near-degenerate": torch.eye(4).double() - 2.0**-30 * HADAMARD,
    "one ulp from degenerate": torch.eye(4).double()
    + 2.0**-52 * torch.diag(torch.tensor([0.0, 1.0, 0.0, 2.0]).double()),
    "rank one": torch.outer(torch.tensor([1.0, -2.0, 3.0]), torch.tensor([5.0, 1.0, -7.0, 2.0])).double(),
    "single entry": torch.tensor([[-3.0]], dtype=torch.float64),
    "row": torch.tensor([[3.0, -1.0, 2.0]], dtype=torch.float64),
    "column": torch.tensor([[3.0], [-1.0], [2.0]], dtype=torch.float64),
    "one entry among zeros": torch.diag(torch.tensor([0.0, 0.0, 7.0, 0.0])).double(),
    "entries far apart": torch.tensor([[1.0, 2.0**-40], [2.0**-44, 2.0**-20]], dtype=torch.float64),
}


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("family", DENSE)
def test_norm_bound_of_a_hard_matrix_is_above_the_exact_norm_and_tight_at_every_scale(family, exponent):
    scaled = torch.ldexp(DENSE[family], torch.tensor(float(exponent), dtype=torch.float64))
    bound = Fraction(norm_bound(DenseOperator(scaled)))
    assert is_above_norm(bound, scaled)
    # The last rounding is up to 2⁻¹⁰⁷⁴, and the bound allows for subnormal weights that are flushed to 0.
    subnormal = bool(((scaled != 0) & (scaled.abs() < 2.0**-1022)).any())
    priced = Fraction(scaled.numel() * sum(scaled.shape), 2**1022) if subnormal else 0
    assert not is_above_norm(bound * (1 - Fraction(1, 10**8)) - Fraction(1, 2**1074) - priced, scaled)


def test_norm_bound_includes_subnormal_weights_beside_a_normal_one():
    """Flushed to 0, fifteen of sixteen weights would be missing, and the norm is 2.2 times the remaining one."""
    weight = torch.full((1, 16), math.nextafter(2.0**-1022, 0.0), dtype=torch.float64)
    weight[0, 0] = 2.0**-1021
    torch.set_flush_denormal(True)  # where the processor can
    try:
        bound = norm_bound(DenseOperator(weight))
    finally:
        torch.set_flush_denormal(False)
    assert is_above_norm(Fraction(bound), weight)


@pytest.mark.parametrize("small", [2.0**-1070, 2.0**-500])
def test_norm_bound_includes_entries_that_underflow_beside_the_greatest(small):
    """Scaled by the greatest weight, 2⁻¹⁰⁷⁰ underflows."""
    weight = torch.tensor([[2.0**500, 2.0**500], [small, -small]], dtype=torch.float64)
    greatest = torch.tensor([[torch.finfo(torch.float64).max / 2]], dtype=torch.float64)
    for w in (weight, greatest):
        assert is_above_norm(Fraction(norm_bound(DenseOperator(w))), w)


def cosine(turns: Fraction) -> flint.arb:
    return flint.arb.cos_pi_fmpq(flint.fmpq(2 * turns.numerator, turns.denominator))


@pytest.mark.parametrize("n", [1, 2, 3, 8, 31, 100])
@pytest.mark.parametrize(("centre", "side"), [(1, 1), (2, -1), (0, 1)])
def test_norm_bound_is_above_known_norms_of_tridiagonal_toeplitz_matrices(n, centre, side):
    """[b, a, b] on n pixels has the eigenvalues a + 2b·cos(πj/(n + 1)), 1 ≤ j ≤ n."""
    eigenvalues = [abs(centre + 2 * side * cosine(Fraction(j, 2 * (n + 1)))) for j in range(1, n + 1)]
    geometry = Geometry((1, n), (1, 3), (0, 1), (0, 1))
    bound = flint.arb(norm_bound(geometry.conv(kernel([side, centre, side]))))
    assert all(bound >= value for value in eigenvalues if not value.contains(0))
    # The greatest norm of the symbol on the whole circle
    assert bound <= (abs(centre) + 2 * abs(side)) * (1 + flint.arb("1e-9"))


def test_gram_bound_includes_the_rounding_of_the_product(monkeypatch):
    """With μ = fl(WWᵀ) and a zero factor, only the allowance for the product's rounding is above the norm."""
    monkeypatch.setattr(gram, "band_shift", lambda d, below, guess=0.0: (float(d.max()), [torch.zeros_like(d[:, 0])]))
    lost = 0
    for seed in range(200):
        w = torch.rand(1, 1, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        exact = sum(Fraction(v) ** 2 for v in w.flatten().tolist())
        lost += Fraction(float(w[0] @ w[0].T)) < exact
        assert gram.gram_bound(w) >= exact
    assert lost > 20
