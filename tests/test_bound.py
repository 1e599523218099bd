"""`lipschitz_bound`: the pair (L, ε) of torch's modules, of chains, and of declared bounds."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lipflow
from lipflow import Assume, Bound, LoweringError, lipschitz_bound
from lipflow.primitives.rearrange import overlap
from tests.soundness.graphs import Calls

# torch's own modules


POOLS = [nn.MaxPool2d(2), nn.MaxPool2d((2, 4), padding=1)]
MOVES = [nn.Flatten(), nn.PixelUnshuffle(2), nn.ZeroPad2d(2)]


@pytest.mark.parametrize("module", [nn.ReLU(), nn.Hardtanh(), nn.Dropout(), *POOLS, *MOVES], ids=repr)
def test_bound_of_these_modules_is_exactly_1(module):
    assert lipschitz_bound(module, (4, 4, 4)) == Bound(1.0, 0.0)


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("dilation", [1, 2, 3, 6])
def test_overlap_counts_the_windows_that_read_one_position(kernel, stride, dilation):
    reads = [i * stride + j * dilation for i in range(60) for j in range(kernel)]
    most = max(map(reads.count, set(reads)))
    assert overlap((kernel, kernel), (stride, stride), (dilation, dilation)) == most**2
    assert overlap((kernel, 1), (stride, 1), (dilation, 1)) == most


@pytest.mark.parametrize(
    ("options", "constant"),
    [
        (dict(kernel_size=3, stride=1, padding=1), 3.0),
        (dict(kernel_size=3, stride=2), 2.0),
        (dict(kernel_size=2, stride=(1, 2)), math.sqrt(2)),
        (dict(kernel_size=3, stride=2, dilation=2), 3.0),
        (dict(kernel_size=(2, 3), stride=3, dilation=2), 1.0),
    ],
    ids=str,
)
def test_max_pooling_stretches_by_the_root_of_its_overlap(options, constant):
    module = nn.MaxPool2d(**options)
    bound = lipschitz_bound(module, (1, 12, 12)).lipschitz
    assert constant <= bound <= constant * (1 + 1e-9)
    # One bright pixel is the maximum of every window that reads it: some position reaches the bound.
    pixels = torch.eye(144, dtype=torch.float64).reshape(144, 1, 12, 12)
    dark = module(torch.zeros(1, 1, 12, 12, dtype=torch.float64))
    assert float((module(pixels) - dark).flatten(1).norm(dim=1).max()) == pytest.approx(constant, rel=1e-15)


def test_a_parametrized_weight_is_bounded_as_it_is_computed():
    layer = lipflow.cpl_dense(4, 3).eval()
    before = lipschitz_bound(layer, (4,))
    nn.utils.parametrize.register_parametrization(layer.field.weight, "weight", nn.Identity())
    assert lipschitz_bound(layer, (4,)) == before
    linear = nn.Linear(5, 4)
    nn.utils.parametrizations.spectral_norm(linear, n_power_iterations=50)
    bound = lipschitz_bound(linear, (5,)).lipschitz
    assert bound == pytest.approx(1, abs=1e-3)
    assert bound >= float(torch.linalg.matrix_norm(linear.weight.detach().double(), 2)) * (1 - 1e-6)


# Chains


def declared(lipschitz: float, tolerance: float = 0.0) -> Assume:
    return Assume(nn.Identity(), lipschitz, tolerance)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_a_chain_folds_to_the_product_and_the_weighted_sum(pairs):
    """L = Π Lᵢ and ε = Σ εᵢ Π_{j>i} Lⱼ: small integers are exact in float64."""
    total = math.prod(factor for factor, _ in pairs)
    error = sum(e * math.prod(factor for factor, _ in pairs[i + 1 :]) for i, (_, e) in enumerate(pairs))
    assert lipschitz_bound(nn.Sequential(*(declared(*pair) for pair in pairs)), (3,)) == Bound(total, error)


TWICE = declared(2, 1)
LOUD = nn.Sequential(nn.Linear(2, 2))
LOUD.register_forward_hook(lambda module, inputs, output: 100 * output)
FOLDED = {
    "a module three times": (nn.Sequential(TWICE, nn.ReLU(), nn.Sequential(TWICE, TWICE)), Bound(8, 7)),
    "branches": (Calls(lambda x, a, b: a(x) + 2 * b(x), declared(3, 0.5), declared(5, 0.25)), Bound(13, 1)),
    "a branch without tolerance": (Calls(lambda x, a, b: a(x) + 2 * b(x), declared(3, 0.5), nn.ReLU()), Bound(5, 0.5)),
    "beyond float64": (nn.Sequential(declared(1e200), declared(1e200)), Bound(math.inf, 0)),
    "declared": (Assume(LOUD, 1.0), Bound(1, 0)),
    "a declared potential": (lipflow.Flow(lipflow.Potential(LOUD, 1.0), lipflow.ExplicitEuler(1.0)), Bound(1, 0)),
}


@pytest.mark.parametrize("name", FOLDED)
def test_constants_and_tolerances_fold(name):
    module, expected = FOLDED[name]
    assert lipschitz_bound(module, (2,)) == expected


# Assume


def test_assume_computes_its_module_and_may_change_the_shape():
    x = torch.ones(1, 1)
    assert torch.equal(Assume(nn.GELU(), bound=1.2)(x), nn.GELU()(x))
    narrow = Assume(nn.Sequential(nn.Linear(4, 2), nn.GELU()), bound=3.0, tolerance=0.5)
    assert lipschitz_bound(nn.Sequential(narrow, nn.Flatten(), nn.ReLU()), (4,)) == Bound(3.0, 0.5)


@pytest.mark.parametrize("numbers", [(-1.0, 0.0), (math.nan, 0.0), (math.inf, 0.0), (1.0, -1.0), (1.0, math.nan)])
def test_assume_refuses_numbers_that_are_no_bound(numbers):
    with pytest.raises(ValueError, match=f"finite.*{numbers[0]}.*{numbers[1]}"):
        Assume(nn.Identity(), *numbers)


# Arguments


@pytest.mark.parametrize("of", [lipschitz_bound, lipflow.freeze])
def test_a_shape_is_needed_unless_a_module_has_one(of):
    with pytest.raises(ValueError, match="give the shape of one input"):
        of(nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 3)))
    network = lipflow.build("cpl-digits", in_shape=(1, 4, 4))
    assert of(network).lipschitz == of(network, (1, 4, 4)).lipschitz
    with pytest.raises(ValueError, match=r"\(1, 4, 4\), not \(1, 8, 8\)"):
        of(network, (1, 8, 8))
    with pytest.raises(LoweringError, match="5, 8, 8"):
        of(nn.Conv2d(3, 4, 3), (5, 8, 8))
    with pytest.raises(LoweringError, match=r"in 0\).*9, 4.*flatten"):
        of(nn.Sequential(nn.Linear(4, 6)), (9, 4))  # its bias would count once for each vector


@pytest.mark.parametrize("of", [lipschitz_bound, lipflow.freeze])
@pytest.mark.parametrize("shape", [4, "8", (3, None, 3), (2.0,), (-1, 2)], ids=str)
def test_a_wrong_shape_is_refused_and_quoted(of, shape):
    with pytest.raises(ValueError, match="in_shape.*" + re.escape(f"not {shape!r}")):
        of(nn.Linear(4, 4), shape)


@pytest.mark.parametrize("of", [lipschitz_bound, lipflow.freeze])
@pytest.mark.parametrize("domain", [(1.0, 0.0), (0.0, 0.0), (math.nan, 1.0), (0.0, math.inf), (-1e300, 1e300)])
def test_a_wrong_domain_is_refused_and_quoted(of, domain):
    with pytest.raises(ValueError, match=re.escape(f"low < high, within ±2⁹⁰⁰, not {domain!r}")):
        of(nn.Linear(4, 4), (4,), domain)
