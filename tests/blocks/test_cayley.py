"""Cayley layers of any shape, against the formula and the definition of a circular convolution."""

import math

import pytest
import torch

import lipflow
from lipflow.blocks.cayley import cayley_transform
from lipflow.flows.resolvent import inverse


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (4, 4), (5, 2), (2, 5), (7, 1)])
def test_cayley_transform_is_the_published_one(rows, columns, dtype):
    w = 3 * torch.randn(3, rows, columns, dtype=dtype)
    q = cayley_transform(w)
    assert q.shape == w.shape
    tall, w = (q, w) if rows >= columns else (q.mH, w.mH)
    identity = torch.eye(w.shape[-1], dtype=dtype).expand(3, -1, -1)
    torch.testing.assert_close(tall.mH @ tall, identity, rtol=0, atol=1e-12)
    u, v = w[:, : w.shape[-1]], w[:, w.shape[-1] :]
    a = u - u.mH + v.mH @ v
    expected = torch.cat([torch.linalg.solve(identity + a, identity - a), -2 * v @ torch.linalg.inv(identity + a)], 1)
    torch.testing.assert_close(tall, expected)


def test_a_square_layer_is_the_midpoint_step():
    """A = W - Wᵀ here and (M - Mᵀ)/2 there, with opposite signs, so h = 4 and M = -W."""
    layer, flow = lipflow.cayley_dense(5, 5, bias=False).double(), lipflow.cayley(5, h=4.0).double()
    flow.field.weight.weight.data = -layer.weight.weight.weight.data
    x = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x), flow(x))


@pytest.mark.parametrize(("into", "out"), [(2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("size", [(4, 4), (5, 3), (3, 6), (1, 4), (1, 1)])
def test_cayley_conv_is_circular_with_the_transform_as_its_symbol(into, out, size):
    """It commutes with shifts, and each of its frequencies is the transform of αŴ(ω)/‖W‖, from the definition."""
    layer = lipflow.cayley_conv(into, out, 3, bias=False).double()
    x = torch.randn(2, into, *size, dtype=torch.float64)
    y = layer(x).detach()
    torch.testing.assert_close(layer(x.roll((1, 2), (2, 3))).detach(), y.roll((1, 2), (2, 3)))
    w, alpha = layer.weight.weight.weight.detach(), layer.weight.scale.alpha.detach()
    taps = torch.arange(-1, 2, dtype=torch.float64)
    rows, columns = (
        torch.exp(2j * math.pi * torch.outer(torch.arange(n, dtype=torch.float64), taps) / n) for n in size
    )
    symbols = torch.einsum("oiab,fa,gb->fgoi", w.to(rows), rows, columns)
    q = cayley_transform(alpha * symbols / w.norm())
    expected = torch.einsum("fgoi,nifg->nofg", q, torch.fft.fft2(x))
    torch.testing.assert_close(torch.fft.fft2(y), expected, atol=1e-9, rtol=1e-9)


def test_a_layer_depends_on_alpha_and_not_on_the_size_of_its_weight():
    layer = lipflow.cayley_dense(4, 4, bias=False).double()
    layer.weight.weight.weight.data *= 100
    x = torch.randn(3, 4, dtype=torch.float64)
    turned = layer(x)
    layer.weight.weight.weight.data /= 1e7
    torch.testing.assert_close(layer(x), turned)
    layer.weight.scale.alpha.data.zero_()
    torch.testing.assert_close(layer(x), x)


@pytest.mark.parametrize(
    ("make", "shape"), [(lambda: lipflow.cayley_dense(4, 3), (4,)), (lambda: lipflow.cayley_conv(2, 3), (2, 4, 5))]
)
def test_the_bound_is_one_to_rounding(make, shape):
    bound = lipflow.lipschitz_bound(make(), shape)
    assert 1 - 1e-12 <= bound.lipschitz <= 1 + 1e-8
    assert bound.tolerance == 0


@pytest.mark.parametrize("make", [lambda: lipflow.cayley(2, 3), lambda: lipflow.cayley_conv(2, 4)])
def test_an_empty_batch_has_zero_gradients(make):
    """In a distributed run, the other ranks wait for the gradients of an empty part of the batch."""
    layer = make()
    layer(torch.rand(1, 2, 4, 4))
    x = torch.zeros(0, 2, 4, 4, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None and not bool(p.grad.any()) for p in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64, torch.complex128])
@pytest.mark.parametrize("rows", [128, 129, 151, 192])
@pytest.mark.parametrize("threads", [2, 4])
def test_inverse_is_right_on_several_threads(rows, threads, dtype):
    """torch.linalg.inv is wrong for 151 rows on two threads (pytorch issue 142815)."""
    identity = torch.eye(rows, dtype=dtype)
    a = torch.randn(4, 5, rows, rows, dtype=dtype) / rows**0.5 + 2 * identity
    torch.set_num_threads(threads)
    found = inverse(a)
    assert float((a @ found - identity).abs().max()) < 100 * torch.finfo(dtype).eps
    assert inverse(a[:0]).shape == (0, 5, rows, rows)
