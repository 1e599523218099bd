"""norm_bound is never below the norm, against dense singular values (tests/mutants.py tries wrong bounds).

test_norm_exact.py has exact references, test_norm_tight.py measures how far the bound is above the norm, and
test_norm_estimate.py tests the estimate from below.
"""

import math
import random

import pytest
import torch
from torch import Tensor, nn

from lipflow import ConvOperator, DenseOperator, LinearOperator, norm_bound
from lipflow.operators import fourier, gram, norm, strip
from tests.operators.geometry import Geometry, draw_geometry, gaussian, svd_norm

Case = tuple[LinearOperator, Tensor]  # an operator, and its matrix by the definition


def blur(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def zero_mean(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    kernel = gaussian(shape, generator)
    return kernel - kernel.mean((2, 3), keepdim=True)


def rank_one(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    vectors = [gaussian((n,), generator) for n in shape]
    return torch.einsum("o,i,j,k->oijk", *vectors)


def alternating(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """±1 in a checkerboard: the symbol peaks at the greatest frequency."""
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


WAYS = {"exact": (10**15, 0), "strips": (0, 10**15), "torus": (0, 0)}  # their EXACT_WORK and STRIP_WORK


def take(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound zero-padded convolutions in this way, whatever the cost."""
    for name, work in zip(("EXACT_WORK", "STRIP_WORK"), WAYS[way], strict=True):
        monkeypatch.setattr(norm, name, work)


@pytest.fixture(params=WAYS)
def way(request, monkeypatch) -> str:
    take(request.param, monkeypatch)
    return request.param


def violations(cases: list[Case]) -> list[LinearOperator]:
    """The operators whose bound is certainly below their norm."""
    found = []
    for op, matrix in cases:
        value, error = svd_norm(matrix)
        if norm_bound(op) < value - error:
            found.append(op)
    return found


@pytest.mark.parametrize("first", range(0, 600, 50))
def test_norm_bound_is_never_below_the_svd_of_a_convolution(first, way):
    assert not violations([random_case(seed) for seed in range(first, first + 50)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_norm_bound_is_of_the_stored_weights(dtype):
    geometry = Geometry((5, 4), (3, 2), (1, 1), (1, 0), grouped=3, out=2)
    kernel = torch.randn(geometry.kernel_shape).to(dtype)
    weight = kernel.flatten(1)
    assert not violations(
        [(geometry.conv(kernel), geometry.matrix(kernel.double())), (DenseOperator(weight), weight.double())]
    )
    assert norm_bound(DenseOperator(weight)) == norm_bound(DenseOperator(weight.double()))


@pytest.mark.parametrize("factor", [0.0, 1e-3, 1.0, 1e3])
def test_norm_bound_is_not_below_the_svd_with_a_wrong_shift_and_factor(monkeypatch, factor, way):
    """The shift is far off and the Cholesky factor is noise, as if LAPACK were wrong."""

    def wrong(diagonal: Tensor, below: Tensor, guess: float = 0.0) -> tuple[float, list[Tensor]]:
        batch, strips, q = diagonal.shape[:3]
        generator = torch.Generator().manual_seed(1)
        rows = [factor * gaussian((batch, q, q if t == 0 else 2 * q), generator).tril() for t in range(strips)]
        return factor * float(diagonal.abs().max()), rows

    monkeypatch.setattr(gram, "band_shift", wrong)
    weight = gaussian((7, 5), torch.Generator().manual_seed(0))
    assert not violations([(DenseOperator(weight), weight), *(random_case(seed) for seed in range(20))])


def test_norm_bound_does_not_depend_on_the_chunks_of_frequencies(monkeypatch, way):
    cases = [random_case(seed)[0] for seed in range(20)]
    whole = [norm_bound(op) for op in cases]
    monkeypatch.setattr(fourier, "CHUNK_BYTES", 1)
    monkeypatch.setattr(strip, "BATCH_BYTES", 1)
    assert [norm_bound(op) for op in cases] == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_norm_bound_rejects_nan_and_infinite_weights(bad, dtype):
    weight = torch.ones(2, 2, 3, 3, dtype=dtype)
    weight[1, 0, 2, 1] = bad
    for op in (ConvOperator(weight, (4, 4)), DenseOperator(weight.flatten(1))):
        with pytest.raises(ValueError, match=rf"{type(op).__name__}.*NaN or infinite"):
            norm_bound(op)


def test_norm_bound_rejects_norms_that_cannot_be_computed(monkeypatch):
    huge = torch.full((1, 1, 3, 3), 1.5e308, dtype=torch.float64)
    for op in (DenseOperator(huge[0, 0]), ConvOperator(huge, (4, 4))):
        with pytest.raises(ValueError, match=r"beyond float64.*1\.5e\+308"):
            norm_bound(op)
    monkeypatch.setattr(fourier, "MAX_BYTES", 2**10)
    with pytest.raises(ValueError, match=r"strides \(4, 4\) put 16 symbols of 2 × 3"):
        norm_bound(ConvOperator(torch.ones(2, 3, 3, 3, dtype=torch.float64), (8, 8), padding_mode="circular", stride=4))


def test_norm_bound_of_a_huge_stride_is_that_of_the_kernel_as_a_matrix():
    kernel = gaussian((2, 3, 3, 3), torch.Generator().manual_seed(0))
    value, error = svd_norm(kernel.flatten(1))
    op = ConvOperator(kernel, (2000, 2000), padding=0, stride=1000)
    assert value - error <= norm_bound(op) <= value * (1 + 1e-6)


@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_norm_bound_of_zero_is_zero(mode):
    assert norm_bound(DenseOperator(torch.zeros(3, 4))) == 0.0
    assert norm_bound(ConvOperator(-torch.zeros(2, 3, 3, 3), (4, 5), padding_mode=mode)) == 0.0


class Twice(DenseOperator):
    def __call__(self, x, bias=None):
        return 2 * super().__call__(x, bias)


@pytest.mark.parametrize("thing", [Twice(torch.eye(2)), torch.eye(2), nn.Linear(2, 2)], ids=lambda x: type(x).__name__)
def test_norm_bound_rejects_other_types_by_name(thing):
    with pytest.raises(TypeError, match=type(thing).__name__):
        norm_bound(thing)


def test_norm_bound_ignores_autograd_autocast_and_the_default_device_and_dtype():
    weight, kernel = torch.randn(3, 4, requires_grad=True), torch.randn(2, 3, 3, 3, requires_grad=True)
    dense, conv = DenseOperator(weight), ConvOperator(kernel, (5, 4))
    expected = (norm_bound(dense), norm_bound(conv))
    for context in (torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta")):
        with context:
            assert (norm_bound(dense), norm_bound(conv)) == expected
    torch.set_default_dtype(torch.float64)
    assert (norm_bound(dense), norm_bound(conv)) == expected
