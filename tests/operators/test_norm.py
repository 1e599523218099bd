"""norm_bound is never below the norm, against dense singular values; a wrong one would be caught.

test_norm_exact.py has the references that do not round, test_norm_tight.py says how far above it is, and
test_norm_estimate.py is about the estimate from below.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lipflow import ConvOperator, DenseOperator, LinearOperator, norm_bound
from lipflow.operators import fourier, gram, norm, strip
from tests.operators.geometry import Geometry, draw_geometry, gaussian, svd_norm

Case = tuple[LinearOperator, Tensor]  # an operator, and its matrix by the definition
BoundOf = Callable[[Any], float]


# Kernels of many kinds, as integers say little about a norm


def blur(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def zero_mean(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    kernel = gaussian(shape, generator)
    return kernel - kernel.mean((2, 3), keepdim=True)


def rank_one(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return math.prod(
        (gaussian(tuple(n if axis == i else 1 for i, n in enumerate(shape)), generator) for axis in range(4)),
        start=torch.ones((), dtype=torch.float64),
    )


def alternating(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """±1 in a checkerboard: the symbol vanishes at the zero frequency and peaks at the greatest one."""
    return blur(shape, generator) * (-1.0) ** (torch.arange(shape[2])[:, None] + torch.arange(shape[3]))


def shift(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """One tap for each pair of channels with the same number: every singular value is 0 or 1 on a torus."""
    kernel = torch.zeros(shape, dtype=torch.float64)
    kernel[:, :, 0, -1] = torch.eye(*shape[:2])
    return kernel


KINDS = [gaussian, gaussian, blur, zero_mean, rank_one, alternating, shift]


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    geometry = draw_geometry(rng.randint)
    kernel = rng.choice(KINDS)(geometry.kernel_shape, torch.Generator().manual_seed(seed))
    kernel = kernel * 10.0 ** rng.randint(-3, 3)
    return geometry.conv(kernel), geometry.matrix(kernel)


WAYS = {"exact": (10**15, 0), "strips": (0, 10**15), "torus": (0, 0)}  # (EXACT_WORK, STRIP_WORK) that lead to each


def take(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound zero-padded convolutions in this way, whatever it costs."""
    for name, work in zip(("EXACT_WORK", "STRIP_WORK"), WAYS[way], strict=True):
        monkeypatch.setattr(norm, name, work)


@pytest.fixture(params=WAYS)
def way(request, monkeypatch) -> str:
    take(request.param, monkeypatch)
    return request.param


def violations(cases: list[Case], bound: BoundOf = norm_bound) -> list[LinearOperator]:
    """The operators whose bound is certainly below their norm."""
    found = []
    for op, matrix in cases:
        value, error = svd_norm(matrix)
        if bound(op) < value - error:
            found.append(op)
    return found


# Never below


@pytest.mark.parametrize("first", range(0, 600, 50))
def test_the_bound_is_never_below_the_norm_of_a_convolution(first, way):
    assert not violations([random_case(seed) for seed in range(first, first + 50)])


def test_the_bound_is_never_below_the_norm_of_a_matrix():
    generator, cases = torch.Generator().manual_seed(0), []
    for seed in range(60):
        rng = random.Random(seed)
        weight = gaussian((rng.randint(1, 40), rng.randint(1, 40)), generator) * 10.0 ** rng.randint(-3, 3)
        cases.append((DenseOperator(weight), weight))
    assert not violations(cases)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_bound_is_of_the_weights_as_they_are_stored(dtype):
    geometry = Geometry((5, 4), (3, 2), (1, 1), (1, 0), grouped=3, out=2)
    kernel = torch.randn(geometry.kernel_shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = kernel.flatten(1)
    assert not violations(
        [(geometry.conv(kernel), geometry.matrix(kernel.double())), (DenseOperator(weight), weight.double())]
    )
    assert norm_bound(DenseOperator(weight)) == norm_bound(DenseOperator(weight.double()))


@pytest.mark.parametrize("factor", [0.0, 1e-3, 1.0, 1e3])
def test_a_wrong_shift_or_factor_only_loosens_the_bound(monkeypatch, factor, way):
    """Whatever LAPACK did: here the shift is far off and the Cholesky factor is noise."""

    def wrong(diagonal: Tensor, below: Tensor, guess: float = 0.0) -> tuple[float, list[Tensor]]:
        batch, strips, q = diagonal.shape[:3]
        generator = torch.Generator().manual_seed(1)
        rows = [factor * gaussian((batch, q, q if t == 0 else 2 * q), generator).tril() for t in range(strips)]
        return factor * float(diagonal.abs().max()), rows

    monkeypatch.setattr(gram, "band_shift", wrong)
    assert not violations([random_case(seed) for seed in range(20)])
    weight = gaussian((7, 5), torch.Generator().manual_seed(0))
    assert not violations([(DenseOperator(weight), weight)])


def test_frequencies_in_chunks_give_the_same_bound(monkeypatch, way):
    cases = [random_case(seed)[0] for seed in range(20)]
    whole = [norm_bound(op) for op in cases]
    monkeypatch.setattr(fourier, "CHUNK_BYTES", 1)
    monkeypatch.setattr(strip, "BATCH_BYTES", 1)
    assert [norm_bound(op) for op in cases] == pytest.approx(whole, rel=1e-9)


# These variants have been published or are easily written; each is below some norm, and the check above sees it.


def torus_one_short(monkeypatch: pytest.MonkeyPatch) -> BoundOf:
    sides = norm._sides

    def short(axis, mode):
        if mode == "circular":
            return sides(axis, mode)
        return [(max(side - axis.stride, axis.stride), twist) for side, twist in sides(axis, mode)]

    monkeypatch.setattr(norm, "_sides", short)
    return norm_bound


def circular_repeats_forgotten(monkeypatch: pytest.MonkeyPatch) -> BoundOf:
    aliases = norm._aliases
    monkeypatch.setattr(norm, "_aliases", lambda axis, mode: (aliases(axis, mode)[0], 1))
    return norm_bound


def twisted_circular_padding(monkeypatch: pytest.MonkeyPatch) -> BoundOf:
    sides = norm._sides

    def twisted(axis, mode):
        return [(axis.size, t) for t in (0, 1)] if mode == "circular" else sides(axis, mode)

    monkeypatch.setattr(norm, "_sides", twisted)
    return norm_bound


def half_of_the_symbol(monkeypatch: pytest.MonkeyPatch) -> BoundOf:
    """The real part alone."""
    symbol = fourier.symbol
    monkeypatch.setattr(fourier, "symbol", lambda *a: (symbol(*a)[0], 0 * symbol(*a)[1]))
    return norm_bound


def strips_on_a_torus_one_short(monkeypatch: pytest.MonkeyPatch) -> BoundOf:
    bound = torus_one_short(monkeypatch)
    take("strips", monkeypatch)
    return bound


UNSOUND: list[Callable[[pytest.MonkeyPatch], BoundOf]] = [  # others are in tests/mutants.py
    torus_one_short,
    circular_repeats_forgotten,
    twisted_circular_padding,
    half_of_the_symbol,
    strips_on_a_torus_one_short,
]


@pytest.mark.parametrize("variant", UNSOUND, ids=lambda variant: variant.__name__)
def test_an_unsound_bound_would_be_caught(monkeypatch, variant):
    take("torus", monkeypatch)
    cases = [random_case(seed) for seed in range(100)]
    assert violations(cases, variant(monkeypatch))


# Refusals and zeros


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_weights_that_are_not_finite_are_refused(bad, dtype):
    weight = torch.ones(2, 2, 3, 3, dtype=dtype)
    weight[1, 0, 2, 1] = bad
    with pytest.raises(ValueError, match=r"ConvOperator\(2 → 2.*NaN or infinite"):
        norm_bound(ConvOperator(weight, (4, 4)))
    with pytest.raises(ValueError, match=r"DenseOperator\(18 → 2\).*NaN or infinite"):
        norm_bound(DenseOperator(weight.flatten(1)))


def test_norms_that_cannot_be_computed_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"beyond float64.*1\.5e\+308"):
        norm_bound(DenseOperator(torch.full((3, 3), 1.5e308, dtype=torch.float64)))
    with pytest.raises(ValueError, match="beyond float64"):
        norm_bound(ConvOperator(torch.full((1, 1, 3, 3), 1.5e308, dtype=torch.float64), (4, 4)))
    monkeypatch.setattr(fourier, "MAX_BYTES", 2**10)
    with pytest.raises(ValueError, match=r"strides \(4, 4\) put 16 symbols of 2 × 3"):
        norm_bound(ConvOperator(torch.ones(2, 3, 3, 3, dtype=torch.float64), (8, 8), padding_mode="circular", stride=4))


def test_a_huge_stride_needs_no_aliases():
    """Windows that do not overlap: the norm is that of the kernel as one matrix."""
    kernel = gaussian((2, 3, 3, 3), torch.Generator().manual_seed(0))
    value, error = svd_norm(kernel.flatten(1))
    op = ConvOperator(kernel, (2000, 2000), padding=0, stride=1000)
    assert value - error <= norm_bound(op) <= value * (1 + 1e-6)


def test_a_zero_operator_has_the_norm_zero():
    assert norm_bound(DenseOperator(torch.zeros(3, 4))) == 0.0
    for mode in ("zeros", "circular"):
        assert norm_bound(ConvOperator(-torch.zeros(2, 3, 3, 3), (4, 5), padding_mode=mode)) == 0.0


def test_what_has_no_certified_norm_is_refused_by_name():
    class Twice(DenseOperator):
        def __call__(self, x, bias=None):
            return 2 * super().__call__(x, bias)

    for thing, name in ((Twice(torch.eye(2)), "Twice"), (torch.eye(2), "Tensor"), (nn.Linear(2, 2), "Linear")):
        with pytest.raises(TypeError, match=name):
            norm_bound(thing)


def test_the_bound_ignores_autograd_autocast_and_the_default_device_and_dtype():
    weight, kernel = torch.randn(3, 4, requires_grad=True), torch.randn(2, 3, 3, 3, requires_grad=True)
    dense, conv = DenseOperator(weight), ConvOperator(kernel, (5, 4))
    expected = (norm_bound(dense), norm_bound(conv))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (norm_bound(dense), norm_bound(conv)) == expected
    with torch.device("meta"):
        assert (norm_bound(dense), norm_bound(conv)) == expected
    torch.set_default_dtype(torch.float64)
    try:
        assert (norm_bound(dense), norm_bound(conv)) == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_weights_that_the_processor_would_flush_to_zero_are_not_lost():
    tiny = torch.tensor([[1e-310]], dtype=torch.float64)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        bounds = [norm_bound(DenseOperator(tiny)), norm_bound(ConvOperator(tiny[None, None], (2, 2), padding=0))]
    finally:
        torch.set_flush_denormal(False)  # comparisons flush too, so not before this
    assert min(bounds) >= 1e-310
