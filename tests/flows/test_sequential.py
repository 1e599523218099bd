"""`Sequential` computes what `nn.Sequential` computes, with its gradients, buffers and hooks."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lipflow import LoweringError, Network, Sequential, build, cpl_conv, cpl_dense, freeze, fuse, lipschitz_bound
from lipflow.flows import ConvexPotential, DenseWeight, ExplicitEuler, Flow, Weight
from lipflow.operators.norm import power_iteration


@pytest.fixture
def network() -> Network:
    return build("cpl", 3, (2, 8, 8), channels=4, depth=3, inner=2, features=5, depth_linear=2).double().train()


@pytest.fixture
def images() -> Tensor:
    return torch.rand(2, 2, 8, 8, dtype=torch.float64)


@pytest.fixture
def fast() -> Network:
    return build("cpl-fast", 3, (3, 16, 16), channels=12, inner=(4, 16), depth=(2, 2), features=24).train()


def require_equal_steps(one: nn.Module, other: nn.Module, x: Tensor, tolerance: float) -> None:
    """Two copies of a network have equal gradients, and equal buffers after the step."""
    for model in (one, other):
        model.zero_grad()
        model(x).square().sum().backward()
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert p.grad is not None, name
        torch.testing.assert_close(q.grad, p.grad, rtol=tolerance, atol=tolerance)
    for b, c in zip(one.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(c, b, rtol=tolerance, atol=tolerance)


def test_fuse_changes_no_output_gradient_and_buffer():
    plain = nn.Sequential(cpl_conv(3, 2, in_size=(6, 6)), nn.Sequential(cpl_conv(3, 2, in_size=(6, 6)), nn.Flatten()))
    plain.append(cpl_dense(108, 5)).double()
    fused = fuse(copy.deepcopy(plain))
    assert type(fused) is type(fused[1]) is Sequential
    assert list(fused.state_dict()) == list(plain.state_dict())
    x = torch.rand(4, 3, 6, 6, dtype=torch.float64)
    for training in (True, True, False):
        require_equal_steps(plain.train(training), fused.train(training), x, 1e-9)
        torch.testing.assert_close(fused.eval()(x), plain.eval()(x))


def test_a_chain_learns_another_input_size():
    chain = Sequential(cpl_conv(3, 2), cpl_conv(3, 2)).train()
    for size in (4, 6):
        chain(torch.randn(1, 3, size, size))
        assert all(layer.field.weight.in_size == (size, size) for layer in chain)


def test_training_makes_one_power_iteration_and_evaluation_none(network, images):
    weights = [m for m in network.modules() if isinstance(m, Weight)]
    expected = [power_iteration(w.operator(None), w.u, 1) for w in weights]
    network(images)
    for weight, u in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.u, u, rtol=1e-12, atol=1e-13)
    before = copy.deepcopy(network.state_dict())
    network.eval()(images)
    assert all(torch.equal(b, before[name]) for name, b in network.named_buffers())


def test_layers_in_evaluation_mode_make_no_power_iteration(network, images):
    network.stages.convolutions.eval()
    before = copy.deepcopy(network.state_dict())
    network(images)
    changed = {name for name, b in network.named_buffers() if not torch.equal(b, before[name])}
    assert changed
    assert not any("convolutions" in name for name in changed)


RECOMPUTED = pytest.mark.parametrize(
    ("name", "sizes"),
    [("cpl", dict(channels=4, depth=5, inner=2, features=5, depth_linear=2)), ("soc-10", dict(channels=4))],
)


@RECOMPUTED
def test_recomputed_activations_give_the_same_step(name, sizes):
    one = build(name, 3, (3, 32, 32), **sizes).double().train()
    other = copy.deepcopy(one).recompute_activations()
    require_equal_steps(one, other, torch.rand(2, 3, 32, 32, dtype=torch.float64), 1e-12)


@RECOMPUTED
def test_a_recomputation_with_changed_norms_is_refused(name, sizes):
    network = build(name, 3, (3, 32, 32), **sizes).train().recompute_activations()
    x = torch.rand(2, 3, 32, 32)
    first, second = network(x).sum(), network(x).sum()
    with pytest.raises(RuntimeError, match="followed by its backward pass"):
        (first + second).backward()
    network(x).sum().backward()


def test_recomputation_saves_most_activations():
    network = build("cpl", 3, (3, 8, 8), channels=8, depth=64, inner=8, features=4, depth_linear=1).train()

    def saved() -> int:
        sizes: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            sizes[t.data_ptr()] = t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            network(torch.rand(4, 3, 8, 8))
        return sum(sizes.values())

    every = saved()
    network.recompute_activations()
    assert saved() < every / 3


def test_recomputed_activations_can_be_recomputed_again(fast):
    loss = fast.recompute_activations()(torch.rand(4, 3, 16, 16)).square().sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in fast.parameters()]
    loss.backward()
    for parameter, first in zip(fast.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * first)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("low", [False, True])
def test_a_gradient_penalty_can_be_differentiated(fast, recompute, low):
    """Outside of autocast, as torch's guide says."""
    fast.recompute_activations(recompute)
    x = torch.rand(4, 3, 16, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        scores = fast(x).float()
    (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    slope.square().sum().backward()
    gradients = [p.grad for p in fast.parameters() if p.grad is not None]
    assert any(bool(g.any()) for g in gradients)
    assert all(bool(torch.isfinite(g).all()) for g in gradients)


def test_hooks_are_called(network, images):
    expected, calls = network.eval().stages(images), []
    for name, module in network.named_modules():
        if name.endswith(("convolutions", "convolutions.1", "linear.0")):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    torch.testing.assert_close(network(images), expected, rtol=1e-12, atol=1e-12)
    assert calls == ["stages.convolutions.1", "stages.convolutions", "stages.linear.0"]


@pytest.mark.parametrize("inner", [2, 16])
@pytest.mark.parametrize("last", [False, True])
def test_a_chain_gives_contiguous_images_to_other_modules_and_as_its_output(inner, last):
    """If its input is contiguous. oneDNN is fastest with channels last, so a chain may change the format inside."""
    contiguous = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            contiguous.append(x.is_contiguous())
            return x

    layers = [cpl_conv(16, inner, h=0.1), cpl_conv(16, inner, h=0.1), Look(), cpl_conv(16, inner, h=0.1)]
    x = torch.randn(3, 16, 6, 5).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    z = Sequential(*layers)(x)
    torch.testing.assert_close(z, nn.Sequential(*layers)(x), rtol=1e-5, atol=1e-5)
    if not last:
        assert contiguous[0]
        assert z.is_contiguous()


class Ridge(ConvexPotential):
    """f(x) + ½‖x‖²."""

    def gradient(self, x):
        return super().gradient(x) + x

    def smoothness_estimate(self, shape, iterations=1):
        return super().smoothness_estimate(shape, iterations) + 1

    def smoothness(self, shape, norm):
        return super().smoothness(shape, norm) + 1

    def parts(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None


@pytest.mark.parametrize("h", [None, 0.25])
def test_a_subclass_of_convex_potential_uses_its_own_gradient(h):
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
    with pytest.raises(LoweringError, match=r"^0: Ridge has a declared bound"):
        freeze(network, in_shape=(4,))
