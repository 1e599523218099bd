"""norm_bound against exact references: LDLᵀ over the rationals."""

import math
import random
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from lipflow import ConvOperator, DenseOperator, norm_bound
from lipflow.operators import gram
from tests.operators.geometry import Geometry, draw_geometry, gaussian
from tests.soundness import exact

# Powers of two near 1e-310 (subnormal), 1e-300, 1e-170, 1, 1e20 and 1e300: multiplying by them is exact.
EXPONENTS = [-1030, -997, -565, 0, 66, 996]


def bounds_norm(bound: Fraction, matrix: Tensor) -> bool:
    """Whether bound ≥ ‖W‖, decided exactly."""
    return exact.bounds_squared_norm(exact.exact(bound) ** 2, exact.rational(matrix))


def test_bounds_decides_on_both_sides():
    matrix = torch.tensor([[3.0, 0.0], [4.0, 5.0]], dtype=torch.float64)  # ‖W‖² = 45
    root = Fraction(math.isqrt(45 * 10**60), 10**30)
    assert bounds_norm(root + Fraction(1, 10**30), matrix)
    assert not bounds_norm(root, matrix)
    assert bounds_norm(Fraction(5), 5 * torch.eye(2))
    assert not bounds_norm(5 - Fraction(1, 10**30), 5 * torch.eye(2))
    assert not bounds_norm(Fraction(1), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))  # the first pivot is 0


def is_small(geometry: Geometry) -> bool:
    rows = geometry.out * geometry.groups * math.prod(geometry.outputs)
    return min(rows, geometry.grouped * geometry.groups * math.prod(geometry.size)) <= 16


def exact_case(seed: int) -> tuple[Geometry, Tensor, int]:
    """A small convolution and an exponent of its scale. Integers, where scaling or adding taps would round others."""
    rng, generator = random.Random(1000 + seed), torch.Generator().manual_seed(seed)
    while not is_small(geometry := draw_geometry(rng.randint, side=4, channels=2)):
        pass
    shape, exponent = geometry.kernel_shape, rng.choice(EXPONENTS)
    smooth = torch.ones(shape, dtype=torch.float64)
    checkerboard = smooth * (-1.0) ** (torch.arange(shape[2])[:, None] + torch.arange(shape[3]))
    kernels = [smooth, checkerboard, torch.randint(-5, 6, shape, generator=generator).double()]
    if geometry.mode == "zeros" and exponent > -1000:
        kernels.append(torch.randn(shape, generator=generator, dtype=torch.float64))
    return geometry, rng.choice(kernels), exponent


@pytest.mark.parametrize("seed", range(300))
def test_norm_bound_of_a_small_convolution_is_above_the_exact_norm_at_every_scale(seed):
    geometry, kernel, exponent = exact_case(seed)
    matrix, scaled = geometry.matrix(kernel), torch.ldexp(kernel, torch.tensor(float(exponent), dtype=torch.float64))
    if bool(matrix.any()):
        assert bounds_norm(Fraction(norm_bound(geometry.conv(scaled))) / Fraction(2) ** exponent, matrix)


def test_norm_bound_of_a_kernel_that_cancels_on_its_torus_is_rounding():
    """Two taps at a distance of 2 meet on a torus of side 2 and cancel: the operator is 0, the kernel is not."""
    kernel = torch.tensor([[[[1.0, 0.0, -1.0]]]], dtype=torch.float64)
    geometry = Geometry((1, 2), (1, 3), (0, 1), (0, 1), "circular")
    assert not geometry.matrix(kernel).any()
    assert norm_bound(geometry.conv(kernel)) < 1e-13


HADAMARD = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]], dtype=torch.float64)
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
    **{f"random, {m} × {n}": gaussian((m, n), torch.Generator().manual_seed(m)) for m, n in ((3, 3), (5, 12), (11, 4))},
}


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("family", DENSE)
def test_norm_bound_of_a_matrix_is_above_the_exact_norm_and_tight_at_every_scale(family, exponent):
    scaled = torch.ldexp(DENSE[family], torch.tensor(float(exponent), dtype=torch.float64))
    bound = Fraction(norm_bound(DenseOperator(scaled)))
    assert bounds_norm(bound, scaled)
    # The last rounding is up to 2⁻¹⁰⁷⁴, and the bound allows for subnormal weights that are flushed to 0.
    subnormal = bool(((scaled != 0) & (scaled.abs() < 2.0**-1022)).any())
    priced = Fraction(scaled.numel() * sum(scaled.shape), 2**1022) if subnormal else 0
    assert not bounds_norm(bound * (1 - Fraction(1, 10**8)) - Fraction(1, 2**1074) - priced, scaled)


def test_norm_bound_includes_subnormal_weights_alone_and_beside_a_normal_one():
    """Flushed to 0, fifteen of sixteen weights would be missing, and the norm is 2.2 times the remaining one."""
    beside = torch.full((1, 16), math.nextafter(2.0**-1022, 0.0), dtype=torch.float64)
    beside[0, 0] = 2.0**-1021
    alone = torch.tensor([[1e-310]], dtype=torch.float64)
    ops = [DenseOperator(beside), DenseOperator(alone), ConvOperator(alone[None, None], (2, 2), padding=0)]
    torch.set_flush_denormal(True)  # where the processor can
    bounds = [norm_bound(op) for op in ops]
    torch.set_flush_denormal(False)  # comparisons flush too
    assert bounds_norm(Fraction(bounds[0]), beside)
    assert min(bounds[1:]) >= 1e-310


@pytest.mark.parametrize("small", [2.0**-1070, 2.0**-500])
def test_norm_bound_includes_entries_that_underflow_beside_the_greatest(small):
    """Scaled by the greatest weight, 2⁻¹⁰⁷⁰ underflows."""
    weight = torch.tensor([[2.0**500, 2.0**500], [small, -small]], dtype=torch.float64)
    greatest = torch.tensor([[torch.finfo(torch.float64).max / 2]], dtype=torch.float64)
    for w in (weight, greatest):
        assert bounds_norm(Fraction(norm_bound(DenseOperator(w))), w)


def test_gram_bound_includes_the_rounding_of_the_product(monkeypatch):
    """With μ = fl(WWᵀ) and a zero factor, only the allowance for the product's rounding is above the norm."""
    monkeypatch.setattr(gram, "band_shift", lambda d, below, guess=0.0: (float(d.max()), [torch.zeros_like(d[:, 0])]))
    lost = 0
    for seed in range(200):
        w = torch.rand(1, 1, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        square = sum(Fraction(v) ** 2 for v in w.flatten().tolist())
        lost += Fraction(float(w[0] @ w[0].T)) < square
        assert gram.gram_bound(w) >= square
    assert lost > 20
