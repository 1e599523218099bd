"""The Convex Potential Layer as one function, against the same written out."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lipflow import ConvOperator, DenseOperator, LinearOperator, Sequential, cpl_conv, norm_bound, norm_estimate
from lipflow.fast import Layer, NormStep, descend
from lipflow.flows.field import NONLINEARITIES
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


def cases(op: LinearOperator, dtype: torch.dtype, batch: int = 3) -> tuple[LinearOperator, Tensor, Tensor, Tensor]:
    """The operator with a weight of its own, an input, a bias and a unit vector."""
    weight = op.weight.to(dtype).clone().requires_grad_()
    x = random(batch, *op.in_shape, seed=1, dtype=dtype).requires_grad_()
    bias = random(op.out_shape[0], seed=2, dtype=dtype).requires_grad_()
    u = random(*op.in_shape, seed=3, dtype=dtype)
    return op.with_weight(weight), x, bias, u / u.norm()


def plain(x: Tensor, *layers: Layer) -> Tensor:
    for layer in layers:
        x = layer.plain(x)
    return x


def derivatives(z: Tensor, inputs: list[Tensor], seed: int = 4) -> list[Tensor]:
    return list(torch.autograd.grad(z, inputs, random(*z.shape, seed=seed, dtype=z.dtype)))


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("sigma", ["relu", "softplus", "hardtanh"])
@pytest.mark.parametrize("follows", [True, False])
def test_one_function_is_the_plain_form(name, sigma, follows):
    op, x, bias, u = cases(OPERATORS[name], torch.float64)
    h = NormStep(u, NONLINEARITIES[sigma].high) if follows else 0.1
    fused, written = (f(x, Layer(op, bias, h, NONLINEARITIES[sigma].function)) for f in (descend, plain))
    torch.testing.assert_close(fused, written, rtol=1e-12, atol=1e-12)
    inputs = [x, op.weight, bias]
    torch.testing.assert_close(derivatives(fused, inputs), derivatives(written, inputs), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", OPERATORS)
def test_float32_is_the_float64_result_to_rounding(name):
    z, grads = [], []
    for dtype in (torch.float32, torch.float64):
        op, x, bias, _ = cases(OPERATORS[name], dtype)
        z.append(descend(x, Layer(op, bias, 0.1, torch.relu)))
        grads.append(derivatives(z[-1], [x, op.weight, bias]))
    torch.testing.assert_close(z[0].double(), z[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close([g.double() for g in grads[0]], grads[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["dense", "columns", "columns, strided", "many channels"])
@pytest.mark.parametrize("follows", [True, False])
def test_its_derivatives_are_true_to_second_order(name, follows):
    op, x, bias, u = cases(OPERATORS[name], torch.float64, batch=2)
    if name == "many channels":
        op, x = op.with_weight(op.weight[:, :, :1, :1].detach().requires_grad_()), x  # keep the Jacobian small
        op = ConvOperator(op.weight, (2, 2), padding=0)
        x, u = x[:, :, :2, :2].detach().requires_grad_(), u[:, :2, :2] / u[:, :2, :2].norm()
    h = NormStep(u, 1.0) if follows else 0.1

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return descend(x, Layer(op.with_weight(weight), bias, h, torch.tanh))

    assert torch.autograd.gradcheck(layer, (x, op.weight, bias))
    assert torch.autograd.gradgradcheck(layer, (x, op.weight, bias))


@pytest.mark.parametrize("batch", [0, 1, 7])
@pytest.mark.parametrize("cache", [1, 2000, 2**21])
def test_chunks_do_not_matter(batch, cache, monkeypatch):
    monkeypatch.setattr(columns, "CACHE_BYTES", cache)
    op, x, bias, u = cases(OPERATORS["columns"], torch.float64, batch)
    fused, written = (f(x, Layer(op, bias, NormStep(u, 1.0), torch.relu)) for f in (descend, plain))
    torch.testing.assert_close(fused, written, rtol=1e-12, atol=1e-12)
    inputs = [x, op.weight, bias]
    torch.testing.assert_close(derivatives(fused, inputs), derivatives(written, inputs), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["columns", "many channels"])
def test_channels_last(name):
    op, x, bias, _ = cases(OPERATORS[name], torch.float32)
    last = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    z, again = (descend(t, Layer(op, bias, 0.1, torch.relu)) for t in (x, last))
    torch.testing.assert_close(z, again)
    torch.testing.assert_close(derivatives(z, [x, op.weight]), derivatives(again, [last, op.weight]))


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_only_what_is_asked_for(wanted):
    op, x, bias, u = cases(OPERATORS["columns"], torch.float64)
    tensors = {"x": x, "weight": op.weight, "bias": bias}
    (expected,) = derivatives(plain(x, Layer(op, bias, NormStep(u, 1.0), torch.relu)), [tensors[wanted]])
    for name, tensor in tensors.items():
        tensor.requires_grad_(name == wanted)
    (found,) = derivatives(descend(x, Layer(op, bias, NormStep(u, 1.0), torch.relu)), [tensors[wanted]])
    torch.testing.assert_close(found, expected)


def test_a_zero_operator_moves_nothing():
    op, x, bias, u = cases(DenseOperator(torch.zeros(4, 6)), torch.float64)
    z = descend(x, Layer(op, bias, NormStep(u, 1.0), torch.relu))
    assert torch.equal(z, x)
    assert all(torch.isfinite(g).all() for g in derivatives(z, [x, op.weight, bias]))


def test_what_is_kept_for_the_backward_pass():
    """x, which the layer before keeps anyway, and the narrow Wx + b: not the four activations that autograd keeps."""
    chain = Sequential(cpl_conv(32, 2, in_size=(8, 8)))
    x = torch.randn(16, 32, 8, 8, requires_grad=True)
    kept: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.data_ptr(), t.numel()) and t, lambda t: t
    ):
        chain(x)
    weight = chain[0].field.weight.weight
    assert sum(kept.values()) <= x.numel() + 16 * 2 * 64 + weight.numel() + 8


def distance(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("sigma", ["relu", "softplus"])
@pytest.mark.parametrize("again", [False, True])
def test_under_autocast_it_is_the_plain_form_to_the_rounding_of_bfloat16(name, sigma, again):
    """`again`: of an input that is itself bfloat16, as the second layer of a network sees.

    Biases are large: where relu has its kink, a rounding may change the derivative by anything.
    """
    op, x, bias, u = cases(OPERATORS[name], torch.float32, batch=8)
    bias = (100 * bias.detach().sign()).requires_grad_()
    layer = Layer(op, bias, NormStep(u, NONLINEARITIES[sigma].high), NONLINEARITIES[sigma].function)
    x = x.detach().bfloat16().to(torch.bfloat16 if again else torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        z = descend(x, layer)
    assert z.dtype == torch.bfloat16
    assert "_Descend" in str(z.grad_fn), "this is the plain form itself"
    exact = x.detach().double().requires_grad_()
    double = Layer(op.with_weight(op.weight.double()), bias.double(), NormStep(u.double(), layer.h.slope), layer.sigma)
    expected = plain(exact, double)
    assert 0 < distance(z, expected) < 2**-7
    found, wanted = derivatives(z, [x, op.weight, bias]), derivatives(expected, [exact, op.weight, bias])
    assert [g.dtype for g in found] == [x.dtype, torch.float32, torch.float32]
    assert max(map(distance, found, wanted)) < 2**-4  # sums over a batch cancel, so a few bits of eight are lost


def test_step_sizes_are_not_rounded_by_autocast():
    op, _, _, u = cases(OPERATORS["many channels"], torch.float32)
    full, _ = NormStep(u, 1.0).size(op)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(NormStep(u, 1.0).size(op)[0], full)
        low = norm_estimate(op, u, 3)
    assert torch.equal(low, norm_estimate(op, u, 3))


def test_a_layer_under_autocast_steps_by_the_step_size_as_it_is():
    """With W = 1 and x = 0, z = -h·b is rounded once; h = 1.00586 is no bfloat16, and would be 1.0078 as one."""
    bias = torch.arange(1.0, 65.0)
    layer = Layer(DenseOperator(torch.eye(64).requires_grad_()), bias, 1.00586, torch.relu)
    x = torch.zeros(1, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        z = descend(x, layer)
    assert "_Descend" in str(z.grad_fn)
    assert torch.equal(z[0], -(bias.double() * 1.00586).bfloat16())


def test_a_network_under_autocast_keeps_the_vectors_of_its_norms_in_full():
    vectors = []
    for autocast in (False, True):
        torch.manual_seed(0)
        network = build("cpl-fast", 3, (1, 8, 8), channels=4, inner=(2, 16), depth=(2, 2), features=5)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            network.train()(torch.rand(2, 1, 8, 8))
        vectors.append([b for name, b in network.named_buffers() if name.endswith(".u")])
    assert len(vectors[0]) == 8
    for full, low in zip(*vectors, strict=True):
        assert torch.equal(full, low)


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


def test_autocast_to_float16_transforms_and_compilers_get_the_plain_form():
    op, x, bias, _ = cases(OPERATORS["columns"], torch.float32)
    expected = plain(x, Layer(op, bias, 0.1, torch.relu))
    with torch.autocast("cpu", torch.float16):
        low = descend(x, Layer(op, bias, 0.1, torch.relu))
    torch.testing.assert_close(low, expected, rtol=0.02, atol=0.02)
    assert low.dtype == torch.float32
    single = torch.func.vmap(lambda one: descend(one[None], Layer(op, bias, 0.1, torch.relu))[0])(x)
    torch.testing.assert_close(single, expected)
    compiled = torch.compile(
        lambda t: descend(t, Layer(op, bias, 0.1, torch.relu)), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(x), expected)


# Chains


def chain(depth: int, dtype: torch.dtype = torch.float64) -> tuple[list[Layer], list[Tensor]]:
    """Layers that join, and their parameters."""
    layers, parameters = [], []
    for i in range(depth):
        weight = random(2, 5, 3, 3, seed=10 * i, dtype=dtype).requires_grad_()
        bias = random(2, seed=10 * i + 1, dtype=dtype).requires_grad_()
        u = random(5, 6, 4, seed=10 * i + 2, dtype=dtype)
        h = NormStep(u / u.norm(), 1.0)
        layers.append(Layer(ConvOperator(weight, (6, 4)), bias, h, torch.relu if i % 2 else torch.tanh))
        parameters += [weight, bias]
    return layers, parameters


@pytest.mark.parametrize("cache", [1, 2**21])
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_a_chain_is_one_layer_after_the_other(cache, batch, monkeypatch):
    monkeypatch.setattr(columns, "CACHE_BYTES", cache)
    layers, parameters = chain(4)
    x = random(batch, 5, 6, 4, seed=7).requires_grad_()
    assert all(a.joins(b, x) for a, b in pairwise(layers))
    assert not any(a._replace(h=0.05).joins(b, x) or a.joins(b._replace(h=0.05), x) for a, b in pairwise(layers))
    fused, written = descend(x, *layers), plain(x, *layers)
    torch.testing.assert_close(fused, written, rtol=1e-12, atol=1e-12)
    expected = derivatives(written, [x, *parameters])
    torch.testing.assert_close(derivatives(fused, [x, *parameters]), expected, rtol=1e-10, atol=1e-11)


def test_a_chain_has_second_derivatives():
    layers, parameters = chain(2)
    smooth = [layer._replace(sigma=torch.tanh) for layer in layers]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        changed = [
            layer._replace(op=layer.op.with_weight(values[2 * i]), bias=values[2 * i + 1])
            for i, layer in enumerate(smooth)
        ]
        return descend(x, *changed)

    x = random(1, 5, 6, 4, seed=7).requires_grad_()
    assert torch.autograd.gradcheck(run, (x, *parameters))
    assert torch.autograd.gradgradcheck(run, (x, *parameters))


def test_only_the_first_input_is_given_to_an_attack():
    layers, parameters = chain(3)
    x = random(2, 5, 6, 4, seed=7).requires_grad_()
    (expected,) = derivatives(plain(x, *layers), [x])
    for p in parameters:
        p.requires_grad_(False)
    (found,) = derivatives(descend(x, *layers), [x])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def test_going_back_through_a_deep_chain_loses_little():
    """x is found again as z + hWᵀr, in float32, through 200 layers: rounding adds, and nothing amplifies it."""
    layers, parameters = chain(200, torch.float32)
    layers = [layer._replace(h=float(2 / norm_bound(layer.op) ** 2)) for layer in layers]
    x = random(3, 5, 6, 4, seed=7, dtype=torch.float32).requires_grad_()
    expected = derivatives(plain(x, *layers), [x, *parameters])
    found = derivatives(descend(x, *layers), [x, *parameters])
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm()) <= 1e-4 * float(b.norm())
