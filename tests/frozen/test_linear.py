"""Linear maps as a frozen network runs them: the same map as the operator, on any geometry, both ways."""

import itertools

import pytest
import torch

from lipflow.frozen.linear import Map
from lipflow.operators import Conv2d, Dense

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
def test_a_convolution_is_the_operator(geometry, channels):
    torch.manual_seed(0)
    into, out = channels
    op = Conv2d(torch.randn(out, into // geometry["groups"], 2, 3), (5, 6), **geometry)
    held = Map.of(op)
    dense = _matrix(op.with_kernel(op.kernel.double()), op.in_shape)
    torch.testing.assert_close(_matrix(held, op.in_shape), dense, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(_matrix(held.adjoint, op.out_shape), dense.T, rtol=1e-13, atol=1e-13)
    assert float(torch.linalg.matrix_norm(dense, 2)) <= held.norm
    assert float(torch.linalg.matrix_norm(dense.abs(), 2)) <= held.spread


def test_a_matrix_is_the_operator():
    torch.manual_seed(0)
    weight = torch.randn(4, 7)
    held = Map.of(Dense(weight))
    x = torch.randn(3, 7, dtype=torch.float64)
    torch.testing.assert_close(held(x), x @ weight.double().T)
    assert float(torch.linalg.matrix_norm(weight.double().abs(), 2)) <= held.spread


def test_it_is_differentiable_twice_in_its_input():
    held = Map.of(Conv2d(torch.randn(3, 2, 3, 3), (4, 4)))
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(held, x)
    assert torch.autograd.gradgradcheck(lambda v: held(v).square(), x)


def test_weights_are_copied():
    weight = torch.randn(4, 7, dtype=torch.float64)
    held = Map.of(Dense(weight))
    weight.zero_()
    assert bool(held.weight.any())
