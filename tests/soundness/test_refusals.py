"""Nothing without a bound is certified: the radius is 0, or there is an error."""

import math

import pytest
import torch
from torch import nn

import lipflow
from lipflow import blocks
from lipflow.certificate import from_logits
from lipflow.primitives import Primitive
from tests.soundness.graphs import chain

ROOT = math.nextafter(math.sqrt(2), 2)


def _identity(classes: int = 3) -> lipflow.Frozen:
    """A network that returns its pixels as scores, with E = d·2⁻¹²⁶."""
    return lipflow.freeze(nn.Sequential(blocks.Truncate(classes)), in_shape=(classes,))


def _network() -> lipflow.Frozen:
    layers = (blocks.Normalize(0.5, 0.5), lipflow.cpl_conv(1, 3), nn.Flatten(), blocks.LastLayerNormalization(16, 4))
    return lipflow.freeze(nn.Sequential(*layers), in_shape=(1, 4, 4))


def _uncertified(certificates: lipflow.Certificates) -> bool:
    return bool((certificates.radius == 0).all()) and not bool(certificates.certified(0).any())


@pytest.mark.parametrize("scores", [[0.5, 0.5, 0.1], [0.1, 0.7, 0.7], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
def test_a_tie_is_not_certified(scores):
    assert _uncertified(lipflow.certify(_identity(), torch.tensor([scores], dtype=torch.float64)))
    layer = nn.Linear(2, 2, bias=False)  # two classes with the same weights always tie
    nn.init.ones_(layer.weight)
    assert _uncertified(lipflow.certify(lipflow.freeze(nn.Sequential(layer), in_shape=(2,)), torch.rand(5, 2)))


def test_the_radius_of_the_smallest_margins_is_a_lower_bound():
    frozen = _identity(2)
    x = torch.tensor([[0.5, math.nextafter(0.5, 0)], [5e-324, 0.0]], dtype=torch.float64)
    certificates = lipflow.certify(frozen, x)
    assert bool((certificates.radius <= (x[:, 0] - x[:, 1]) / ROOT).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_nan_and_infinite_scores_are_not_certified(bad, place):
    logits = torch.tensor([[3.0, 1.0, 0.0]] * 3, dtype=torch.float64)
    logits[0, place] = bad
    logits[1] = bad
    certificates = from_logits(logits, ROOT * (1 - torch.eye(3, dtype=torch.float64)), 0.0)
    assert certificates.radius[:2].tolist() == [0, 0]
    assert certificates.certified(0).tolist() == [False, False, True]
    assert float(certificates.radius[2]) > 1
    assert not bool(certificates.paper_radius.isnan().any() | certificates.paper_radius.isinf().any())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3 + 2**-51, -1 - 2**-52, 255.0])
@pytest.mark.parametrize("domain", [(0.0, 1.0), (-1.0, 3.0)])
def test_pixels_outside_of_the_domain_are_refused(domain, bad):
    """For [0, 1] also the nearest floats outside."""
    network = lipflow.freeze(nn.Sequential(nn.Flatten(), blocks.Truncate(3)), (1, 4, 4), domain)
    x = torch.full((2, 1, 4, 4), 0.5, dtype=torch.float64)
    x[0, 0, 0, :2] = torch.tensor(domain)
    lipflow.certify(network, x)
    for value in (bad, *((math.nextafter(1.0, 2), -5e-324) if domain == (0.0, 1.0) else ())):
        x[1, 0, 3, 3] = value
        with pytest.raises(ValueError, match=r"pixels in \[0, 1\]|pixels in \[-1, 3\]"):
            lipflow.certify(network, x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex128])
def test_certify_refuses_images_of_another_dtype(dtype):
    with pytest.raises(TypeError, match=f"images are uint8, or floats in .*, not {dtype}"):
        lipflow.certify(_network(), torch.zeros(2, 1, 4, 4, dtype=dtype))


@pytest.mark.parametrize("domain", [(-1.0, 0.5), (0.5, 1.0), (0.0, 0.999)])
def test_bytes_are_refused_unless_the_domain_contains_0_and_1(domain):
    frozen = lipflow.freeze(nn.Sequential(blocks.Truncate(3)), (3,), domain)
    with pytest.raises(ValueError, match="a byte k is read as k/255"):
        lipflow.certify(frozen, torch.zeros(1, 3, dtype=torch.uint8))


@pytest.mark.parametrize("change", ["float", "half", "bfloat16", "train", "double"])
def test_frozen_networks_compute_in_float64(change):
    frozen, x = _network(), torch.rand(2, 1, 4, 4)
    assert frozen(x).dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = frozen(x)
    for scores in (getattr(frozen.module(), change)()(x), frozen(x.double()), inside):
        assert torch.equal(scores, frozen(x))


class _Identity(Primitive):
    kind = "identity"

    def run(self, *xs):
        return xs[0]

    def out_shape(self, *shapes):
        return shapes[0]

    def lipschitz(self, norm, *distances):
        return distances[0]


def test_a_primitive_without_a_bound_on_its_rounding_error_is_refused():
    with pytest.raises(ValueError, match="identity has no bound on its rounding error"):
        chain((2,), _Identity())
