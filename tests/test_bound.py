"""The promise (L, ε): how it folds, where it holds, and that asking changes nothing."""

import copy
import itertools
import math
import re
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lipflow
from lipflow import Assume, Bound, Domain, Lipschitz, bound, lipschitz_bound
from lipflow.bound import Nonexpansive, fold, fold_origin

LAWS = settings(max_examples=200, deadline=None, derandomize=True)


class Probe(Nonexpansive):
    """The identity; it remembers the domain over which it was asked for a bound."""

    domain: Domain

    def bound(self, domain: Domain) -> Bound:
        self.domain = domain
        return Bound(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x


# Folding

sizes = st.floats(min_value=0, max_value=1e200)


@LAWS
@given(st.tuples(sizes, sizes), st.tuples(sizes, sizes))
def test_then_rounds_each_formula_up_and_no_further(first, second):
    (l1, e1), (l2, e2) = (tuple(map(Fraction, pair)) for pair in (first, second))
    bound = Bound(*first).then(Bound(*second))
    for value, exact in ((bound.lipschitz, l1 * l2), (bound.tolerance, l2 * e1 + e2)):
        if math.isinf(value):
            assert exact > Fraction(1.7e308)
        else:
            assert exact <= Fraction(value) <= exact * (1 + Fraction(1, 2**50)) + Fraction(1, 2**1020)
            assert value == 0 or exact > 0


@LAWS
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_a_chain_folds_to_the_product_and_the_weighted_sum(pairs):
    """L = Π Lᵢ and ε = Σ εᵢ Π_{j>i} Lⱼ: small integers are exact in float64."""
    chain = nn.Sequential(*(Assume(nn.Identity(), bound=factor, tolerance=error) for factor, error in pairs))
    total = math.prod(factor for factor, _ in pairs)
    error = sum(e * math.prod(factor for factor, _ in pairs[i + 1 :]) for i, (_, e) in enumerate(pairs))
    assert lipschitz_bound(chain) == Bound(total, error)


def test_a_zero_map_absorbs_every_tolerance_before_it():
    assert Bound(2.0, math.inf).then(Bound(0.0, 1.0)) == Bound(0.0, 1.0)
    assert Bound(math.inf).then(Bound(2.0, 0.0)) == Bound(math.inf, 0.0)


def test_chains_nest_and_may_be_empty():
    inner = nn.Sequential(Assume(nn.Identity(), 3.0, 1.0), nn.Sequential(), nn.ReLU())
    assert lipschitz_bound(nn.Sequential(inner, Assume(nn.Identity(), 2.0))) == Bound(6.0, 2.0)
    assert lipschitz_bound(nn.Sequential()) == Bound(1.0, 0.0)


def test_a_module_that_a_chain_uses_twice_counts_twice():
    double = Assume(nn.Identity(), bound=2.0, tolerance=1.0)
    assert lipschitz_bound(nn.Sequential(double, double)) == Bound(4.0, 3.0)
    assert lipschitz_bound(nn.Sequential(double, nn.ReLU(), nn.Sequential(double, double))) == Bound(8.0, 7.0)
    linear = nn.Linear(3, 3)
    linear.weight.data = 2 * torch.eye(3)
    assert lipschitz_bound(nn.Sequential(linear, linear)).lipschitz >= 4


# Assume


def test_assume_is_taken_at_its_word_and_computes_its_module():
    assumed = Assume(nn.GELU(), bound=1.2, tolerance=0.5)
    assert lipschitz_bound(assumed) == Bound(1.2, 0.5)
    x = torch.ones(1, 1)
    assert torch.equal(assumed(x), nn.GELU()(x))
    assert "bound=1.2" in repr(assumed)
    assert isinstance(assumed, Lipschitz)


@pytest.mark.parametrize("numbers", [(-1.0, 0.0), (math.nan, 0.0), (math.inf, 0.0), (1.0, -1.0), (1.0, math.nan)])
def test_assume_refuses_numbers_that_promise_nothing(numbers):
    with pytest.raises(ValueError, match="finite") as error:
        Assume(nn.Identity(), *numbers)
    assert str(numbers[0]) in str(error.value)
    assert str(numbers[1]) in str(error.value)


# Hooks: what a type declares says nothing of a module that something was attached to


def hundredfold(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return 100 * output


@pytest.mark.parametrize(
    "module",
    [
        lambda: nn.Sequential(nn.ReLU()),
        lambda: lipflow.cpl_dense(3, 4),
        lambda: lipflow.blocks.bjorck_dense(3, 3),
        lambda: Assume(nn.ReLU(), 1.0),
        lambda: lipflow.build("cpl-digits", in_shape=(1, 4, 4)),
        Probe,
    ],
)
def test_a_hooked_module_has_no_bound_until_the_hook_is_gone(module):
    hooked = module().eval()
    bound = lipschitz_bound(hooked)
    for register in (hooked.register_forward_hook, lambda hook: hooked.register_forward_pre_hook(hook, prepend=True)):
        handle = register(hundredfold)
        for chain in (hooked, nn.Sequential(nn.Identity(), hooked)):
            with pytest.raises(TypeError, match=rf"^(nn\.)?{type(hooked).__name__}.* has forward hooks"):
                lipschitz_bound(chain)
        handle.remove()
        assert lipschitz_bound(hooked) == bound


def test_the_stages_of_a_network_have_no_hooks_either():
    """Compiled, they run as a module."""
    network = lipflow.build("cpl-digits", in_shape=(1, 4, 4))
    network.stages.register_forward_hook(hundredfold)
    with pytest.raises(TypeError, match="stages"):
        lipschitz_bound(network)


def test_a_parametrized_weight_is_no_hook():
    layer = lipflow.cpl_dense(4, 3).eval()
    before = lipschitz_bound(layer)
    nn.utils.parametrize.register_parametrization(layer.field.weight, "weight", nn.Identity())
    assert lipschitz_bound(layer) == before


# Reach: where the inputs of a layer are, which prices what an iteration leaves unsolved


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ([nn.Linear(4, 6)], (4,)),
        ([nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)], (4,)),
        ([nn.Flatten(), nn.Linear(12, 6)], (3, 4)),
        ([nn.Conv2d(2, 3, 3, padding=1), nn.AvgPool2d(2), nn.Flatten()], (2, 6, 4)),
        ([nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(3, 1)), nn.Sequential(nn.Conv2d(3, 1, 2))], (2, 7, 8)),
    ],
    ids=str,
)
@pytest.mark.parametrize("reach", [0.0, 0.3, 10.0])
def test_no_input_is_ever_carried_beyond_the_reach(layers, shape, reach):
    torch.manual_seed(0)
    layers = copy.deepcopy(layers)
    for layer in itertools.chain.from_iterable(layer.modules() for layer in layers):
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.bias.data = torch.randn_like(layer.bias)
    probe = Probe()
    chain = nn.Sequential(*layers, probe)
    lipschitz_bound(chain, shape, reach)
    x = torch.randn(200, *shape, dtype=torch.float64)
    x = reach * x / x.flatten(1).norm(dim=1).reshape(-1, *[1] * len(shape))
    with torch.no_grad():
        image = chain.double()(x)
    assert probe.domain.shape == tuple(image.shape[1:])
    assert float(image.flatten(1).norm(dim=1).max()) <= probe.domain.reach < math.inf


def test_a_linear_layer_on_many_vectors_at_once_is_refused():
    """Its bias would count once for each of them, and the reach with it."""
    with pytest.raises(ValueError, match=r"Sequential\.0: nn\.Linear .*9, 4.*flatten"):
        lipschitz_bound(nn.Sequential(nn.Linear(4, 6)), (9, 4), reach=1.0)


def test_reach_grows_by_the_constant_the_origin_and_the_tolerance():
    class Shift(Lipschitz):
        def bound(self, domain: Domain) -> Bound:
            return Bound(3.0, 0.25)

        def origin(self, domain: Domain) -> float:
            return 5.0

        def forward(self, x: Tensor) -> Tensor:
            return x

    probe = Probe()
    lipschitz_bound(nn.Sequential(Shift(), Shift(), probe), reach=2.0)
    assert probe.domain == Domain(None, 3 * (3 * 2 + 5 + 0.25) + 5 + 0.25)
    lipschitz_bound(nn.Sequential(Shift(), probe))
    assert probe.domain.reach == math.inf
    # The origin is carried by the exact maps, so the tolerances are no part of it.
    assert fold_origin([("a", Shift()), ("b", Shift())], Domain()) == 3 * 5 + 5
    assert fold([("a", Shift()), ("b", Shift())], Domain()) == Bound(9.0, 1.0)


def test_a_norm_is_bounded_once_however_deep_its_layer_is_nested(monkeypatch):
    counted = []
    monkeypatch.setattr(bound, "norm_bound", lambda op: counted.append(op) or 1.0)
    module: nn.Module = nn.Linear(2, 2)
    for _ in range(6):
        module = nn.Sequential(module)
    lipschitz_bound(module, (2,), reach=1.0)
    assert len(counted) == 1


def test_nothing_is_known_of_where_an_assumed_module_sends_the_origin():
    probe = Probe()
    lipschitz_bound(nn.Sequential(Assume(nn.Identity(), 1.0), probe), reach=1.0)
    assert probe.domain.reach == math.inf


# Asking changes nothing


def test_modes_are_left_as_they_were():
    chain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Sequential(nn.AvgPool2d(2), Assume(nn.BatchNorm2d(2), 1.0)))
    chain.train()
    chain[2].eval()
    chain[0].eval()
    modes = [module.training for module in chain.modules()]
    before = copy.deepcopy(chain.state_dict())
    lipschitz_bound(chain, (1, 6, 6), reach=1.0)
    assert [module.training for module in chain.modules()] == modes
    after = chain.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_modes_are_left_as_they_were_by_a_refusal():
    chain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).train()
    with pytest.raises(TypeError):
        lipschitz_bound(chain, (1, 6, 6))
    assert all(module.training for module in chain.modules())


def test_a_bound_at_another_size_leaves_the_power_iteration_where_it_was():
    layer = lipflow.cpl_conv(2, 3)
    layer(torch.zeros(1, 2, 8, 8))
    before = copy.deepcopy(layer.state_dict())
    for module in (layer, nn.Sequential(layer, nn.ReLU())):
        lipschitz_bound(module, (2, 5, 5))
        after = layer.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("shape", [4, "8", (3, None, 3), (2.0,), (-1, 2)])
def test_what_is_no_shape_is_refused_and_quoted(shape):
    with pytest.raises(ValueError, match=r"in_shape is the shape of one input.*" + re.escape(f"not {shape!r}")):
        lipschitz_bound(nn.Linear(4, 4), shape)


@pytest.mark.parametrize("shape", [(5, 8, 8), (8, 8), (8,)])
def test_a_shape_that_a_convolution_cannot_take_is_refused_and_quoted(shape):
    with pytest.raises(ValueError, match=str(shape).replace("(", r"\(").replace(")", r"\)")):
        lipschitz_bound(nn.Conv2d(3, 4, 3), shape)


def test_a_hook_on_what_a_layer_is_made_of_is_refused():
    """The weight of a layer is a module too, and what a hook makes of it is what runs."""
    layer = lipflow.blocks.spectral_dense(6, 4).eval()
    lipschitz_bound(layer)
    layer.weight.register_forward_hook(lambda module, given, op: op.with_weight(3 * op.weight))
    with pytest.raises(TypeError, match="has forward hooks"):
        lipschitz_bound(layer)
    with pytest.raises(TypeError, match="has forward hooks"):
        lipschitz_bound(nn.Sequential(layer))
    inside = nn.Linear(2, 2)
    inside.register_forward_hook(lambda *_: None)
    assert lipschitz_bound(lipflow.Assume(inside, bound=1.0)).lipschitz == 1, "a word is taken for all that is inside"
    assumed = lipflow.Flow(lipflow.Potential(inside, 1.0, at_origin=0.0), lipflow.ExplicitEuler(1.0))
    assert lipschitz_bound(assumed).lipschitz == 1
    assumed.field.register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match="has forward hooks, or a forward of its own, in field"):
        lipschitz_bound(assumed)
