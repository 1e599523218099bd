"""What evaluation derives from weights: computed once while nothing changes, and never stale."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

import lipflow
from lipflow.flows import ConvWeight, Skew, SpectralScale
from lipflow.flows.cache import Cache


def _circular() -> ConvWeight:
    return ConvWeight(2, 2, padding_mode="circular")


LAYERS = {
    "cpl dense": (lambda: lipflow.cpl_dense(4, 6), (4,)),
    "cpl conv": (lambda: lipflow.cpl_conv(2, 3), (2, 3, 4)),
    "proximal": (lambda: lipflow.proximal(4, 6), (4,)),
    "cayley dense": (lambda: lipflow.cayley(4), (4,)),
    "cayley conv": (lambda: lipflow.cayley(2, 3), (2, 3, 4)),
    "implicit": (lambda: lipflow.Flow(Skew(_circular()), lipflow.ImplicitEuler()), (2, 3, 3)),
    "soc": (lambda: lipflow.soc_conv(2, 3), (2, 3, 3)),
    "cayley, rectangular": (lambda: lipflow.cayley_dense(4, 3), (4,)),
    "cayley conv, rectangular": (lambda: lipflow.cayley_conv(2, 3), (2, 3, 4)),
    "bcop": (lambda: lipflow.bcop_conv(2, 3), (2, 3, 3)),
    "björck": (lambda: lipflow.bjorck_dense(4, 3), (4,)),
    "spectral": (lambda: lipflow.spectral_conv(2, 3), (2, 3, 3)),
    "reshaped": (lambda: lipflow.reshaped_conv(2, 3), (2, 3, 3)),
    "skew by its spectral norm": (
        lambda: lipflow.Flow(Skew(_circular(), SpectralScale()), lipflow.Exponential()),
        (2, 3, 3),
    ),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def _make(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(2, *shape)
    layer(x)  # a training step's worth of power iteration, and the input size
    return layer.eval(), x


def _caches(layer: nn.Module) -> list[Cache]:
    """Those that hold something."""
    held = [c for m in layer.modules() for v in vars(m).values() for c in (v if isinstance(v, list) else [v])]
    return [c for c in held if isinstance(c, Cache) and c.value is not None]


def _weights(layer: nn.Module) -> list[nn.Parameter]:
    """The parameters that are transformed: all but biases."""
    return [p for n, p in layer.named_parameters() if "bias" not in n]


@torch.no_grad()
def _require_fresh(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the layer says is what a copy with empty caches says, to the last bit."""
    y, twin = layer(x), copy.deepcopy(layer)
    for cache in _caches(twin):
        cache.clear()
    assert torch.equal(y, twin(x))
    return y


@torch.no_grad()
def _in_place(layer):
    for p in _weights(layer):
        p.mul_(1.5).add_(0.1)


def _assign_data(layer):
    for p in _weights(layer):
        p.data = p.data * 1.5 + 0.1


def _through_data(layer):
    for p in _weights(layer):
        address, version = p.data_ptr(), p._version
        p.data.mul_(1.5).add_(0.1)
        assert (p.data_ptr(), p._version) == (address, version), "this edit leaves no trace on the tensor"


def _through_numpy(layer):
    for p in _weights(layer):
        array = p.detach().numpy()
        array *= 1.5
        array += 0.1


def _load(layer):
    state = {k: v * 1.5 + 0.1 if "weight" in k or "mix" in k else v for k, v in layer.state_dict().items()}
    layer.load_state_dict(state)


def _load_assigned(layer):
    state = {k: v * 1.5 + 0.1 if v.numel() else v.clone() for k, v in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)


def _step(layer):
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.3)
    for p in layer.parameters():
        p.grad = torch.ones_like(p) + torch.arange(p.numel()).reshape(p.shape) % 3
    optimiser.step()


def _replace(layer):
    for module in layer.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if "bias" not in name:
                setattr(module, name, nn.Parameter(p.detach() * 1.5 + 0.1))


CHANGES = [_in_place, _assign_data, _through_data, _through_numpy, _load, _load_assigned, _step, _replace]


@every_layer
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__.strip("_"))
def test_no_change_is_missed(name, change):
    layer, x = _make(name)
    before, original = _require_fresh(layer, x), copy.deepcopy(layer.state_dict())
    change(layer)
    after = _require_fresh(layer, x)
    assert not torch.equal(before, after), "the change should matter"
    layer.load_state_dict(original)
    assert torch.equal(_require_fresh(layer, x), before)


@every_layer
def test_a_parametrised_weight_is_seen(name):
    class Ramp(nn.Module):
        factor = 1.0

        def forward(self, p):
            return p + self.factor * torch.linspace(0, 1, p.numel(), dtype=p.dtype).reshape(p.shape)

    layer, x = _make(name)
    before = _require_fresh(layer, x)
    owner, own = next((m, n) for m in layer.modules() for n, _ in m.named_parameters(recurse=False) if "bias" not in n)
    ramp = Ramp()
    parametrize.register_parametrization(owner, own, ramp)
    after = _require_fresh(layer, x)
    ramp.factor = 3.0
    assert not torch.equal(before, after)
    assert not torch.equal(after, _require_fresh(layer, x))


@every_layer
def test_training_in_between_is_seen(name):
    """Parameters and power-iteration vectors move in training; switching modes by itself means nothing."""
    layer, x = _make(name)
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(3):
        _require_fresh(layer.eval(), x)
        optimiser.zero_grad()
        layer.train()(x).square().sum().backward()
        optimiser.step()
    _require_fresh(layer.eval(), x)


@every_layer
def test_computed_once_while_nothing_changes(name):
    layer, x = _make(name)
    with torch.no_grad():
        layer(x)
        held = [cache.value for cache in _caches(layer)]
        layer(x + 1)
    assert held
    assert all(cache.value is value for cache, value in zip(_caches(layer), held, strict=True))


def test_the_function_is_called_once():
    cache, calls, p = Cache(), [], torch.ones(3)

    def double():
        calls.append(1)
        return 2 * p

    for k in range(3):
        assert torch.equal(cache.transform(double, p, training=False, key="a"), 2 * p)
        assert len(calls) == 1 + k
        assert cache.transform(double, p, training=False, key="a") is cache.transform(
            double, p, training=False, key="a"
        )
        p += 1
    cache.transform(double, p, training=False, key="b")
    assert len(calls) == 4, "another question has another answer"


@every_layer
def test_gradients_reach_parameters_after_a_cached_pass(name):
    layer, x = _make(name)
    with torch.no_grad():
        layer(x)
    layer(x).square().sum().backward()
    gradients = [p.grad.clone() for p in layer.parameters()]
    twin = copy.deepcopy(layer)
    twin.zero_grad()
    twin(x).square().sum().backward()
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, twin.parameters(), strict=True))


@every_layer
def test_an_attack_may_follow_inference(name):
    """A value made under inference_mode must not end up in a graph."""
    layer, x = _make(name)
    layer.requires_grad_(False)
    with torch.inference_mode():
        expected = layer(x).clone()
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    torch.testing.assert_close(y.detach(), expected)
    y.square().sum().backward()
    assert leaf.grad is not None


@every_layer
def test_functional_calls_do_not_leak(name):
    layer, x = _make(name)
    other = {n: p.detach() * 1.5 + 0.1 for n, p in layer.named_parameters()}
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
def test_transforms_of_torch_func_compute(name):
    layer, x = _make(name)
    names, values = zip(*((n, p.detach()) for n, p in layer.named_parameters()), strict=True)
    batch = tuple(torch.stack([v, v * 1.5 + 0.1]) for v in values)

    def call(*parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    with torch.no_grad():
        layer(x)
        together = torch.func.vmap(call)(*batch)
        for k in range(2):
            torch.testing.assert_close(together[k], call(*(b[k] for b in batch)))
        tangents = tuple(torch.arange(1.0, 1 + v.numel()).reshape(v.shape) for v in values)
        slope = torch.func.jvp(call, values, tangents)[1]
        assert bool(slope.any())


@pytest.mark.parametrize("name", ["cpl dense", "soc", "cayley, rectangular", "bcop"])
def test_a_compiled_layer_follows_its_parameters(name):
    layer, x = _make(name)
    compiled = torch.compile(layer, backend="aot_eager")
    with torch.no_grad():
        compiled(x)
        _through_data(layer)
        expected = layer.eval()(x)
        torch.testing.assert_close(compiled(x), expected)
        _require_fresh(layer, x)


@every_layer
def test_type_and_size_are_seen(name):
    layer, x = _make(name)
    _require_fresh(layer, x)
    if x.ndim == 4:
        _require_fresh(layer, torch.randn(2, x.shape[1], 4, 5))
        _require_fresh(layer, x)
    for kind in (torch.float64, torch.float32):
        layer, twin = layer.to(kind), copy.deepcopy(layer).to(kind)
        for cache in _caches(twin):
            cache.clear()
        y = layer(x.to(kind))
        assert y.dtype == kind
        torch.testing.assert_close(y, twin(x.to(kind)), rtol=1e-5, atol=1e-5)  # vectors may be those of the other type


def test_lower_precision_is_not_kept_for_later():
    layer, x = _make("cayley, rectangular")
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(x)
        _require_fresh(layer, x)


@every_layer
def test_it_is_no_part_of_a_state_or_a_pickle(name):
    layer, x = _make(name)
    keys = list(layer.state_dict())
    with torch.no_grad():
        layer(x)
    assert _caches(layer)
    assert list(layer.state_dict()) == keys
    assert not _caches(pickle.loads(pickle.dumps(layer)))
    twin = copy.deepcopy(layer)
    assert [c.value for c in _caches(twin)] == [c.value for c in _caches(layer)]
    _in_place(twin)
    _require_fresh(twin, x)
    _require_fresh(layer, x)


def test_meta_tensors_are_not_numbers():
    with torch.device("meta"):
        for layer, shape in ((lipflow.cayley_dense(4, 3), (2, 3)), (lipflow.cpl_dense(4, 3), (2, 4))):
            with torch.no_grad():
                assert layer.eval()(torch.randn(2, 4)).shape == shape
            assert not _caches(layer)


def test_directions_of_forward_mode_are_not_held():
    """Of several derivatives along a weight, each is computed: a value that is held has no tangent."""
    torch.manual_seed(0)
    layer = lipflow.cayley_dense(4, 3).double().eval()
    x, values = torch.randn(2, 4, dtype=torch.float64), {n: p.detach() for n, p in layer.named_parameters()}
    name = max(values, key=lambda n: values[n].numel())
    slopes = []
    for _ in range(2):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(values[name], torch.ones_like(values[name]))
            out = torch.func.functional_call(layer, {**values, name: dual}, (x,))
            slopes.append(forward_ad.unpack_dual(out).tangent)
    assert slopes[0] is not None
    assert bool(slopes[0].ne(0).any())
    torch.testing.assert_close(slopes[0], slopes[1])
