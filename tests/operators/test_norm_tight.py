"""norm_bound is tight: to 1e-3 for convolutions of 45 channels at 32×32, 1e-6 for small ones, 1e-8 for matrices."""

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lipflow import ConvOperator, DenseOperator, LinearOperator, norm_bound
from lipflow.operators.norm import top_singular_vector
from tests.operators.geometry import Geometry, draw_geometry, gaussian, svd_norm


def norm_from_below(op: LinearOperator) -> float:
    """‖Wu‖ for a top singular vector u by Lanczos' method."""
    start = torch.ones(op.in_shape, dtype=torch.float64)
    return float(op(top_singular_vector(op, start)[None]).norm())


def trained_like(out: int, grouped: int) -> Tensor:
    """Like trained weights: a decaying spectrum of channel patterns, each with a smooth window, and a little noise."""
    generator = torch.Generator().manual_seed(2)
    window = torch.tensor([0.6, 1.0, 0.5], dtype=torch.float64)
    kernel = 0.02 * gaussian((out, grouped, 3, 3), generator)
    for rank in range(min(out, 12)):
        left, right = gaussian((out, 1, 1, 1), generator), gaussian((1, grouped, 1, 1), generator)
        ripple = 1 + 0.3 * gaussian((3, 3), generator)
        kernel = kernel + 0.7**rank * left * right * torch.outer(window, window) * ripple
    return kernel


@pytest.mark.parametrize(("seed", "out"), [*((s, 5) for s in range(4)), ("trained", 5), (11, 45)])
def test_norm_bound_is_tight_at_32_by_32(seed, out):
    shape = (out, 45, 3, 3)
    kernel = trained_like(*shape[:2]) if seed == "trained" else gaussian(shape, torch.Generator().manual_seed(seed))
    op = ConvOperator(kernel, (32, 32))
    below, above = norm_from_below(op), norm_bound(op)
    assert below * (1 - 1e-12) <= above <= below * (1 + 1e-3)


@pytest.mark.parametrize("seed", range(100))
def test_norm_bound_of_a_small_zero_padded_convolution_is_tight(seed):
    """No torus is needed where the matrix is small."""
    geometry = dataclasses.replace(draw_geometry(random.Random(seed).randint), mode="zeros")
    kernel = gaussian(geometry.kernel_shape, torch.Generator().manual_seed(seed))
    value, error = svd_norm(geometry.matrix(kernel))
    assert value - error <= norm_bound(geometry.conv(kernel)) <= value * (1 + 1e-6) + 1e-50


def orthogonal(size: int) -> Tensor:
    return torch.linalg.qr(gaussian((size, size), torch.Generator().manual_seed(size))).Q


MATRICES: dict[str, Callable[[int], Tensor]] = {
    "random": lambda n: torch.randn(n, n + n // 3, dtype=torch.float64),
    "identity": lambda n: torch.eye(n, dtype=torch.float64),
    "orthogonal": orthogonal,
    "near the identity": lambda n: torch.eye(n, dtype=torch.float64) - 1e-9 * torch.rand(n, n, dtype=torch.float64),
    "near-degenerate": lambda n: orthogonal(n) @ torch.diag(1 - 1e-6 * torch.rand(n, dtype=torch.float64)),
    "two clusters": lambda n: torch.diag(1 - 0.5 * (torch.arange(n) % 2)).double() @ orthogonal(n),
    "rank one": lambda n: torch.outer(orthogonal(n)[0], orthogonal(n)[1]),
    "ones": lambda n: torch.ones(n, n, dtype=torch.float64) / n,
}


@pytest.mark.parametrize("size", [2, 10, 20, 45, 100, 300])
@pytest.mark.parametrize("family", MATRICES)
def test_norm_bound_of_a_matrix_is_tight_also_where_singular_values_coincide(family, size):
    weight = MATRICES[family](size)
    value, error = svd_norm(weight)
    assert value - error <= norm_bound(DenseOperator(weight)) <= value * (1 + 1e-8)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_norm_bound_is_tight_for_circular_padding_that_fits(stride):
    geometry = Geometry((6, 6), (3, 3), (1, 1), (1, 1), "circular", (stride, stride), grouped=2, out=3)
    kernel = gaussian(geometry.kernel_shape, torch.Generator().manual_seed(stride))
    value, error = svd_norm(geometry.matrix(kernel))
    assert value - error <= norm_bound(geometry.conv(kernel)) <= value * (1 + 1e-8)
