"""Derivatives as PyTorch takes them: of shared layers, with swapped weights, recomputed activations, many at once."""

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
def test_a_layer_used_twice_has_one_gradient_however_it_is_asked_for(name):
    """With create_graph=True the way through the input must not be counted once more."""
    whole, make, shape = TWICE[name]
    layer = make().double()
    network = whole(layer).eval()
    x = torch.rand(3, *shape, dtype=torch.float64)
    network(x)
    weight = layer.field.weight.weight
    plain, graph = (
        torch.autograd.grad(network(x).square().sum(), weight, create_graph=create_graph)[0]
        for create_graph in (False, True)
    )
    torch.testing.assert_close(graph.detach(), plain, rtol=1e-9, atol=1e-12)
    nudge = torch.randn_like(weight)
    step = 1e-6

    def at(t: float) -> torch.Tensor:
        with torch.no_grad():
            weight.add_(t * nudge)
            found = network(x).square().sum()
            weight.sub_(t * nudge)
        return found

    torch.testing.assert_close((plain * nudge).sum(), (at(step) - at(-step)) / (2 * step), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["proximal dense", "proximal conv", "midpoint, convex", "split, implicit"])
def test_an_implicit_layer_is_differentiated_where_it_was_computed(name):
    """The weights that functional_call put in are gone again when the backward pass begins."""
    layer, x = contract.make(name), contract.inputs(name, 2).requires_grad_()
    other = {n: p.detach() * 1.3 for n, p in layer.named_parameters()}
    (swapped,) = torch.autograd.grad(functional_call(layer, other, (x,)).square().sum(), x)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        for n, p in twin.named_parameters():
            p.copy_(other[n])
    (expected,) = torch.autograd.grad(twin(x).square().sum(), x)
    torch.testing.assert_close(swapped, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["cpl dense", "cpl conv", "soc conv", "cpl network", "soc network", "proximal dense"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activations_that_torch_computes_again_move_nothing(name, use_reentrant):
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
def test_transforms_work_in_training_and_keep_nothing(name):
    """Gradients of each image by itself, as differential privacy takes them."""
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


def test_a_transform_as_the_first_call_leaves_no_ghost():
    layer, x = lipflow.cpl_conv(3, 4).double().eval(), torch.rand(2, 3, 4, 5, dtype=torch.float64)
    torch.func.jacrev(layer)(x)
    assert copy.deepcopy(layer.state_dict())["field.weight.u"].numel() == 0
    assert layer(x).shape == x.shape


@pytest.mark.parametrize("name", ["cpl dense", "cpl conv", "cpl network", "mirrored"])
def test_many_gradients_at_once(name):
    layer, x = contract.make(name), contract.inputs(name, 2)
    one, many = (torch.autograd.functional.jacobian(layer, x, vectorize=vectorize) for vectorize in (False, True))
    torch.testing.assert_close(many, one)
    y = layer(x.requires_grad_())
    (found,) = torch.autograd.grad(y, x, torch.ones(3, *y.shape, dtype=y.dtype), is_grads_batched=True)
    assert not found.requires_grad


def test_an_implicit_layer_takes_one_gradient_at_a_time():
    layer, x = contract.make("proximal dense"), contract.inputs("proximal dense", 2)
    with pytest.raises(RuntimeError, match="drop vectorize=True"):
        torch.autograd.functional.jacobian(layer, x, vectorize=True)


def test_a_checkpoint_around_an_implicit_layer_computes_it_twice_and_no_more():
    layer, x, calls = contract.make("proximal dense").train(), contract.inputs("proximal dense", 2), []
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    checkpoint(layer, x.requires_grad_(), use_reentrant=False).square().sum().backward()
    assert len(calls) == 2


def test_a_network_takes_up_another_size_in_training():
    """As after loading weights that were trained on smaller images."""
    torch.manual_seed(0)
    small, large = (
        lipflow.build("cpl-digits", in_shape=(1, side, side), depth=1, channels=4, inner=4, depth_linear=1, features=8)
        for side in (4, 8)
    )
    name = "stages.convolutions.0.field.weight"
    large.get_submodule(name).load_state_dict(small.get_submodule(name).state_dict())
    large.train()(torch.rand(2, 1, 8, 8))
    assert large.get_submodule(name).in_size != small.get_submodule(name).in_size


def test_small_gradients_of_half_precision_are_not_lost():
    torch.manual_seed(0)
    layer = lipflow.proximal(6, 8, h=1.0).eval()
    x = torch.rand(3, 6)
    expected = torch.autograd.grad(layer(x.requires_grad_()).sum(), x)[0]
    half = copy.deepcopy(layer).half()
    low = x.detach().half().requires_grad_()
    (found,) = torch.autograd.grad((half(low) * 1e-4).sum(), low)
    torch.testing.assert_close(found.float() * 1e4, expected, rtol=0.05, atol=0.05)


def test_what_an_operator_is_made_of_is_what_a_memo_compares():
    """A weight with a gate of its own: another gate is another matrix."""

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
