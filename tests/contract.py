"""The contract: a list of layers, and the laws that each of them obeys. A new layer is one line here."""

import copy
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

import lipflow
from lipflow import blocks, testing
from lipflow.flows import Flow, ReshapedScale
from lipflow.flows.field import ConvexPlusSkew, ConvexPotential, Potential, Skew
from lipflow.flows.step import ExplicitEuler, Exponential, ImplicitEuler, Midpoint, Split
from lipflow.flows.weight import ConvWeight, DenseWeight, Weight


class Layer(NamedTuple):
    """How to make a layer, the shape of one input, and the Lipschitz constant that it promises, or None."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    lipschitz: float | None = 1.0
    solved: bool = True  # an implicit layer cut short has the derivatives of the exact map, not its own


def quadratic() -> Potential:
    """f(x) = ½xᵀHx with ‖H‖ = 2, to float32."""
    linear = nn.Linear(5, 5, bias=False)
    rows = torch.linalg.qr(torch.randn(5, 5)).Q
    linear.weight = nn.Parameter(rows.T @ torch.diag(torch.linspace(0, 2, 5)) @ rows, requires_grad=False)
    return Potential(linear, 2.001)


def potential(sigma: str = "relu") -> ConvexPotential:
    return ConvexPotential(DenseWeight(6, 9), sigma)


def conv_potential() -> ConvexPotential:
    return ConvexPotential(ConvWeight(3, 4))


def skew(features: int) -> Skew:
    return Skew(DenseWeight(features, features))


def skew_conv(channels: int, **options) -> Skew:
    return Skew(ConvWeight(channels, channels, **options))


def scaled_skew() -> Skew:
    return Skew(ConvWeight(4, 4, groups=2), ReshapedScale(1.5))


LAYERS: dict[str, Layer] = {
    "cpl dense": Layer(lambda: lipflow.cpl_dense(6, 9), (6,)),
    "cpl dense, tanh": Layer(lambda: lipflow.cpl_dense(6, 4, sigma="tanh"), (6,)),
    "cpl dense, softplus": Layer(lambda: lipflow.cpl_dense(6, 4, sigma="softplus"), (6,)),
    "cpl dense, sigmoid": Layer(lambda: lipflow.cpl_dense(6, 4, sigma="sigmoid"), (6,)),
    "cpl dense, relaxed": Layer(lambda: lipflow.cpl_dense(6, 9, h=1.5), (6,), None),
    "cpl conv": Layer(lambda: lipflow.cpl_conv(3, 4), (3, 5, 7)),
    "cpl conv, circular": Layer(lambda: lipflow.cpl_conv(3, 4, padding_mode="circular"), (3, 4, 5)),
    "cpl conv, even kernel": Layer(lambda: lipflow.cpl_conv(2, 3, (2, 4)), (2, 5, 6)),
    "cpl conv, strided": Layer(lambda: lipflow.cpl_conv(2, 5, stride=2, padding=1), (2, 6, 5)),
    "cpl conv, dilated, grouped": Layer(lambda: lipflow.cpl_conv(4, 6, dilation=2, groups=2), (4, 5, 5)),
    "proximal dense": Layer(lambda: lipflow.proximal(6, 9, h=3.0), (6,)),
    "proximal conv": Layer(lambda: lipflow.proximal(2, 3, 3), (2, 4, 5)),
    "proximal, 5 iterations": Layer(lambda: lipflow.proximal(6, 9, h=3.0, iterations=5), (6,), solved=False),
    "midpoint, convex": Layer(lambda: Flow(potential("tanh"), Midpoint(2.0)), (6,)),
    "midpoint, convex conv": Layer(lambda: Flow(conv_potential(), Midpoint()), (3, 4, 4)),
    "cayley dense": Layer(lambda: lipflow.cayley(6, h=2.0), (6,)),
    "cayley conv": Layer(lambda: lipflow.cayley(3, 3), (3, 5, 4)),
    "implicit, skew": Layer(lambda: Flow(skew(5), ImplicitEuler(2.0)), (5,)),
    "implicit, skew conv": Layer(lambda: Flow(skew_conv(2, padding_mode="circular"), ImplicitEuler(2.0)), (2, 5, 4)),
    "soc dense": Layer(lambda: lipflow.soc(6, terms=6, h=3.0), (6,), None),
    "soc conv": Layer(lambda: lipflow.soc(4, 3), (4, 5, 4)),
    "soc conv, grouped": Layer(lambda: Flow(skew_conv(4, groups=2), Exponential(2.0, terms=8)), (4, 4, 5), None),
    "soc, scaled": Layer(lambda: Flow(scaled_skew(), Exponential(1.0, terms=13)), (4, 3, 4)),
    "soc, wider": Layer(lambda: lipflow.soc_conv(2, 4), (2, 4, 3)),
    "soc, narrower, strided": Layer(lambda: lipflow.soc_conv(1, 2, stride=2), (1, 4, 6)),
    "soc, 1×1": Layer(lambda: lipflow.soc_conv(3, 3, 1), (3, 3, 2)),
    "soc, features": Layer(lambda: lipflow.soc_dense(4, 6), (4,)),
    "cayley, many to few": Layer(lambda: lipflow.cayley_dense(6, 4), (6,)),
    "cayley, few to many": Layer(lambda: lipflow.cayley_dense(3, 5), (3,)),
    "cayley, square": Layer(lambda: lipflow.cayley_dense(4, 4), (4,)),
    "cayley conv, few to many": Layer(lambda: lipflow.cayley_conv(2, 3), (2, 3, 4)),
    "cayley conv, many to few, even": Layer(lambda: lipflow.cayley_conv(3, 2, (2, 4)), (3, 4, 3)),
    "cayley conv, larger than its input": Layer(lambda: lipflow.cayley_conv(2, 2, 5), (2, 2, 3)),
    "bcop": Layer(lambda: lipflow.bcop_conv(3, 3), (3, 4, 3)),
    "bcop, few to many, even": Layer(lambda: lipflow.bcop_conv(2, 3, (2, 4)), (2, 3, 4)),
    "bcop, many to few, 1×1": Layer(lambda: lipflow.bcop_conv(4, 2, 1), (4, 2, 3)),
    "björck, many to few": Layer(lambda: lipflow.bjorck_dense(6, 4), (6,)),
    "björck, few to many": Layer(lambda: lipflow.bjorck_dense(3, 5), (3,)),
    "spectral normalization": Layer(lambda: lipflow.spectral_dense(6, 4), (6,)),
    "spectral normalization, conv": Layer(lambda: lipflow.spectral_conv(2, 3), (2, 4, 5)),
    "spectral normalization, strided": Layer(
        lambda: lipflow.spectral_conv(2, 4, stride=2, padding=1, groups=2, padding_mode="circular"), (2, 4, 6)
    ),
    "reshaped normalization": Layer(lambda: lipflow.reshaped_conv(2, 3, (3, 2), bias=False), (2, 4, 3)),
    "explicit, skew": Layer(lambda: Flow(skew(5), ExplicitEuler(1.0, expand=True)), (5,), None),
    "split": Layer(lambda: Flow(ConvexPlusSkew(potential(), skew(6)), Split(ExplicitEuler(), Midpoint())), (6,)),
    "split, implicit": Layer(
        lambda: Flow(ConvexPlusSkew(conv_potential(), skew_conv(3)), Split(ImplicitEuler(), Exponential())), (3, 4, 5)
    ),
    "any potential": Layer(lambda: Flow(quadratic(), ExplicitEuler()), (5,)),
    "any potential, implicit": Layer(lambda: Flow(quadratic(), ImplicitEuler()), (5,)),
    "maxmin": Layer(blocks.MaxMin, (4, 3, 3)),
    "groupsort": Layer(lambda: blocks.GroupSort(3), (6, 2, 3)),
    "groupsort, dense": Layer(lambda: blocks.GroupSort(2), (6,)),
    "householder": Layer(lambda: blocks.Householder(4), (4, 3, 3)),
    "householder, dense": Layer(lambda: blocks.Householder(6), (6,)),
    "abs": Layer(blocks.Abs, (3, 2, 2)),
    "take channels": Layer(lambda: blocks.TakeChannels(2), (3, 3, 4)),
    "shift": Layer(lambda: blocks.Bias(3), (3, 2, 2)),
    "pad channels": Layer(lambda: blocks.PadChannels(5), (3, 3, 4)),
    "average pooling": Layer(lambda: blocks.AvgPool(2), (2, 5, 4)),
    "max pooling": Layer(lambda: blocks.MaxPool(2), (2, 5, 4)),
    "space to depth": Layer(lambda: blocks.SpaceToDepth(2), (2, 4, 6)),
    "flatten": Layer(nn.Flatten, (2, 3, 4)),
    "mirrored": Layer(
        lambda: blocks.FlipAverage(blocks.Normalize(0.3), lipflow.cpl_conv(2, 3), blocks.AvgPool(2), nn.Flatten()),
        (2, 4, 3),
    ),
    "mirrored twice": Layer(lambda: blocks.FlipAverage(blocks.FlipAverage(lipflow.cpl_conv(1, 3))), (1, 2, 3)),
    "center": Layer(lambda: blocks.Normalize([0.1, 0.2, 0.3]), (3, 3, 4)),
    "center and scale": Layer(lambda: blocks.Normalize([0.1, 0.2], [0.5, 0.25]), (2, 3, 4), 4.0),
    "truncate": Layer(lambda: blocks.Truncate(4), (7,)),
    "last-layer normalization": Layer(lambda: blocks.LastLayerNormalization(7, 4), (7,), None),
    "torch linear": Layer(lambda: nn.Linear(6, 4), (6,), None),
    "torch conv": Layer(lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 5, 6), None),
    "torch max pooling, overlapping": Layer(lambda: nn.MaxPool2d(3, stride=1), (2, 5, 5), 3.0),
    "torch average pooling, overlapping": Layer(lambda: nn.AvgPool2d(3, stride=2, padding=1), (2, 5, 6)),
    "a chain": Layer(
        lambda: nn.Sequential(
            blocks.Normalize(0.5), lipflow.cpl_conv(2, 3), blocks.AvgPool(2), nn.Flatten(), nn.Linear(8, 3)
        ),
        (2, 4, 4),
    ),
}

# Networks by name, with the size of their images.
NETWORKS: dict[str, tuple[str, int, dict[str, object]]] = {
    "cpl network": ("cpl-digits", 4, dict(channels=2, depth=2, inner=3, features=4, lln=True)),
    "mirrored network": ("cpl-fast", 8, dict(channels=4, depth=(1, 1), inner=(2, 2), features=3, mirror=True)),
    "soc network": ("soc-10", 4, dict(channels=2, stages=2, block=1)),
    "soc+ network": ("soc+-10", 4, dict(channels=2, stages=2, block=1)),
    "cayley network": ("cayley-kw3", 4, dict(channels=2, hidden=4, features=2)),
    "bcop network": ("bcop-large", 4, dict(channels=2, hidden=2, features=2, lln=True)),
}
for title, (name, size, options) in NETWORKS.items():
    shape = (1, size, size)
    LAYERS[title] = Layer(partial(lipflow.build, name, classes=3, in_shape=shape, **options), shape, None)


# Layers that freeze refuses, and words of the error.
REFUSED: dict[str, str] = {
    "cpl dense, tanh": "σ = tanh rounds",
    "cpl dense, softplus": "σ = softplus rounds",
    "cpl dense, sigmoid": "σ = sigmoid rounds",
    "midpoint, convex": "σ = tanh rounds",
    "any potential": "has a declared bound",
    "any potential, implicit": "has a declared bound",
}
FREEZABLE = [name for name in LAYERS if name not in REFUSED]


def make(name: str, seed: int = 0, trained: bool = False) -> nn.Module:
    """A layer in float64 and evaluation mode, fresh or after some steps of an optimiser."""
    torch.manual_seed(seed)
    layer = LAYERS[name].make().double()
    if trained:
        train(layer, inputs(name, 8, seed))
    return layer.eval()


def train(layer: nn.Module, x: Tensor, steps: int = 5) -> None:
    """Move every parameter far from its initial value."""
    parameters = [p for p in layer.parameters() if p.requires_grad]
    if not parameters:
        return
    layer.train()
    optimiser = torch.optim.Adam(parameters, lr=0.1)
    for _ in range(steps):
        optimiser.zero_grad()
        layer(x).sub(1).square().mean().backward()
        optimiser.step()


def inputs(name: str, count: int, seed: int = 0) -> Tensor:
    return testing.inputs(LAYERS[name].shape, count, seed)


# The laws: those of lipflow.testing, and those of layers that learn


def jacobian_within_bound(name: str) -> None:
    for trained in (False, True):
        testing.jacobian_within_bound(make(name, trained=trained), LAYERS[name].shape)


def pairs_never_stretched(name: str) -> None:
    for trained in (False, True):
        testing.pairs_never_stretched(make(name, trained=trained), LAYERS[name].shape)


def gradients_are_right(name: str) -> None:
    """Along random directions for images. Networks are trained, as a fresh orthogonal matrix has equal singular values,
    and its norm no derivative."""
    if LAYERS[name].solved:
        shape = LAYERS[name].shape
        testing.gradients_are_right(make(name, trained=name in NETWORKS), shape, fast=len(shape) == 3)


def batches_and_layouts(name: str) -> None:
    testing.batches_and_layouts(make(name), LAYERS[name].shape)


def adjoints_are_exact(name: str) -> None:
    """⟨Wx, y⟩ = ⟨x, Wᵀy⟩ for every operator of the layer."""
    layer, operators = make(name), []
    weights = [m for m in layer.modules() if isinstance(m, Weight | blocks.Parametrization)]
    for weight in weights:
        weight.register_forward_hook(lambda module, inputs, op: operators.append(op))
    layer(inputs(name, 1))
    for op in operators:
        x, y = torch.randn(2, *op.in_shape, dtype=torch.float64), torch.randn(2, *op.out_shape, dtype=torch.float64)
        left, right = (op(x) * y).sum().detach(), (x * op.adjoint(y)).sum().detach()
        scale = x.norm() * y.norm() * op.weight.detach().abs().sum()
        assert abs(float(left - right)) <= 1e-12 * float(scale)
    assert operators or not weights, "call the weight, op = self.weight(x), which also learns the input size"


def state_dict_round_trip(name: str) -> None:
    """A fresh layer with the state of a trained one gives the same outputs, bit for bit."""
    trained, fresh = make(name, trained=True), make(name, seed=5)
    fresh.load_state_dict(trained.state_dict())
    x = inputs(name, 3, seed=6)
    assert torch.equal(trained(x), fresh(x))


def copies_are_independent(name: str) -> None:
    """A deep copy computes the same, and training it leaves the original as it was."""
    layer = make(name)
    x = inputs(name, 3, seed=7)
    before, twin = layer(x), copy.deepcopy(layer)
    assert torch.equal(twin(x), before)
    train(twin, x)
    assert torch.equal(layer.eval()(x), before)


def training_is_finite(name: str) -> None:
    """Training in float32 leaves every number finite, and evaluation changes no buffer."""
    layer = LAYERS[name].make()
    x = inputs(name, 8).float()
    train(layer, x, steps=3)
    layer.eval()
    before = copy.deepcopy(layer.state_dict())
    assert bool(torch.isfinite(layer(x)).all())
    assert all(torch.equal(before[k], v) for k, v in layer.state_dict().items())


LAWS: list[Callable[[str], None]] = [
    jacobian_within_bound,
    pairs_never_stretched,
    gradients_are_right,
    batches_and_layouts,
    adjoints_are_exact,
    state_dict_round_trip,
    copies_are_independent,
    training_is_finite,
]
