"""A chain that runs its layers together, against the same layers one by one."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lipflow import LoweringError, Sequential, build, cpl_conv, cpl_dense, freeze, fuse, lipschitz_bound
from lipflow.flows import ConvexPotential, DenseWeight, ExplicitEuler, Flow, Weight
from lipflow.operators.norm import power_iteration


def test_a_fused_model_computes_the_same():
    plain = nn.Sequential(cpl_conv(3, 2, in_size=(6, 6)), nn.Sequential(cpl_conv(3, 2, in_size=(6, 6)), nn.Flatten()))
    plain.append(cpl_dense(108, 5))
    fused = fuse(copy.deepcopy(plain))
    assert type(fused) is type(fused[1]) is Sequential
    assert list(fused.state_dict()) == list(plain.state_dict())
    x = torch.rand(4, 3, 6, 6)
    for training in (True, True, False):
        for model in (plain, fused):
            model.zero_grad()
            model.train(training)(x).square().sum().backward()
        for (name, p), q in zip(plain.named_parameters(), fused.parameters(), strict=True):
            assert p.grad is not None, name
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)
        for b, c in zip(plain.buffers(), fused.buffers(), strict=True):
            torch.testing.assert_close(c, b, rtol=1e-5, atol=1e-6)


def test_a_layer_on_its_own_still_iterates():
    layer = cpl_conv(3, 2, in_size=(4, 4)).train()
    before = layer.field.weight.u.clone()
    layer(torch.randn(1, 3, 4, 4))
    assert not torch.equal(layer.field.weight.u, before)


def test_images_of_another_size_are_followed_anew():
    chain = Sequential(cpl_conv(3, 2), cpl_conv(3, 2)).train()
    for size in (4, 6):
        chain(torch.randn(1, 3, size, size))
        assert all(layer.field.weight.in_size == (size, size) for layer in chain)


def test_a_network_iterates_once_a_forward_pass():
    network = build("cpl", 3, (2, 8, 8), channels=4, depth=3, inner=2, features=5, depth_linear=2).double()
    weights = [m for m in network.modules() if isinstance(m, Weight)]
    expected = [power_iteration(w.operator(None), w.u, 1) for w in weights]
    network.train()(torch.rand(2, 2, 8, 8, dtype=torch.float64))
    for weight, u in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.u, u, rtol=1e-12, atol=1e-13)
    before = [w.u.clone() for w in weights]
    network.eval()(torch.rand(2, 2, 8, 8, dtype=torch.float64))
    assert all(torch.equal(w.u, u) for w, u in zip(weights, before, strict=True))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("cpl", dict(channels=4, depth=5, inner=2, features=5, depth_linear=2)), ("soc-10", dict(channels=4))],
)
def test_recomputed_activations_give_the_same_step(name, sizes):
    one = build(name, 3, (3, 32, 32), **sizes).double().train()
    other = copy.deepcopy(one)
    other.recompute_activations()
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    for network in (one, other):
        network(x).square().sum().backward()
    for (label, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert p.grad is not None, label
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-12, atol=1e-14)
    for b, c in zip(one.buffers(), other.buffers(), strict=True):
        assert torch.equal(b, c)


def test_a_depth_of_activations_is_not_kept():
    network = build("cpl", 3, (3, 8, 8), channels=8, depth=64, inner=8, features=4, depth_linear=1).train()

    def kept() -> int:
        sizes: dict[int, int] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            sizes[t.data_ptr()] = t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            network(torch.rand(4, 3, 8, 8))
        return sum(sizes.values())

    every = kept()
    network.recompute_activations()
    assert kept() < every / 3


def test_layers_run_together_and_hooks_are_heard():
    network = build("cpl", 3, (2, 8, 8), channels=4, depth=3, inner=2, features=5, depth_linear=2).double().eval()
    x = torch.rand(2, 2, 8, 8, dtype=torch.float64, requires_grad=True)
    expected = network.stages(x)
    torch.testing.assert_close(network(x), expected, rtol=1e-12, atol=1e-12)
    heard: list[str] = []
    for name, module in network.named_modules():
        if name.endswith(("convolutions", "convolutions.1", "linear.0")):
            module.register_forward_hook(lambda *_, name=name: heard.append(name))
    network(x)
    assert heard == ["stages.convolutions.1", "stages.convolutions", "stages.linear.0"]


@pytest.mark.parametrize("inner", [2, 16])
@pytest.mark.parametrize("last", [False, True])
def test_a_network_gives_and_passes_on_the_memory_format_that_it_was_given(inner, last):
    """Within a run of layers it may be another: oneDNN likes channels last."""
    seen = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.is_contiguous())
            return x

    layers = [cpl_conv(16, inner, h=0.1), cpl_conv(16, inner, h=0.1), Look(), cpl_conv(16, inner, h=0.1)]
    x = torch.randn(3, 16, 6, 5).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    z = Sequential(*layers)(x)
    expected = x
    for layer in layers:
        expected = layer(expected)
    torch.testing.assert_close(z, expected, rtol=1e-5, atol=1e-5)
    if not last:  # convolutions by columns want images contiguous, and leave them so
        assert seen[0]
        assert z.is_contiguous()


def test_networks_go_through_transforms():
    """torch.func knows nothing of memory formats."""
    network = build("cpl-fast", 3, (3, 16, 16), channels=12, inner=(4, 16), depth=(2, 2), features=24).eval()
    x = torch.rand(2, 3, 16, 16)
    expected = network(x)
    torch.testing.assert_close(torch.func.vmap(lambda a: network(a[None])[0])(x), expected, rtol=1e-4, atol=1e-5)
    slopes = torch.func.vmap(torch.func.jacrev(lambda a: network(a[None])[0]))(x)
    assert slopes.shape == (2, 3, 3, 16, 16)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("low", [False, True])
def test_a_penalty_on_gradients_differentiates_twice(checkpoint, low):
    """Outside of autocast, as torch's guide says, and with recomputed activations, more than once."""
    network = build("cpl-fast", 3, (3, 16, 16), channels=12, inner=(4, 16), depth=(2, 2), features=24).train()
    network.recompute_activations(checkpoint)
    x = torch.rand(4, 3, 16, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        scores = network(x).float()
    (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    slope.square().sum().backward()
    gradients = [p.grad for p in network.parameters()]
    assert any(g is not None and bool(g.ne(0).any()) for g in gradients)
    assert all(g is None or bool(torch.isfinite(g).all()) for g in gradients)


def test_recomputed_activations_may_be_recomputed_again():
    network = build("cpl-fast", 3, (3, 16, 16), channels=12, inner=(4, 16), depth=(2, 2), features=24).train()
    network.recompute_activations()
    loss = network(torch.rand(4, 3, 16, 16)).square().sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in network.parameters()]
    loss.backward()
    for parameter, first in zip(network.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * first)


def test_layers_that_are_not_in_training_do_not_move():
    network = build("cpl", 3, (3, 8, 8), channels=4, depth=2, inner=4, features=4, depth_linear=1).train()
    network.stages.convolutions.eval()
    before = {name: b.clone() for name, b in network.named_buffers()}
    network(torch.rand(2, 3, 8, 8))
    moved = {name for name, b in network.named_buffers() if not torch.equal(b, before[name])}
    assert moved
    assert not any("convolutions" in name for name in moved)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("cpl", dict(channels=4, depth=2, inner=4, features=4, depth_linear=1)), ("soc-10", dict(channels=4))],
)
def test_a_forward_pass_that_would_be_repeated_with_other_norms_is_refused(name, sizes):
    network = build(name, 3, (3, 32, 32), **sizes).train()
    network.recompute_activations()
    x = torch.rand(2, 3, 32, 32)
    first, second = network(x).sum(), network(x).sum()
    with pytest.raises(RuntimeError, match="must be followed by its backward pass"):
        (first + second).backward()
    network(x).sum().backward()


class Ridge(ConvexPotential):
    """f(x) + ½‖x‖²: another gradient, and another smoothness."""

    def gradient(self, x):
        return super().gradient(x) + x

    def smoothness_estimate(self, shape, iterations=1):
        return super().smoothness_estimate(shape, iterations) + 1

    def smoothness(self, shape, norm):
        return super().smoothness(shape, norm) + 1

    def parts(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None


@pytest.mark.parametrize("h", [None, 0.25])
def test_what_extends_a_potential_moves_along_its_own_gradient(h):
    field = Ridge(DenseWeight(4, 6))
    network = nn.Sequential(Flow(field, ExplicitEuler(h))).double().eval()
    x = torch.randn(5, 4, dtype=torch.float64)
    size = 2 / field.smoothness_estimate((4,)).item() if h is None else h
    expected = x - size * field.gradient(x)
    torch.testing.assert_close(network(x), expected)
    torch.testing.assert_close(fuse(copy.deepcopy(network))(x), expected)
    norm = float(torch.linalg.matrix_norm(field.weight.weight.detach(), 2))
    bound = lipschitz_bound(network, in_shape=(4,))
    assert bound.lipschitz == pytest.approx(max(1.0, size * (norm**2 + 1) - 1), rel=1e-8)
    with pytest.raises(LoweringError, match=r"^0: Ridge has a declared bound, which lipschitz_bound takes"):
        freeze(network, in_shape=(4,))
