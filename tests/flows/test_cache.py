"""Evaluation uses the present weights, however they were changed, and computes what depends on them once."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import AveragedModel

import lipflow
from lipflow.flows import ConvWeight, Flow, Skew, SpectralScale, Weight
from lipflow.flows.cache import Cache


def circular() -> ConvWeight:
    return ConvWeight(2, 2, padding_mode="circular")


def split() -> Flow:
    convex = lipflow.ConvexPotential(lipflow.DenseWeight(24, 24))
    field = lipflow.ConvexPlusSkew(convex, Skew(lipflow.DenseWeight(24, 24)))
    return Flow(field, lipflow.Split(lipflow.ExplicitEuler(), lipflow.Midpoint()))


LAYERS = {
    "cpl dense": (lambda: lipflow.cpl_dense(64, 48), (64,)),
    "cpl dense, softplus": (lambda: lipflow.cpl_dense(32, 48, sigma="softplus"), (32,)),
    "cpl conv": (lambda: lipflow.cpl_conv(2, 3), (2, 3, 4)),
    "cpl conv, circular": (lambda: lipflow.cpl_conv(4, 3, padding_mode="circular"), (4, 6, 6)),
    "cpl split": (split, (24,)),
    "proximal": (lambda: lipflow.proximal(4, 6), (4,)),
    "cayley dense": (lambda: lipflow.cayley(4), (4,)),
    "cayley conv": (lambda: lipflow.cayley(2, 3), (2, 3, 4)),
    "implicit": (lambda: Flow(Skew(circular()), lipflow.ImplicitEuler()), (2, 3, 3)),
    "soc": (lambda: lipflow.soc_conv(2, 3), (2, 3, 3)),
    "cayley, rectangular": (lambda: lipflow.cayley_dense(4, 3), (4,)),
    "cayley conv, rectangular": (lambda: lipflow.cayley_conv(2, 3), (2, 3, 4)),
    "bcop": (lambda: lipflow.bcop_conv(2, 3), (2, 3, 3)),
    "björck": (lambda: lipflow.bjorck_dense(4, 3), (4,)),
    "spectral": (lambda: lipflow.spectral_conv(2, 3), (2, 3, 3)),
    "reshaped": (lambda: lipflow.reshaped_conv(2, 3), (2, 3, 3)),
    "skew, spectral": (lambda: Flow(Skew(circular(), SpectralScale()), lipflow.Exponential()), (2, 3, 3)),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def make(name: str) -> tuple[nn.Module, torch.Tensor]:
    layer, shape = LAYERS[name][0](), LAYERS[name][1]
    x = torch.randn(2, *shape)
    layer(x)  # one power iteration, and the input size
    return layer.eval(), x


def filled_caches(layer: nn.Module) -> list[Cache]:
    found = [c for m in layer.modules() for v in vars(m).values() for c in (v if isinstance(v, list) else [v])]
    return [c for c in found if isinstance(c, Cache) and c.value is not None]


def fresh(layer: nn.Module) -> nn.Module:
    """A copy with empty caches."""
    twin = copy.deepcopy(layer)
    for cache in filled_caches(twin):
        cache.clear()
    return twin


@torch.no_grad()
def require_fresh(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = layer(x)
    assert torch.equal(y, fresh(layer)(x))
    return y


def moved(p: torch.Tensor) -> torch.Tensor:
    """Numbers without relation to those of p."""
    return torch.cos(torch.arange(p.numel()).reshape(p.shape).double().square() * 0.37).to(p)


def write_data(layer):
    for name, p in layer.named_parameters():
        if "bias" not in name:
            address, version = p.data_ptr(), p._version
            p.data.copy_(moved(p))
            assert (p.data_ptr(), p._version) == (address, version), "the write is not visible on the tensor"
    return layer


def load(layer, assign=False):
    names = dict(layer.named_parameters())
    layer.load_state_dict({k: moved(v) if k in names else v for k, v in layer.state_dict().items()}, assign=assign)
    return layer


def load_assigned(layer):
    return load(layer, assign=True)


def fused_steps(layer):
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.1, fused=True)
    for _ in range(5):
        for p in layer.parameters():
            p.grad = torch.ones_like(p) + torch.arange(p.numel()).reshape(p.shape) % 3
        optimiser.step()
    return layer


def average_before_evaluation(layer, training=True):
    average = AveragedModel(layer.train()).train(training)
    average.update_parameters(write_data(layer))
    return average.module.eval()


def average_in_evaluation(layer):
    return average_before_evaluation(layer, training=False)


def pickled(layer):
    return write_data(pickle.loads(pickle.dumps(layer)))


CHANGES = [
    write_data,
    load,
    load_assigned,
    fused_steps,
    average_before_evaluation,
    average_in_evaluation,
    pickled,
]


def require_right_step(layer: nn.Module, x: torch.Tensor) -> None:
    """A step of 2/ℓ̂ with a converged ℓ̂ has L close to 1, and Sequential uses the same step."""
    assert lipflow.lipschitz_bound(layer, tuple(x.shape[1:])).lipschitz <= 1.005
    torch.testing.assert_close(lipflow.Sequential(layer)(x), layer(x), rtol=1e-5, atol=1e-5)


@every_layer
@pytest.mark.parametrize("change", CHANGES)
def test_no_value_is_stale(name, change):
    layer, x = make(name)
    before = require_fresh(layer, x)
    layer = change(layer)
    assert not torch.equal(before, require_fresh(layer, x))
    if name.startswith("cpl"):
        require_right_step(layer, x)


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("cpl")])
def test_no_step_of_a_pruned_layer_is_stale(name):
    layer, x = make(name)
    for module in list(layer.modules()):
        if isinstance(module, Weight):
            prune.l1_unstructured(module, "weight", amount=0.6)
    layer(x)
    require_right_step(layer, x)


@every_layer
def test_changes_of_a_parametrization_are_noticed(name):
    class Ramp(nn.Module):
        factor = 1.0

        def forward(self, p):
            return p + self.factor * torch.linspace(0, 1, p.numel(), dtype=p.dtype).reshape(p.shape)

    layer, x = make(name)
    outputs = [require_fresh(layer, x)]
    owner, own = next((m, n) for m in layer.modules() for n, _ in m.named_parameters(recurse=False) if "bias" not in n)
    ramp = Ramp()
    parametrize.register_parametrization(owner, own, ramp)
    for factor in (1.0, 3.0):
        ramp.factor = factor
        outputs.append(require_fresh(layer, x))
        assert not torch.equal(*outputs[-2:])


def test_no_value_is_stale_while_another_thread_computes_it():
    cache, weight = Cache(), torch.zeros(1)
    cache.constant(lambda: weight + 1, weight)
    weight += 1

    def compute():
        in_another_thread = cache.constant(lambda: weight + 1, weight)
        assert in_another_thread == 2
        return weight + 1

    assert cache.constant(compute, weight) == 2


@every_layer
def test_values_are_computed_once_for_equal_weights(name):
    layer, x = make(name)
    with torch.no_grad():
        layer(x)
        values = [cache.value for cache in filled_caches(layer)]
        layer(x + 1)
    assert values
    assert all(cache.value is value for cache, value in zip(filled_caches(layer), values, strict=True))


@every_layer
def test_gradients_are_equal_after_a_cached_pass(name):
    layer, x = make(name)
    with torch.no_grad():
        layer(x)
    twin = fresh(layer)
    for module in (layer, twin):
        module(x).square().sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(layer.parameters(), twin.parameters(), strict=True))


@every_layer
def test_values_of_inference_mode_can_be_differentiated_later(name):
    layer, x = make(name)
    layer.requires_grad_(False)
    with torch.inference_mode():
        expected = layer(x).clone()
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    torch.testing.assert_close(y.detach(), expected)
    y.square().sum().backward()
    assert leaf.grad is not None


@every_layer
def test_functional_call_leaves_no_value(name):
    layer, x = make(name)
    other = {n: moved(p) for n, p in layer.named_parameters()}
    twin = copy.deepcopy(layer)
    twin.load_state_dict({**layer.state_dict(), **other})
    with torch.no_grad():
        mine, theirs = layer(x), twin(x)
        assert torch.equal(torch.func.functional_call(layer, other, (x,)), theirs)
        assert torch.equal(layer(x), mine)
    learned = {n: p.clone().requires_grad_() for n, p in other.items()}
    torch.func.functional_call(layer, learned, (x,)).square().sum().backward()
    assert all(p.grad is not None for p in learned.values())
    with torch.no_grad():
        assert torch.equal(layer(x), mine)


@pytest.mark.parametrize("name", ["cayley, rectangular", "björck", "cayley dense"])
def test_transforms_of_torch_func_do_not_use_the_cache(name):
    layer, x = make(name)
    names, values = zip(*((n, p.detach()) for n, p in layer.named_parameters()), strict=True)
    batch = tuple(torch.stack([v, moved(v)]) for v in values)

    def call(*parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    with torch.no_grad():
        layer(x)
        for k, together in enumerate(torch.func.vmap(call)(*batch)):
            torch.testing.assert_close(together, call(*(b[k] for b in batch)))
        tangents = tuple(torch.arange(1.0, 1 + v.numel()).reshape(v.shape) for v in values)
        assert bool(torch.func.jvp(call, values, tangents)[1].any())


def test_forward_mode_derivatives_do_not_use_the_cache():
    """A cached value has no tangent."""
    layer = lipflow.cayley_dense(4, 3).double().eval()
    x, values = torch.randn(2, 4, dtype=torch.float64), {n: p.detach() for n, p in layer.named_parameters()}
    name, slopes = "weight.weight.weight", []
    for _ in range(2):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(values[name], torch.ones_like(values[name]))
            out = torch.func.functional_call(layer, {**values, name: dual}, (x,))
            slopes.append(forward_ad.unpack_dual(out).tangent)
    assert bool(slopes[0].ne(0).any())
    torch.testing.assert_close(slopes[0], slopes[1])


@pytest.mark.parametrize("name", ["cpl dense", "soc", "cayley, rectangular", "bcop"])
def test_a_compiled_layer_uses_changed_parameters(name):
    layer, x = make(name)
    compiled = torch.compile(layer, backend="aot_eager")
    with torch.no_grad():
        compiled(x)
        write_data(layer)
        expected = layer.eval()(x)
        torch.testing.assert_close(compiled(x), expected)
        require_fresh(layer, x)


@every_layer
def test_changes_of_dtype_and_size_are_noticed(name):
    layer, x = make(name)
    for size in [(4, 5), x.shape[2:]] if x.ndim == 4 else [()]:
        require_fresh(layer, torch.randn(*x.shape[:2], *size))
    for dtype in (torch.float64, torch.float32):
        layer = layer.to(dtype)
        with torch.no_grad():  # the numbers of the weights are those of the cache
            y = layer(x.to(dtype))
        assert y.dtype == dtype
        torch.testing.assert_close(y, fresh(layer)(x.to(dtype)), rtol=1e-5, atol=1e-5)  # u may be of the other dtype


def test_values_of_autocast_are_not_cached_for_full_precision():
    cache, a = Cache(), torch.randn(3, 3)
    for autocast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert cache.transform(lambda: a @ a, a, training=False).dtype == dtype


@every_layer
def test_caches_are_not_saved_and_copies_are_independent(name):
    layer, x = make(name)
    keys = list(layer.state_dict())
    require_fresh(layer, x)
    assert filled_caches(layer)
    assert list(layer.state_dict()) == keys
    assert not filled_caches(pickle.loads(pickle.dumps(layer)))
    twin = copy.deepcopy(layer)
    assert [c.value for c in filled_caches(twin)] == [c.value for c in filled_caches(layer)]
    write_data(twin)
    require_fresh(twin, x)
    require_fresh(layer, x)


@pytest.mark.parametrize("make_layer", [lipflow.cayley_dense, lipflow.cpl_dense])
def test_meta_tensors_are_not_cached(make_layer):
    with torch.device("meta"), torch.no_grad():
        layer = make_layer(4, 3).eval()
        assert layer(torch.randn(2, 4)).is_meta
    assert not filled_caches(layer)
