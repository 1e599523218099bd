"""Lowering: what is refused before anything is frozen, and what the refusal advises."""

import pytest
import torch
from torch import nn

import lipflow
from lipflow import blocks
from lipflow.flows import ConvexPotential, DenseWeight, Flow, Skew
from lipflow.operators import Dense


def negated(module, inputs, output):
    return -output


def _chain():
    return nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), lipflow.cpl_dense(4, 3))


HOOKED = {
    "chain": lambda m: m,
    "chain within": lambda m: m[1],
    "torch's own": lambda m: m[1][0],
    "layer": lambda m: m[2],
    "field": lambda m: m[2].field,
    "weight": lambda m: m[2].field.weight,
}


@pytest.mark.parametrize("place", HOOKED)
def test_hooks_are_refused_wherever_they_are(place):
    """A frozen network runs the numbers of a model: it would leave out what a hook does to them."""
    model = _chain()
    handle = HOOKED[place](model).register_forward_hook(negated)
    with pytest.raises(TypeError, match="has forward hooks"):
        lipflow.freeze(model, in_shape=(1, 2, 2))
    handle.remove()
    lipflow.freeze(model, in_shape=(1, 2, 2))


@pytest.mark.parametrize("place", [lambda n: n, lambda n: n.stages, lambda n: n.stages.pool])
def test_hooks_on_a_built_network_are_refused(place):
    network = lipflow.build("cpl-digits", in_shape=(1, 4, 4))
    place(network).register_forward_hook(negated)
    with pytest.raises(TypeError, match="has forward hooks"):
        lipflow.freeze(network)


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = _chain()

    def forward(self, x):
        return self.inside(x)


def test_advice_is_what_freeze_takes():
    """Neither an empty place nor Assume, which freeze refuses."""
    with pytest.raises(TypeError, match=r"^Mine declares .*; pass the nn\.Sequential inside of it$"):
        lipflow.freeze(Mine(), in_shape=(1, 2, 2))
    assert lipflow.freeze(Mine().inside, in_shape=(1, 2, 2)).classes == 4
    for module in (nn.BatchNorm2d(1), nn.GELU(), nn.Dropout(), nn.Softmax(1), Mine()):
        with pytest.raises(TypeError, match=r"\(at 0\)") as refused:
            lipflow.freeze(nn.Sequential(module, blocks.Flatten()), in_shape=(1, 2, 2))
        assert "Assume" not in str(refused.value)
    with pytest.raises(TypeError, match=r"^Assume: freeze cannot run ReLU"):
        lipflow.freeze(lipflow.Assume(nn.ReLU(), 1.0), in_shape=(4,))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Softmax(1), "leave it out, as labels, losses and certificates are of scores"),
        (nn.DataParallel(nn.Linear(4, 2)), "give the network inside, model.module"),
        (nn.ModuleDict({"a": nn.Linear(4, 2)}), r"make a chain of it, nn.Sequential\(\*modules.values\(\)\)"),
        (nn.ModuleList([nn.Linear(4, 2)]), r"make a chain of it, nn.Sequential\(\*modules\)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_to_do_is_said(module, words):
    for refuses in (lipflow.freeze, lambda m, in_shape: lipflow.lipschitz_bound(m, in_shape=in_shape)):
        with pytest.raises(TypeError, match=words):
            refuses(module, in_shape=(4,))


def test_a_layer_that_does_not_fit_is_named_by_its_place():
    chain = nn.Sequential(nn.Flatten(), nn.Sequential(nn.ReLU(), nn.Linear(60, 3)))
    with pytest.raises(ValueError, match=r"^at 1.1: affine \(60 → 3\) does not take an input of shape \(64,\)$"):
        lipflow.freeze(chain, in_shape=(1, 8, 8))


def test_a_bound_without_a_primitive_is_said_to_be_that():
    shuffle = nn.Sequential(nn.PixelShuffle(2), nn.Flatten())
    assert lipflow.lipschitz_bound(shuffle).lipschitz == 1
    with pytest.raises(TypeError, match=r"nn\.PixelShuffle \(at 0\) has a bound, and freeze has no primitive"):
        lipflow.freeze(shuffle, in_shape=(4, 1, 1))
    inverse = lipflow.freeze(nn.Sequential(nn.PixelUnshuffle(2), nn.Flatten()), in_shape=(1, 2, 2))
    assert torch.equal(inverse(torch.ones(1, 1, 2, 2)), torch.ones(1, 4, dtype=torch.float64))


class Twice(Dense):
    def __call__(self, x, bias=None):
        return 2 * super().__call__(x, bias)

    def with_weight(self, weight):
        return Twice(weight)


class TwiceWeight(DenseWeight):
    def operator(self, shape):
        return Twice(super().operator(shape).weight)


class Extended(ConvexPotential):
    pass


class Turned(Skew):
    pass


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (lambda: Flow(ConvexPotential(TwiceWeight(3, 4)), lipflow.ExplicitEuler()), "not Twice"),
        (lambda: Flow(Skew(TwiceWeight(3, 3)), lipflow.Midpoint()), "not Twice"),
        (lambda: Flow(Extended(DenseWeight(3, 4)), lipflow.ImplicitEuler()), "a Extended"),
        (lambda: Flow(Turned(DenseWeight(3, 3)), lipflow.Exponential()), "a Turned"),
        (lambda: Flow(Turned(DenseWeight(3, 3)), lipflow.Midpoint()), "a Turned"),
    ],
)
def test_what_extends_our_types_may_compute_anything_and_is_refused(layer, words):
    with pytest.raises(TypeError, match=words):
        lipflow.freeze(nn.Sequential(layer()), in_shape=(3,))
