"""Linear maps as a frozen network runs them: the same map as the operator, on any geometry, both ways."""

import itertools

import pytest
import torch
from torch import nn

import lipflow
from lipflow.frozen.linear import Map
from lipflow.operators import Conv2d, Dense
from lipflow.operators.columns import Columns

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


CONVOLUTIONS = {
    "zeros": dict(padding=1),
    "circular": dict(padding=1, padding_mode="circular"),
    "strided": dict(padding=0, stride=2, groups=2),
}


@pytest.mark.parametrize("both", ["apply", "adjoint"])
@pytest.mark.parametrize("name", [*CONVOLUTIONS, "matrix"])
def test_transforms_of_torch_func_give_the_matrix(name, both):
    torch.manual_seed(0)
    if name == "matrix":
        op = Dense(torch.randn(4, 7))
    else:
        op = Conv2d(torch.randn(4, 2 // CONVOLUTIONS[name].get("groups", 1), 3, 3), (4, 5), **CONVOLUTIONS[name])
    held = Map.of(op)
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


def test_a_frozen_network_goes_through_the_transforms_of_torch_func():
    torch.manual_seed(0)
    layers = (lipflow.cpl_conv(2, 5), lipflow.soc(2, 3), lipflow.cayley_conv(2, 2), lipflow.proximal(2, 3, 3, h=0.1))
    frozen = lipflow.freeze(nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 3)), in_shape=(2, 4, 4))
    x = torch.rand(3, 2, 4, 4, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(frozen, x)
    torch.testing.assert_close(torch.func.jacrev(frozen)(x), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(torch.func.jacfwd(frozen)(x), expected, rtol=0, atol=1e-13)
    each = torch.func.vmap(torch.func.jacrev(lambda v: frozen(v[None])[0]))(x)
    torch.testing.assert_close(each, torch.stack([expected[i, :, i] for i in range(3)]), rtol=0, atol=1e-13)


def test_weights_are_copied():
    weight = torch.randn(4, 7, dtype=torch.float64)
    held = Map.of(Dense(weight))
    weight.zero_()
    assert bool(held.weight.any())
