"""Nothing without a bound is certified: the radius is 0, or there is an error."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lipflow
from lipflow import blocks
from lipflow.certificate import from_logits
from tests.soundness.graphs import Of

ROOT = math.nextafter(math.sqrt(2), 2)


def _identity(classes: int = 3) -> lipflow.Frozen:
    """A network that returns its pixels as scores, with E = d·2⁻¹²⁶."""
    return lipflow.freeze(nn.Sequential(blocks.Truncate(classes)), in_shape=(classes,))


def _network() -> lipflow.Frozen:
    torch.manual_seed(0)
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


WRONG_SHAPES = [torch.zeros(shape) for shape in ((1, 4, 4), (2, 3, 4, 4), (2, 1, 5, 4), (2, 16))]
WRONG_DTYPES = [torch.zeros(2, 1, 4, 4, dtype=t) for t in (torch.int64, torch.int8, torch.bool, torch.complex128)]


@pytest.mark.parametrize("x", WRONG_SHAPES + WRONG_DTYPES, ids=lambda x: f"{tuple(x.shape)} {x.dtype}")
def test_wrong_shapes_and_dtypes_are_refused(x):
    with pytest.raises((ValueError, TypeError)):
        lipflow.certify(_network(), x)


@pytest.mark.parametrize("domain", [(-1.0, 0.5), (0.5, 1.0), (0.0, 0.999)])
def test_bytes_are_refused_unless_the_domain_contains_0_and_1(domain):
    frozen = lipflow.freeze(nn.Sequential(blocks.Truncate(3)), (3,), domain)
    with pytest.raises(ValueError, match="bytes k are read as k/255"):
        lipflow.certify(frozen, torch.zeros(1, 3, dtype=torch.uint8))


def test_domains_whose_numbers_overflow_are_refused():
    with pytest.raises(ValueError, match="finite low < high"):
        lipflow.freeze(nn.Sequential(blocks.Truncate(3)), (3,), (-1e300, 1e300))


WITHOUT_BOUND = {
    "gelu": (nn.GELU(), "F.gelu"),
    "layer norm": (nn.LayerNorm(4), "divides by the deviation"),
    "group norm": (nn.GroupNorm(1, 1), "divides by the deviation"),
    "batch norm without statistics": (nn.BatchNorm2d(1, track_running_stats=False), "deviation of its batch"),
    "softmax": (nn.Softmax(1), "scores, not probabilities"),
    "tanh": (nn.Tanh(), "use torch.relu"),
    "assumed": (lipflow.Assume(nn.Identity(), bound=1.0), "has a declared bound"),
    "sigma that rounds": (lipflow.cpl_conv(1, 2, sigma="tanh"), "σ = tanh rounds"),
    "a product": (Of(lambda x: x * x), "product of two values"),
    "a power": (Of(lambda x: x**2), "pow"),
    "a quotient": (Of(lambda x: 1 / (1 + x.abs())), "__rtruediv__|quotient"),
    "a norm": (Of(lambda x: x / x.norm()), "norm"),
    "a choice by value": (Of(lambda x: x if x.sum() > 0 else -x), "sum|looks at numbers"),
    "a mask": (Of(lambda x: torch.where(x > 0.5, x, 1 - x)), "depends on numbers|where"),
    "rounding": (Of(torch.round), "round"),
    "numpy": (Of(lambda x: torch.from_numpy(x.numpy())), "numpy"),
    "data": (Of(lambda x: x.data * 2), "outside of what lowering sees|data"),
    "a mean over the batch": (Of(lambda x: x - x.mean(0, keepdim=True)), "mean"),
    "another image of the batch": (Of(lambda x: x.flip(0)), "mixes the images"),
    "a batch folded into an image": (Of(lambda x: x.reshape(1, 2, 4, 4)), "mixes the images"),
    "noise": (Of(lambda x: x + torch.rand(4)), "computes something else"),
}


@pytest.mark.parametrize("name", WITHOUT_BOUND)
def test_modules_without_a_bound_are_refused(name):
    module, words = WITHOUT_BOUND[name]
    with pytest.raises(lipflow.LoweringError, match=words):
        lipflow.freeze(nn.Sequential(module, nn.Flatten()), in_shape=(1, 4, 4))


class _Linear(nn.Linear):
    def forward(self, input):
        return 100 * super().forward(input)


class _Sequential(nn.Sequential):
    def forward(self, input):
        return 100 * super().forward(input)


def _normalised(layer: nn.Module) -> nn.Module:
    nn.init.constant_(layer.running_var, 1e-4)
    nn.init.normal_(layer.running_mean)
    return nn.Sequential(nn.Linear(4, 4), layer)


def _with(change: Callable[[nn.Module], object]) -> nn.Module:
    layer = nn.Linear(4, 4)
    change(layer)
    return layer


def _times_100(module: nn.Module, *args: object) -> object:
    """A hook that multiplies its input or its output."""
    value = args[-1]
    return (100 * value[0],) if isinstance(value, tuple) else 100 * value


def _louder(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda x: 100 * forward(x)


STRETCHING = {
    "a forward of its own": lambda: Of(lambda x, f: 100 * f(x), nn.Linear(4, 4)),
    "a subclass of Linear": lambda: _Linear(4, 4),
    "a subclass of Sequential": lambda: _Sequential(nn.Linear(4, 4)),
    "a forward hook": lambda: _with(lambda layer: layer.register_forward_hook(_times_100)),
    "a hook before": lambda: _with(lambda layer: layer.register_forward_pre_hook(_times_100)),
    "another forward": lambda: _with(_louder),
    "batch normalisation": lambda: _normalised(nn.BatchNorm1d(4)),
    "dropout": lambda: Of(lambda x, f: 100 * f(x), nn.Dropout(0.5)),
    "parametrised": lambda: nn.utils.parametrizations.weight_norm(_Linear(4, 4)),
}


@pytest.mark.parametrize("name", STRETCHING)
def test_the_bound_is_of_what_a_network_computes(name):
    """Not of its parts: subclasses, hooks and parametrisations count."""
    module = STRETCHING[name]().eval()
    frozen, x = lipflow.freeze(module, in_shape=(4,)), torch.rand(10, 4)
    torch.testing.assert_close(frozen(x).float(), module(x), rtol=1e-4, atol=1e-3)
    scores = frozen(x)
    apart = (x - x[:1]).double().norm(dim=1)[1:]
    stretch = float(((scores - scores[:1]).norm(dim=1)[1:] / apart).max())
    assert 10 < stretch <= frozen.lipschitz * (1 + 1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinite_weights_and_constants_are_refused(bad):
    weight, bias = nn.Linear(3, 3), nn.Linear(3, 3)
    nn.init.constant_(weight.weight, bad)
    nn.init.constant_(bias.bias, bad)
    functions = (lambda x: x + bad, lambda x: x * bad, lambda x: torch.cat([x, torch.full((len(x), 1), bad)], 1))
    for module in (weight, bias, *map(Of, functions)):
        with pytest.raises(ValueError, match=r"NaN or infinite|not finite"):
            lipflow.freeze(module, in_shape=(3,))


def test_constants_cannot_be_set():
    for name in ("rounding", "lipschitz", "pair_bounds", "graph", "domain", "in_shape", "classes", "new"):
        with pytest.raises(AttributeError):
            setattr(_network(), name, 0)


@pytest.mark.parametrize("change", ["float", "half", "bfloat16", "train", "double"])
def test_frozen_networks_compute_in_float64(change):
    frozen, x = _network(), torch.rand(2, 1, 4, 4)
    assert frozen(x).dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = frozen(x)
    for scores in (getattr(frozen.module(), change)()(x), frozen(x.double()), inside):
        assert torch.equal(scores, frozen(x))
