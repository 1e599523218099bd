"""Derivatives: of shared layers, with functional weights, with recomputed activations, and vectorized."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import lipflow
from lipflow import blocks
from tests import contract

TWICE = {
    "dense": (lambda f: nn.Sequential(f, f), lambda: lipflow.cpl_dense(6, 9), (6,)),
    "a chain": (lambda f: blocks.FlipAverage(f, f), lambda: lipflow.cpl_conv(4, 3), (4, 5, 6)),
    "a chain of four": (lambda f: blocks.FlipAverage(f, f, f, f), lambda: lipflow.cpl_conv(4, 3), (4, 5, 6)),
}


@pytest.mark.parametrize("name", TWICE)
def test_the_gradient_of_a_repeated_layer_is_the_same_with_create_graph(name):
    """With create_graph=True, the path through the input must not be counted again."""
    network, make, shape = TWICE[name]
    layer, x = make().double(), torch.rand(3, *shape, dtype=torch.float64)
    network = network(layer).eval()
    network(x)
    weight = layer.field.weight.weight

    def loss() -> torch.Tensor:
        return network(x).square().sum()

    plain, graph = (torch.autograd.grad(loss(), weight, create_graph=again)[0] for again in (False, True))
    torch.testing.assert_close(graph.detach(), plain, rtol=1e-9, atol=1e-12)
    direction, step, ends = torch.randn_like(weight), 1e-6, []
    with torch.no_grad():
        for move in (step, -2 * step):
            weight.add_(move * direction)
            ends.append(loss())
    torch.testing.assert_close((plain * direction).sum(), (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["proximal dense", "proximal conv", "midpoint, convex", "split, implicit"])
def test_an_implicit_layer_is_differentiated_with_the_weights_of_functional_call(name):
    """They are replaced again when the backward pass begins."""
    layer, x = contract.make(name), contract.inputs(name, 2).requires_grad_()
    other = {n: p.detach() * 1.3 for n, p in layer.named_parameters()}
    (found,) = torch.autograd.grad(functional_call(layer, other, (x,)).square().sum(), x)
    twin = copy.deepcopy(layer)
    twin.load_state_dict(other, strict=False)
    (expected,) = torch.autograd.grad(twin(x).square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["cpl dense", "cpl conv", "soc conv", "cpl network", "soc network", "proximal dense"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_activations_change_no_buffer_and_no_gradient(name, use_reentrant):
    layer, x = contract.make(name).train(), contract.inputs(name, 3)
    twin = copy.deepcopy(layer)
    for network in (layer, twin):
        y = network(x.requires_grad_()) if network is layer else checkpoint(network, x, use_reentrant=use_reentrant)
        y.square().sum().backward()
    for (n, mine), (_, other) in zip(layer.named_buffers(), twin.named_buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=0, msg=n)
    for (n, mine), (_, other) in zip(layer.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-12, msg=n)


@pytest.mark.parametrize("name", ["cpl dense", "cpl conv", "soc conv", "cpl network", "proximal dense"])
def test_gradients_for_each_image_are_right_and_change_no_state(name):
    """As in differentially private training."""
    layer, x = contract.make(name).train(), contract.inputs(name, 3)
    layer(x)  # it learns its input size
    before = copy.deepcopy(layer.state_dict())
    parameters = {n: p.detach() for n, p in layer.named_parameters()}

    def loss(values: dict[str, torch.Tensor], image: torch.Tensor) -> torch.Tensor:
        return functional_call(layer, values, (image[None],)).square().sum()

    each = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for n, value in layer.state_dict().items():
        assert torch.equal(value, before[n]), n
    together = grad(lambda values: functional_call(layer, values, (x,)).square().sum())(parameters)
    for n in parameters:
        torch.testing.assert_close(each[n].sum(0), together[n], rtol=1e-6, atol=1e-8, msg=n)


def test_a_transform_as_the_first_call_stores_no_size():
    layer, x = lipflow.cpl_conv(3, 4).double().eval(), torch.rand(2, 3, 4, 5, dtype=torch.float64)
    torch.func.jacrev(layer)(x)
    assert copy.deepcopy(layer.state_dict())["field.weight.u"].numel() == 0
    assert layer(x).shape == x.shape


@pytest.mark.parametrize("name", ["cpl dense", "cpl conv", "cpl network", "mirrored"])
def test_vectorized_jacobians_are_those_computed_row_by_row(name):
    layer, x = contract.make(name), contract.inputs(name, 2)
    one, many = (torch.autograd.functional.jacobian(layer, x, vectorize=vectorize) for vectorize in (False, True))
    torch.testing.assert_close(many, one)
    y = layer(x.requires_grad_())
    (found,) = torch.autograd.grad(y, x, torch.ones(3, *y.shape, dtype=y.dtype), is_grads_batched=True)
    assert not found.requires_grad


def test_small_gradients_of_half_precision_do_not_underflow():
    layer, x = lipflow.proximal(6, 8, h=1.0).eval(), torch.rand(3, 6)
    expected = torch.autograd.grad(layer(x.requires_grad_()).sum(), x)[0]
    low = x.detach().half().requires_grad_()
    (found,) = torch.autograd.grad((copy.deepcopy(layer).half()(low) * 1e-4).sum(), low)
    torch.testing.assert_close(found.float() * 1e4, expected, rtol=0.05, atol=0.05)


def test_the_cache_of_a_subclass_of_weight_depends_on_its_own_parameters():
    class Gated(lipflow.DenseWeight):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.gate = nn.Parameter(torch.ones(()))

        def operator(self, shape):
            return lipflow.DenseOperator(self.gate * self.weight)

    layer, x = lipflow.Flow(lipflow.Skew(Gated()), lipflow.Midpoint()).eval(), torch.rand(2, 4)
    with torch.no_grad():
        before = layer(x)
        layer.field.weight.gate.fill_(0.0)
        assert not torch.equal(layer(x), before)
        torch.testing.assert_close(layer(x), x)
