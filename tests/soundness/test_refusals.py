"""Refusals: where nothing is known there is no number. Not certified, or a clear error; never a radius."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lipflow
from lipflow import blocks
from lipflow.certificate import from_logits
from tests.soundness.graphs import Of

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


@pytest.mark.parametrize("bad", [-1.5, 2.5, math.nan, math.inf])
def test_pixels_outside_of_another_domain(bad):
    frozen = lipflow.freeze(nn.Sequential(blocks.Truncate(3)), (3,), (-1.0, 2.0))
    lipflow.certify(frozen, torch.tensor([[-1.0, 2.0, 0.5]]))
    with pytest.raises(ValueError, match=r"pixels in \[-1, 2\]"):
        lipflow.certify(frozen, torch.tensor([[bad, 0.0, 0.5]]))


@pytest.mark.parametrize("domain", [(-1.0, 0.5), (0.5, 1.0), (0.0, 0.999)])
def test_bytes_are_in_the_domain_or_refused(domain):
    """A byte is k/255, and may be 0 or 1."""
    frozen = lipflow.freeze(nn.Sequential(blocks.Truncate(3)), (3,), domain)
    with pytest.raises(ValueError, match="bytes k are read as k/255"):
        lipflow.certify(frozen, torch.zeros(1, 3, dtype=torch.uint8))


@pytest.mark.parametrize("domain", [(1.0, 0.0), (0.0, 0.0), (0.0, math.inf), (math.nan, 1.0), (-1e300, 1e300)])
def test_domains_that_are_none(domain):
    with pytest.raises(ValueError, match="finite low < high"):
        lipflow.freeze(nn.Sequential(blocks.Truncate(3)), (3,), domain)


# Networks that promise nothing


def _of(function: Callable[..., Tensor]) -> nn.Module:
    return Of(function)


WITHOUT_BOUND = {
    "gelu": (nn.GELU(), "F.gelu"),
    "layer norm": (nn.LayerNorm(4), "divides by the deviation"),
    "group norm": (nn.GroupNorm(1, 1), "divides by the deviation"),
    "batch norm without statistics": (nn.BatchNorm2d(1, track_running_stats=False), "deviation of its batch"),
    "softmax": (nn.Softmax(1), "scores, not probabilities"),
    "tanh": (nn.Tanh(), "use torch.relu"),
    "assumed": (lipflow.Assume(nn.Identity(), bound=1.0), "has a declared bound"),
    "sigma that rounds": (lipflow.cpl_conv(1, 2, sigma="tanh"), "σ = tanh rounds"),
    "a product": (_of(lambda x: x * x), "product of two values"),
    "a power": (_of(lambda x: x**2), "pow"),
    "a quotient": (_of(lambda x: 1 / (1 + x.abs())), "__rtruediv__|quotient"),
    "a norm": (_of(lambda x: x / x.norm()), "norm"),
    "a choice by value": (_of(lambda x: x if x.sum() > 0 else -x), "sum|looks at numbers"),
    "a mask": (_of(lambda x: torch.where(x > 0.5, x, 1 - x)), "looks at numbers|where"),
    "rounding": (_of(torch.round), "round"),
    "numpy": (_of(lambda x: torch.from_numpy(x.numpy())), "numpy"),
    "data": (_of(lambda x: x.data * 2), "outside of what lowering sees|data"),
    "a mean over the batch": (_of(lambda x: x - x.mean(0, keepdim=True)), "mean"),
    "another image of the batch": (_of(lambda x: x.flip(0)), "mixes the images"),
    "a batch folded into an image": (_of(lambda x: x.reshape(1, 2, 4, 4)), "mixes the images"),
    "noise": (_of(lambda x: x + torch.rand(4)), "computes something else"),
}


@pytest.mark.parametrize("name", WITHOUT_BOUND)
def test_modules_without_a_bound(name):
    module, words = WITHOUT_BOUND[name]
    with pytest.raises(lipflow.LoweringError, match=words):
        lipflow.freeze(nn.Sequential(module, nn.Flatten()), in_shape=(1, 4, 4))


# Networks that compute more than their parts say: what is lowered is what they compute


class _Linear(nn.Linear):
    def forward(self, input):
        return 100 * super().forward(input)


class _Sequential(nn.Sequential):
    def forward(self, input):
        return 100 * super().forward(input)


def _hooked(register: str, hook: Callable) -> nn.Module:
    layer = nn.Linear(4, 4)
    getattr(layer, register)(hook)
    return layer


def _patched() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: 100 * nn.functional.linear(x, layer.weight, layer.bias)
    return layer


def _normalised(layer: nn.Module) -> nn.Module:
    nn.init.constant_(layer.running_var, 1e-4)
    nn.init.normal_(layer.running_mean)
    return nn.Sequential(nn.Linear(4, 4), layer)


STRETCHING = {
    "a forward of its own": lambda: Of(lambda x, f: 100 * f(x), nn.Linear(4, 4)),
    "a subclass of Linear": lambda: _Linear(4, 4),
    "a subclass of Sequential": lambda: _Sequential(nn.Linear(4, 4)),
    "a forward hook": lambda: _hooked("register_forward_hook", lambda module, args, output: 100 * output),
    "a hook before": lambda: _hooked("register_forward_pre_hook", lambda module, args: (100 * args[0],)),
    "another forward": _patched,
    "batch normalisation": lambda: _normalised(nn.BatchNorm1d(4)),
    "dropout": lambda: Of(lambda x, f: 100 * f(x), nn.Dropout(0.5)),
    "parametrised": lambda: nn.utils.parametrizations.weight_norm(_Linear(4, 4)),
}


@pytest.mark.parametrize("name", STRETCHING)
def test_what_a_network_really_computes_is_bounded(name):
    torch.manual_seed(0)
    module = STRETCHING[name]().eval()
    frozen, x = lipflow.freeze(module, in_shape=(4,)), torch.rand(10, 4)
    torch.testing.assert_close(frozen(x).float(), module(x), rtol=1e-4, atol=1e-3)
    scores = frozen(x)
    apart = (x - x[:1]).double().norm(dim=1)[1:]
    stretch = float(((scores - scores[:1]).norm(dim=1)[1:] / apart).max())
    assert 10 < stretch <= frozen.lipschitz * (1 + 1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_weights_that_are_no_numbers(bad, name):
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        getattr(layer, name).flatten()[0].fill_(bad)
    with pytest.raises(ValueError, match=r"NaN or infinite|not finite"):
        lipflow.freeze(nn.Sequential(layer), in_shape=(3,))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_constants_that_are_no_numbers(bad):
    for function in (lambda x: x + bad, lambda x: x * bad, lambda x: torch.cat([x, torch.full((len(x), 1), bad)], 1)):
        with pytest.raises(ValueError, match="NaN or infinite"):
            lipflow.freeze(Of(function), in_shape=(3,))


def test_live_networks_are_not_certified():
    with pytest.raises(TypeError, match=r"lipflow.freeze\(model\)"):
        lipflow.certify(lipflow.build("cpl-digits"), torch.zeros(1, 1, 8, 8))
    with pytest.raises(TypeError, match=r"lipflow.freeze\(model\)"):
        lipflow.certify(_network().module(), torch.zeros(1, 1, 4, 4))


@pytest.mark.parametrize(
    "name", ["rounding", "lipschitz", "pair_bounds", "graph", "domain", "in_shape", "classes", "new"]
)
def test_constants_cannot_be_set(name):
    frozen = _network()
    with pytest.raises(AttributeError):
        setattr(frozen, name, 0)


@pytest.mark.parametrize("change", ["float", "half", "bfloat16", "train", "double"])
def test_a_module_of_it_computes_in_float64_whatever_it_is_told(change):
    frozen, x = _network(), torch.rand(2, 1, 4, 4)
    assert torch.equal(getattr(frozen.module(), change)()(x), frozen(x))
    assert frozen(x).dtype == torch.float64


def test_float32_images_are_served_in_float64():
    x = torch.rand(3, 1, 4, 4)
    assert torch.equal(_network()(x), _network()(x.double()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = _network()(x)
    assert torch.equal(inside, _network()(x))
