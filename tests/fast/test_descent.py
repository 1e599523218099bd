"""`descend` computes the formula x - hWᵀσ(Wx + b) and its derivatives, for one layer and for chains."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lipflow import ConvOperator, DenseOperator, LinearOperator, Sequential, cpl_conv, norm_bound
from lipflow.fast import Layer, NormStep, descend
from lipflow.flows import NONLINEARITIES
from lipflow.models import MODELS, build
from lipflow.operators import columns


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


OPERATORS: dict[str, LinearOperator] = {
    "dense": DenseOperator(random(4, 6)),
    "dense, wide": DenseOperator(random(9, 5)),
    "columns": ConvOperator(random(2, 5, 3, 3), (6, 5)),
    "columns, even kernel": ConvOperator(random(3, 4, 2, 4), (6, 7), padding="same"),
    "columns, strided": ConvOperator(random(2, 3, 3, 3), (7, 6), stride=2),
    "columns, dilated": ConvOperator(random(2, 3, 3, 2), (7, 6), padding=((1, 0), (2, 3)), dilation=2),
    "more outputs": ConvOperator(random(7, 3, 3, 3), (5, 5)),
    "grouped": ConvOperator(random(4, 2, 3, 3), (5, 5), groups=2),
    "circular": ConvOperator(random(2, 3, 3, 3), (5, 4), padding_mode="circular"),
    "many channels": ConvOperator(random(16, 17, 3, 3), (4, 4)),
}


def layer_on(op: LinearOperator, sigma: str = "relu", seed: int = 0, h: float | None = None) -> Layer:
    """A layer with parameters of its own; its step is 2/(s‖Wu‖²) unless h is given."""
    dtype = op.weight.dtype
    bias, u = random(op.out_shape[0], seed=seed + 2, dtype=dtype), random(*op.in_shape, seed=seed + 3, dtype=dtype)
    slope, weight = NONLINEARITIES[sigma], op.weight.clone().requires_grad_()
    step = NormStep(u / u.norm(), slope.high) if h is None else h
    return Layer(op.with_weight(weight), bias.requires_grad_(), step, slope.function)


def cast(op: LinearOperator, dtype: torch.dtype) -> LinearOperator:
    return op.with_weight(op.weight.to(dtype))


def inputs(op: LinearOperator, batch: int = 3) -> Tensor:
    return random(batch, *op.in_shape, seed=1, dtype=op.weight.dtype).requires_grad_()


def chain(depth: int, dtype: torch.dtype = torch.float64) -> list[Layer]:
    """Layers that join."""
    ops = [ConvOperator(random(2, 5, 3, 3, seed=10 * i, dtype=dtype), (6, 4)) for i in range(depth)]
    return [layer_on(op, "relu" if i % 2 else "tanh", 10 * i) for i, op in enumerate(ops)]


def parameters(*layers: Layer) -> list[Tensor]:
    return [t for layer in layers for t in (layer.op.weight, layer.bias) if t is not None]


def plain(x: Tensor, *layers: Layer) -> Tensor:
    for layer in layers:
        x = layer.plain(x)
    return x


def derivatives(z: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(z, inputs, random(*z.shape, seed=4, dtype=z.dtype)))


def require_plain(x: Tensor, *layers: Layer) -> None:
    """descend and the plain form have equal values and derivatives."""
    fused, written = descend(x, *layers), plain(x, *layers)
    torch.testing.assert_close(fused, written, rtol=1e-12, atol=1e-12)
    wanted = [t for t in (x, *parameters(*layers)) if t.requires_grad]
    torch.testing.assert_close(derivatives(fused, wanted), derivatives(written, wanted), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("sigma", ["relu", "softplus", "hardtanh"])
@pytest.mark.parametrize("h", [None, 0.1])
def test_descend_is_the_plain_form(name, sigma, h):
    require_plain(inputs(OPERATORS[name]), layer_on(OPERATORS[name], sigma, h=h))


@pytest.mark.parametrize("cache", [1, 2000, 2**21])
@pytest.mark.parametrize("batch", [0, 1, 7])
@pytest.mark.parametrize("depth", [1, 4])
def test_descend_is_the_plain_form_in_chunks_and_chains(depth, batch, cache, monkeypatch):
    monkeypatch.setattr(columns, "CACHE_BYTES", cache)
    layers = chain(depth)
    x = inputs(layers[0].op, batch)
    assert all(a.joins(b, x) for a, b in pairwise(layers))
    assert not any(a._replace(h=0.05).joins(b, x) or a.joins(b._replace(h=0.05), x) for a, b in pairwise(layers))
    require_plain(x, *layers)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_descend_computes_only_the_derivatives_that_are_needed(wanted, depth):
    layers = chain(depth)
    x = inputs(layers[0].op)
    for tensors, name in (([x], "x"), (parameters(*layers)[::2], "weight"), (parameters(*layers)[1::2], "bias")):
        for tensor in tensors:
            tensor.requires_grad_(name == wanted)
    require_plain(x, *layers)


@pytest.mark.parametrize("name", OPERATORS)
def test_float32_is_the_float64_result_to_rounding(name):
    results = []
    for dtype in (torch.float32, torch.float64):
        op = cast(OPERATORS[name], dtype)
        layer, x = layer_on(op, h=0.1), inputs(op)
        z = descend(x, layer)
        results.append([t.double() for t in (z, *derivatives(z, [x, *parameters(layer)]))])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)


SMALL = {name: [OPERATORS[name]] for name in ("dense", "columns", "columns, strided")}
SMALL["many channels"] = [ConvOperator(random(16, 17, 1, 1), (2, 2), padding=0)]
SMALL["chain"] = [layer.op for layer in chain(2)]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("h", [None, 0.1])
def test_first_and_second_derivatives_are_right(name, h):
    layers = [layer_on(op, "tanh", 10 * i, h) for i, op in enumerate(SMALL[name])]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        pairs = zip(layers, values[::2], values[1::2], strict=True)
        return descend(x, *(layer._replace(op=layer.op.with_weight(w), bias=b) for layer, w, b in pairs))

    arguments = inputs(layers[0].op, 1), *parameters(*layers)
    assert torch.autograd.gradcheck(run, arguments)
    assert torch.autograd.gradgradcheck(run, arguments)


@pytest.mark.parametrize("name", ["columns", "many channels"])
def test_channels_last_inputs_have_equal_results(name):
    op = cast(OPERATORS[name], torch.float32)
    layer, x = layer_on(op, h=0.1), inputs(op)
    last = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    z, again = (descend(t, layer) for t in (x, last))
    torch.testing.assert_close(z, again)
    torch.testing.assert_close(derivatives(z, [x, layer.op.weight]), derivatives(again, [last, layer.op.weight]))


def test_a_zero_operator_is_the_identity():
    layer = layer_on(DenseOperator(torch.zeros(4, 6, dtype=torch.float64)))
    x = inputs(layer.op)
    z = descend(x, layer)
    assert torch.equal(z, x)
    assert all(torch.isfinite(g).all() for g in derivatives(z, [x, *parameters(layer)]))


def test_descend_saves_the_input_and_the_narrow_side_only():
    """Autograd would save four activations."""
    layer, x = Sequential(cpl_conv(32, 2, in_size=(8, 8))), torch.randn(16, 32, 8, 8, requires_grad=True)
    saved: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.setdefault(t.data_ptr(), t.numel()) and t, lambda t: t
    ):
        layer(x)
    assert sum(saved.values()) <= x.numel() + 16 * 2 * 64 + layer[0].field.weight.weight.numel() + 8


def test_a_deep_chain_loses_little_precision():
    """The backward pass computes x = z + hWᵀr through 200 layers in float32: rounding errors only add."""
    layers = [layer._replace(h=float(2 / norm_bound(layer.op) ** 2)) for layer in chain(200, torch.float32)]
    x = inputs(layers[0].op)
    wanted = [x, *parameters(*layers)]
    found, expected = (derivatives(run(x, *layers), wanted) for run in (descend, plain))
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm()) <= 1e-4 * float(b.norm())


# Autocast, transforms and compilers


def distance(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("sigma", ["relu", "softplus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_gives_the_plain_form_to_the_rounding_of_bfloat16(name, sigma, dtype):
    """In a network, the second layer has bfloat16 inputs. Biases are large, to stay away from the kink of relu."""
    op = cast(OPERATORS[name], torch.float32)
    layer = layer_on(op, sigma)
    layer = layer._replace(bias=(100 * layer.bias.detach().sign()).requires_grad_())
    x = inputs(op, 8).detach().bfloat16().to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        z = descend(x, layer)
    assert z.dtype == torch.bfloat16
    assert "_Descend" in str(z.grad_fn)
    exact, h = x.detach().double().requires_grad_(), layer.h._replace(u=layer.h.u.double())
    double = layer._replace(op=cast(layer.op, torch.float64), bias=layer.bias.double(), h=h)
    expected = plain(exact, double)
    assert 0 < distance(z, expected) < 2**-7
    found, wanted = derivatives(z, [x, *parameters(layer)]), derivatives(expected, [exact, *parameters(layer)])
    assert [g.dtype for g in found] == [dtype, torch.float32, torch.float32]
    assert max(map(distance, found, wanted)) < 2**-4  # sums over a batch cancel, so a few bits of eight are lost


def test_autocast_does_not_round_the_step_size():
    """With W = 1 and x = 0, z = -h·b is rounded once; h = 1.00586 would be 1.0078 in bfloat16."""
    op = cast(OPERATORS["many channels"], torch.float32)
    step = layer_on(op).h
    bias, x = torch.arange(1.0, 65.0), torch.zeros(1, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = step.size(op)[0]
        z = descend(x, Layer(DenseOperator(torch.eye(64).requires_grad_()), bias, 1.00586, torch.relu))
    assert torch.equal(rounded, step.size(op)[0])
    assert "_Descend" in str(z.grad_fn)
    assert torch.equal(z[0], -(bias.double() * 1.00586).bfloat16())


@pytest.mark.parametrize("model", [name for name in MODELS if name not in ("cpl-m", "cpl-l", "cpl-xl")])
def test_every_model_takes_a_step_under_autocast(model):
    small = {"cpl": {"channels": 8, "depth": 2, "depth_linear": 1, "features": 16}}
    small |= {"cpl-s": small["cpl"], "cayley-kw3": {"channels": 4, "hidden": 16, "features": 16}}
    small |= {"bcop-large": small["cayley-kw3"]} | {name: {"channels": 2} for name in MODELS if "soc" in name}
    network = build(model, 10, (3, 32, 32), **small.get(model, {})).train()
    with torch.autocast("cpu", torch.bfloat16):
        scores = network(torch.rand(2, 3, 32, 32))
    scores.float().square().sum().backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in network.parameters())


def test_float16_transforms_and_compilers_take_the_plain_form():
    op = cast(OPERATORS["columns"], torch.float32)
    layer, x = layer_on(op, h=0.1), inputs(op)
    expected = plain(x, layer)
    with torch.autocast("cpu", torch.float16):
        low = descend(x, layer)
    torch.testing.assert_close(low, expected, rtol=0.02, atol=0.02)
    assert low.dtype == torch.float32
    torch.testing.assert_close(torch.func.vmap(lambda one: descend(one[None], layer)[0])(x), expected)
    compiled = torch.compile(lambda t: descend(t, layer), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
