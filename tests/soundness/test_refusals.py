"""Refusals: where nothing is known there is no number. Not certified, or a clear error; never a radius."""

import math

import pytest
import torch
from torch import nn

import lipflow
from lipflow import blocks
from lipflow.certificate import from_logits

ROOT = math.nextafter(math.sqrt(2), 2)


def _identity(classes: int = 3) -> lipflow.Frozen:
    """A network that returns its pixels: scores are whatever we want them to be, and E = d·2⁻¹²⁶."""
    return lipflow.freeze(nn.Sequential(blocks.Truncate(classes)), in_shape=(classes,))


def _network() -> lipflow.Frozen:
    torch.manual_seed(0)
    layers = (blocks.Center(0.5, 0.5), lipflow.cpl_conv(1, 3), nn.Flatten(), blocks.LastLayerNormalization(16, 4))
    return lipflow.freeze(nn.Sequential(*layers), in_shape=(1, 4, 4))


def _uncertified(certificates: lipflow.Certificates) -> bool:
    return bool((certificates.radius == 0).all()) and not bool(certificates.certified(0).any())


# Ties


@pytest.mark.parametrize("scores", [[0.5, 0.5, 0.1], [0.1, 0.7, 0.7], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
def test_a_tie_is_not_certified(scores):
    assert _uncertified(lipflow.certify(_identity(), torch.tensor([scores], dtype=torch.float64)))


def test_a_tie_of_equal_rows_is_not_certified():
    """Two classes with the same weights never change places, and never tell which of them it is either."""
    layer = nn.Linear(2, 2, bias=False)
    nn.init.ones_(layer.weight)
    frozen = lipflow.freeze(nn.Sequential(layer), in_shape=(2,))
    certificates = lipflow.certify(frozen, torch.rand(5, 2))
    assert _uncertified(certificates)


def test_the_least_margin_is_worth_no_more_than_it_is():
    frozen = _identity(2)
    x = torch.tensor([[0.5, math.nextafter(0.5, 0)], [5e-324, 0.0]], dtype=torch.float64)
    certificates = lipflow.certify(frozen, x)
    assert bool((certificates.radius <= (x[:, 0] - x[:, 1]) / ROOT).all())


# Scores that are no numbers


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_scores_that_are_no_numbers(bad, place):
    logits = torch.tensor([[3.0, 1.0, 0.0]], dtype=torch.float64)
    logits[0, place] = bad
    certificates = from_logits(logits, ROOT * (1 - torch.eye(3, dtype=torch.float64)), 0.0)
    assert _uncertified(certificates)
    assert not bool(certificates.paper_radius.isnan().any() | certificates.paper_radius.isinf().any())


def test_one_bad_row_spoils_no_other():
    logits = torch.tensor([[3.0, 1.0], [math.nan, 1.0], [math.inf, math.inf]], dtype=torch.float64)
    certificates = from_logits(logits, ROOT * (1 - torch.eye(2, dtype=torch.float64)), 0.0)
    assert certificates.radius.tolist()[1:] == [0.0, 0.0]
    assert float(certificates.radius[0]) > 1


# Images that no certificate speaks of


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, math.nextafter(1.0, 2), -5e-324, 255.0])
def test_pixels_outside_of_the_box(bad):
    x = torch.full((2, 1, 4, 4), 0.5, dtype=torch.float64)
    x[1, 0, 3, 3] = bad
    with pytest.raises(ValueError, match=r"pixels in \[0, 1\]"):
        lipflow.certify(_network(), x)
    with pytest.raises(ValueError, match=r"pixels in \[0, 1\]"):
        _network().predict(x)


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(1, 4, 4),
        torch.zeros(2, 3, 4, 4),
        torch.zeros(2, 1, 5, 4),
        torch.zeros(2, 16),
        torch.zeros(2, 1, 4, 4, dtype=torch.int64),
        torch.zeros(2, 1, 4, 4, dtype=torch.int8),
        torch.zeros(2, 1, 4, 4, dtype=torch.bool),
        torch.zeros(2, 1, 4, 4, dtype=torch.complex128),
    ],
    ids=lambda x: f"{tuple(x.shape)} {x.dtype}",
)
def test_wrong_shapes_and_dtypes(x):
    with pytest.raises((ValueError, TypeError)):
        lipflow.certify(_network(), x)


@pytest.mark.parametrize("eps", [-1, -1e-300, math.nan, math.inf, "much"])
def test_radii_that_are_none(eps):
    certificates = lipflow.certify(_network(), torch.zeros(1, 1, 4, 4))
    with pytest.raises(ValueError, match="a radius is"):
        certificates.certified(eps)


# Networks that promise nothing


class _Mine(nn.Module):
    def forward(self, x):
        return 100 * x


@pytest.mark.parametrize(
    "module",
    [
        nn.BatchNorm2d(1),
        nn.Dropout(0.5),
        nn.GELU(),
        nn.LayerNorm(4),
        nn.Softmax(1),
        _Mine(),
        lipflow.Assume(nn.Identity(), bound=1.0),
        lipflow.cpl_conv(1, 2, sigma="tanh"),
    ],
    ids=lambda m: type(m).__name__,
)
def test_modules_without_a_bound(module):
    with pytest.raises(TypeError, match=r"declares no|freeze cannot|no bound here covers"):
        lipflow.freeze(nn.Sequential(module, nn.Flatten()), in_shape=(1, 4, 4))


class _Linear(nn.Linear):
    def forward(self, input):
        return 100 * super().forward(input)


class _Sequential(nn.Sequential):
    def forward(self, input):
        return 100 * super().forward(input)


@pytest.mark.parametrize("module", [_Linear(4, 4), _Sequential(nn.Linear(4, 4))], ids=["Linear", "Sequential"])
def test_a_subclass_may_compute_anything(module):
    with pytest.raises(TypeError, match="declares no"):
        lipflow.freeze(nn.Sequential(module), in_shape=(4,))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_weights_that_are_no_numbers(bad, name):
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        getattr(layer, name).flatten()[0].fill_(bad)
    with pytest.raises(ValueError, match="NaN or infinite"):
        lipflow.freeze(nn.Sequential(layer), in_shape=(3,))


def test_live_networks_are_not_certified():
    with pytest.raises(TypeError, match=r"lipflow.freeze\(model\)"):
        lipflow.certify(lipflow.build("cpl-digits"), torch.zeros(1, 1, 8, 8))


# Networks that were changed after their norms were bounded

TENSORS = {
    "weight": lambda f: f.primitives[1].map.weight,
    "bias": lambda f: f.primitives[1].bias,
    "scale": lambda f: f.primitives[0].scale,
    "head": lambda f: f.primitives[-1].map.weight,
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_changed_in_place(name):
    frozen = _network()
    lipflow.certify(frozen, torch.zeros(1, 1, 4, 4))
    TENSORS[name](frozen).mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        lipflow.certify(frozen, torch.zeros(1, 1, 4, 4))


@pytest.mark.parametrize("name", ["rounding", "lipschitz", "pair_bounds", "primitives", "in_shape", "classes"])
def test_constants_cannot_be_set(name):
    frozen = _network()
    with pytest.raises(AttributeError, match="immutable"):
        setattr(frozen, name, 0)


@pytest.mark.parametrize(
    "move",
    [
        lambda f: f.float(),
        lambda f: f.half(),
        lambda f: f.bfloat16(),
        lambda f: f.to(torch.float32),
        lambda f: f.to("meta"),
    ],
    ids=["float", "half", "bfloat16", "to float32", "to meta"],
)
def test_other_arithmetic_is_refused(move):
    frozen = _network()
    with pytest.raises(TypeError, match="float64 on the CPU"):
        move(frozen)
    assert frozen(torch.zeros(1, 1, 4, 4)).dtype == torch.float64


def test_float32_images_are_served_in_float64():
    x = torch.rand(3, 1, 4, 4)
    assert torch.equal(_network()(x), _network()(x.double()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = _network()(x)
    assert torch.equal(inside, _network()(x))
