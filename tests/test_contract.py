"""Every layer obeys every law of the contract, and bounds do not become looser."""

import copy
import os
import shutil

import pytest
import torch
from torch import Tensor, nn

import lipflow
from lipflow import Assume, DenseOperator, testing
from lipflow.primitives import NONLINEARITIES, Descent
from tests import contract


@pytest.mark.parametrize("name", contract.LAYERS)
@pytest.mark.parametrize("law", contract.LAWS, ids=lambda law: law.__name__)
def test_law(law, name):
    law(name)


@pytest.mark.parametrize("name", [name for name, layer in contract.LAYERS.items() if layer.lipschitz is not None])
def test_bound_is_at_most_the_promised_constant(name):
    layer = contract.LAYERS[name]
    for trained in (False, True):
        testing.bound_is_at_most(contract.make(name, trained=trained), layer.shape, layer.lipschitz)


# One layer of every family; each takes seconds to compile.
COMPILED = ["cpl dense", "cpl conv", "cpl network", "proximal, 5 iterations", "midpoint, convex", "cayley dense"]
COMPILED += ["cayley conv", "cayley conv, larger than its input", "soc dense", "soc conv", "explicit, skew", "split"]
COMPILED += ["bcop, many to few, 1×1", "spectral normalization, conv", "groupsort", "householder", "average pooling"]
COMPILED += ["last-layer normalization"]


def compiled_by_inductor_computes_the_same(name: str, training: bool, **options: bool) -> None:
    """Rewrites of inductor have been wrong: torch 2.13 drops the alpha of torch.add(x, A @ y, alpha=h)."""
    torch._dynamo.reset()
    layer, x = contract.make(name), contract.inputs(name, 3)
    layer(x)  # it makes the vector of its power iteration, which a compiled layer would do slowly
    twin = copy.deepcopy(layer.train(training))
    twin.compile(options=options)
    torch.testing.assert_close(derivatives(twin, x), derivatives(layer, x))


def derivatives(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """The output y, and the gradients of Σy³ with respect to x and the parameters."""
    x = x.clone().requires_grad_()
    y = layer(x)
    inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]
    return [y, *torch.autograd.grad((y**3).sum(), inputs, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_layer_computes_the_same(name):
    """With all rewrites of inductor, but no new machine code: operations run by torch's own functions."""
    compiled_by_inductor_computes_the_same(name, True, fallback_by_default=True)


def test_a_compiled_primitive_computes_the_same():
    torch._dynamo.reset()
    step, x = Descent(DenseOperator(torch.randn(4, 6)), None, NONLINEARITIES["relu"], h=0.1), torch.randn(3, 6)
    torch.testing.assert_close(torch.compile(step.run, options={"fallback_by_default": True})(x), step.run(x))


@pytest.mark.campaign
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", contract.LAYERS)
def test_a_layer_compiled_to_machine_code_computes_the_same(name, training):
    compiled_by_inductor_computes_the_same(name, training)


@pytest.mark.parametrize("law", [testing.jacobian_within_bound, testing.pairs_never_stretched])
def test_a_bound_that_is_too_low_breaks_a_law(law):
    layer = nn.Linear(6, 6).double()
    norm = float(torch.linalg.matrix_norm(layer.weight.detach(), 2))
    law(Assume(layer, norm * (1 + 1e-9)), (6,))
    with pytest.raises(AssertionError):
        law(Assume(layer, 0.9 * norm), (6,))


class Detached(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


class OnlyFloat64(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - torch.ones(6, dtype=torch.float64)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.Linear(6, 60), "L = .* as derived, above 1; does the layer need a `lower`"),
        (Detached(), "with respect to its input"),
        (OnlyFloat64(), "gives torch.float64 for float32 inputs"),
    ],
)
def test_check_layer_says_which_law_is_broken(layer, words):
    with pytest.raises(AssertionError, match=words):
        testing.check_layer(layer, (6,), lipschitz=1.0)


# L, the greatest bound of a pair with the first class, and E of trained layers, as once computed.
KNOWN = {
    "cpl dense": (1, 1.414213563, 2.32e-14),
    "cpl dense, relaxed": (1.534870233, 2.1706343, 2.79e-14),
    "cpl conv, strided": (1, 1.414213563, 5.38e-13),
    "proximal dense": (1, 1.414213563, 5.57e-12),
    "midpoint, convex conv": (1, 1.414213563, 2.95e-06),
    "cayley conv": (1, 1.414213563, 2.34e-13),
    "implicit, skew conv": (0.436845976, 0.617793504, 8.12e-14),
    "soc conv, grouped": (1.313023934, 1.856896255, 4.09e-12),
    "bcop, few to many, even": (1, 1.414213563, 6.45e-14),
    "spectral normalization, strided": (1.001479637, 1.416306085, 3.44e-14),
    "split, implicit": (1.0000019, 1.41421625, 6.66e-11),
    "mirrored": (1, 1.414213563, 9.08e-14),
    "householder": (1, 1.414213563, 1.60e-14),
    "torch max pooling, overlapping": (3.000000001, 4.242640689, 1.76e-36),
    "mirrored network": (1.196567501, 1.692201988, 8.55e-13),
    "soc network": (3.988831322, 5.641059355, 4.98e-13),
}


@pytest.mark.parametrize("name", KNOWN)
def test_bounds_are_no_looser_than_known(name):
    lipschitz, pair, rounding = KNOWN[name]
    layer = contract.make(name, trained=True)
    frozen = lipflow.freeze(nn.Sequential(layer, nn.Flatten()), contract.LAYERS[name].shape)
    assert frozen.lipschitz <= lipschitz * (1 + 1e-8)
    assert float(frozen.pair_bounds[0, :6].max()) <= pair * (1 + 1e-8)
    assert frozen.rounding <= 1.1 * rounding
