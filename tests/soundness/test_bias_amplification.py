"""Bias amplification: huge biases that cancel between layers; and numbers that overflow or underflow.

The exact map has Lipschitz constant 1, but the program adds and subtracts B, and its rounding errors are of the size
B·2⁻⁵³. A rounding bound that ignores biases would be wrong by any factor.
"""

import sys
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor, nn

import lipflow
from lipflow import check, frozen
from lipflow.certificate import file as certificate_file
from lipflow.operators import DenseOperator, certified
from lipflow.operators.certified import certified_operator
from lipflow.primitives import (
    NONLINEARITIES,
    AvgPool,
    Constant,
    Descent,
    Gather,
    Proximal,
    Scale,
    Sum,
    TruncatedExponential,
    linear,
)
from lipflow.primitives.descent import MAX_STEPS, step_size
from lipflow.primitives.series import MAX_TERMS
from lipflow.rounding import sqrt_up, up
from tests.soundness import exact
from tests.soundness.graphs import chain, matrix, wired


def _identity(layer: nn.Module, sign: int, bias: float) -> nn.Module:
    """Set the matrix of a layer to ±1 and all of its biases to one value."""
    layer = layer.double()
    holder, inner = (layer.field.weight, layer.field) if isinstance(layer, lipflow.Flow) else (layer, layer)
    eye = torch.eye(len(holder.weight), dtype=torch.float64).reshape(holder.weight.shape)
    holder.weight = nn.Parameter(sign * eye)
    inner.bias = nn.Parameter(torch.full((len(holder.weight),), bias, dtype=torch.float64))
    return layer


def _linear(bias: float, make: Callable[[], nn.Module] = lambda: nn.Linear(3, 3)) -> nn.Sequential:
    """x + B - B, with a relu between, as two consecutive matrices would be joined."""
    return nn.Sequential(_identity(make(), 1, bias), nn.ReLU(), _identity(make(), 1, -bias), nn.Flatten())


class _Added(nn.Module):
    """x by sums: (x/2 + B) - (B - x/2)."""

    def __init__(self, bias: float) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return (x / 2 + self.bias) - (self.bias - x / 2)


def _descent(bias: float) -> nn.Sequential:
    """With W = I, -I, I, biases B, 0, -B and all units active: x ↦ -x - 2B ↦ x + 2B ↦ -x, as h is nearly 2."""
    return nn.Sequential(*(_identity(lipflow.cpl_dense(3, 3), s, b) for s, b in ((1, bias), (-1, 0.0), (1, -bias))))


def _center(bias: float) -> nn.Sequential:
    """x - B + B, where B is the mean of the input layer."""
    centre = lipflow.blocks.Normalize(0.0).double()
    centre.mean.fill_(bias)
    return nn.Sequential(centre, _identity(nn.Linear(3, 3), 1, bias))


def _within(bias: float) -> lipflow.Frozen:
    """Biases that cancel in one layer: with the rows w and -w, Wᵀσ(Wx + B) = (x + B) - (-x + B) = 2x."""
    identity = torch.eye(3, dtype=torch.float64)
    op = certified_operator(DenseOperator(torch.cat([identity, -identity])))
    return chain(
        (3,), Descent(op, torch.full((6,), bias, dtype=torch.float64), NONLINEARITIES["relu"], step_size(op.norm))
    )


NETWORKS = {
    "linear": (_linear, (3,)),
    "sum": (_Added, (3,)),
    "within": (_within, (3,)),
    "descent": (_descent, (3,)),
    "convolution": (lambda bias: _linear(bias, lambda: nn.Conv2d(1, 1, 1)), (1, 3, 5)),  # a bias at each position
    "center": (_center, (3,)),
    "proximal": (  # z + Wᵀσ(Wz + b) = x, twice, with biases that cancel
        lambda bias: nn.Sequential(*(_identity(lipflow.proximal(3, 3), sign, bias) for sign in (1, -1))),
        (3,),
    ),
}


@pytest.mark.parametrize("bias", [1e6, 1e12, 1e100, 1e300])
@pytest.mark.parametrize("name", NETWORKS)
def test_rounding_bound_grows_with_biases_or_freeze_refuses(name, bias):
    make, shape = NETWORKS[name]
    calm = lipflow.freeze(make(0.0), in_shape=shape).rounding
    try:
        frozen = lipflow.freeze(make(bias), in_shape=shape)
    except ValueError as refusal:
        print(f"{name} at {bias}: {refusal}")
        assert bias == 1e300
        return
    generator = torch.Generator().manual_seed(0)
    offs = [exact.off(frozen, torch.rand(shape, generator=generator, dtype=torch.float64)) for _ in range(5)]
    worst = up(sqrt_up(max(offs)))
    print(f"{name} at {bias}: |executed - exact| = {worst:.3g}, E = {frozen.rounding:.3g}")
    assert max(offs) <= Fraction(frozen.rounding) ** 2
    assert frozen.rounding > calm * bias / 100
    if name not in ("descent", "proximal"):
        assert worst > calm, "the example does not show what it should: a bound blind to biases would have held"


# Intermediate values that overflow, although every constant is finite


def _overflows() -> lipflow.Frozen:
    """With ‖W‖ = 1e160, Wᵀσ(Wx + b) reaches 1e320, beyond float64, however small h is."""
    op = certified_operator(DenseOperator(torch.tensor([[1e160, 0.0]], dtype=torch.float64)))
    bias = torch.tensor([-0.55e160], dtype=torch.float64)
    return chain((2,), Descent(op, bias, NONLINEARITIES["relu"], step_size(op.norm)))


def test_intermediate_overflow_is_refused():
    with pytest.raises(ValueError, match="beyond float64"):
        _overflows()
    with pytest.raises(ValueError, match=r"beyond float64|not finite|NaN or infinite"):
        lipflow.freeze(_descent(1e308), in_shape=(3,))
    # The scores 2¹⁰²³·x₀ - δ and 2¹⁰²³·x₀ are both ∞ at x₀ = 2. Every constant is finite, as a product with 2²⁰⁰ does
    # not round; R was once 370719.
    less = Constant(torch.tensor([-(2.0**790), 0.0], dtype=torch.float64))
    twice = (Gather(torch.tensor([0, 0]), [1]), (0,))
    with pytest.raises(ValueError, match="beyond float64"):
        wired((1,), twice, (less, ()), (Sum([2.0**823, 1.0]), (1, 2)), (Sum([2.0**200]), (3,)), domain=(-3.0, 3.0))


def test_subnormal_weights_are_refused():
    """1e-309·(1e300·x) is 0 on a processor that reads subnormal numbers as 0."""
    layers = [nn.Linear(2, 2, bias=False).double() for _ in range(2)]
    for layer, gain in zip(layers, (1e300, 1e-309), strict=True):
        layer.weight = nn.Parameter(gain * torch.eye(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"overflow|subnormal"):
        lipflow.freeze(nn.Sequential(layers[0], nn.ReLU(), layers[1]), in_shape=(2,))
    with pytest.raises(ValueError, match="subnormal"):
        lipflow.freeze(nn.Sequential(layers[1]), in_shape=(2,))
    if torch.set_flush_denormal(True):
        with pytest.raises((ValueError, RuntimeError), match=r"subnormal|float64"):
            lipflow.freeze(nn.Sequential(layers[1]), in_shape=(2,))


EYE = torch.eye(2, dtype=torch.float64)
SKEW = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
RELU, BIAS = NONLINEARITIES["relu"], torch.zeros(2, dtype=torch.float64)
WITH = {  # a primitive with the subnormal number h, and the weight and description of its twin in the checker
    "descent": (lambda h: Descent(certified_operator(DenseOperator(EYE)), BIAS, RELU, h), (EYE, dict(h=...))),
    "proximal, h": (lambda h: Proximal(certified_operator(DenseOperator(EYE)), BIAS, RELU, h, 0.5, 3, False), None),
    "proximal": (
        lambda h: Proximal(certified_operator(DenseOperator(EYE)), BIAS, RELU, 0.5, h, 3, False),
        (EYE, dict(h=0.5, tau=..., iterations=3, reflect=False)),
    ),
    "series": (
        lambda h: TruncatedExponential(certified_operator(DenseOperator(SKEW)), h, 3),
        (SKEW, dict(h=..., terms=3)),
    ),
    "avg_pool": (lambda h: AvgPool((1, 1), h), (None, dict(window=[1, 1], divisor=...))),
    "sum": (lambda h: Sum([1.0, h]), (None, dict(coefficients=[1.0, ...]))),
    "scale": (lambda h: chain((2,), Scale(torch.tensor([1.0, h], dtype=torch.float64))), None),
}


def _filled(entry: object, h: float) -> object:
    """Replace each ellipsis by h."""
    if isinstance(entry, dict):
        return {key: _filled(value, h) for key, value in entry.items()}
    return [_filled(value, h) for value in entry] if isinstance(entry, list) else h if entry is ... else entry


@pytest.mark.parametrize("h", [1e-310, 5e-324])
@pytest.mark.parametrize("name", WITH)
def test_subnormal_steps_are_refused(name, h):
    """2⁵¹⁵·I has h = 2⁻¹⁰²⁹: the layer would be x where subnormal numbers are read as 0, and -x elsewhere."""
    assert step_size(2.0**515) == 0.0 < step_size(2.0**511)
    kind, (make, described) = name.split(",")[0], WITH[name]
    with pytest.raises(ValueError, match=f"{kind}|subnormal"):
        make(h)
    if described is not None:
        weight, entry = described
        with pytest.raises(check.Rejected, match=r"needs|subnormal"):
            _checked(kind, weight, **_filled(entry, h))


def _checked(kind: str, weight: Tensor | None = None, **entry) -> check.Primitive:
    """A primitive of the checker."""
    op = {} if weight is None else dict(op=dict(kind="matrix", geometry={}, adjoint=False, weight="w"), bias=None)
    tensors = {} if weight is None else dict(w=weight.numpy())
    return check.KINDS[kind](dict(entry, kind=kind, sigma="relu", **op), tensors, dict(norm=1 + 2.0**-30), "it")


def test_numbers_of_iterations_and_terms_are_limited():
    eye, skew = certified_operator(DenseOperator(EYE)), certified_operator(DenseOperator(SKEW))
    with pytest.raises(ValueError, match="proximal"):
        Proximal(eye, None, NONLINEARITIES["relu"], 0.5, 0.5, MAX_STEPS + 1, False)
    with pytest.raises(ValueError, match="series"):
        TruncatedExponential(skew, 1.0, MAX_TERMS + 1)
    proximal = dict(h=0.5, tau=0.5, reflect=False)
    for steps, terms in ((MAX_STEPS, MAX_TERMS), (1, 1)):
        _checked("proximal", EYE, iterations=steps, **proximal)
        _checked("series", SKEW, h=1.0, terms=terms)
    with pytest.raises(check.Rejected, match="needs"):
        _checked("proximal", EYE, iterations=MAX_STEPS + 1, **proximal)
    with pytest.raises(check.Rejected, match="needs"):
        _checked("series", SKEW, h=1.0, terms=MAX_TERMS + 1)


def test_rounding_bound_covers_subnormal_pixels_read_as_0():
    frozen = lipflow.freeze(nn.Sequential(nn.ReLU()), in_shape=(2,))
    assert frozen.rounding >= 2 * 2.0**-126
    x = torch.tensor([[2.0**-1030, 0.0], [2.0**-130, 0.0], [0.5, 0.0]], dtype=torch.float64)
    for images in (x, x.float()):
        radius = lipflow.certify(frozen, images).radius
        assert radius[:2].tolist() == [0, 0]
        assert radius[2] > 0.35


@pytest.mark.parametrize("flush", [False, True])
def test_tiny_pair_bounds_are_never_read_as_0(flush, tmp_path):
    """2¹⁰⁰·x, then rows at distance 2⁻¹⁰²³: with d = 0 the whole box would be certified, but 0 has another label."""
    first, last = nn.Linear(1, 1).double(), nn.Linear(1, 2).double()
    for layer, weight, bias in (
        (first, [[2.0**100]], [0.0]),
        (last, [[1.5 * 2.0**-1022], [2.0**-1022]], [0.0, 2.0**-924]),
    ):
        layer.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))
        layer.bias = nn.Parameter(torch.tensor(bias, dtype=torch.float64))
    x = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    torch.set_flush_denormal(flush)  # has no effect on some processors
    frozen = lipflow.freeze(nn.Sequential(first, nn.ReLU(), last), in_shape=(1,))  # relu: matrices are not joined
    found = lipflow.certify(frozen, x)
    certificate_file.save(tmp_path, frozen, found, x, found.label)
    check.check(tmp_path, full=True)
    torch.set_flush_denormal(False)
    assert found.label.tolist() == [0, 1]
    assert 0 < float(found.radius[0]) < 1


def test_the_checker_finds_subnormal_weights_by_their_bits(tmp_path):
    for name, value in (("small", 2.0**-1030), ("zero", 0.0), ("minus-zero", -0.0), ("one", -1.0)):
        weight = np.array([1.0, value])
        save_file({"0.weight": weight}, tmp_path / f"{name}.safetensors", {"lipflow": "{}"})
    torch.set_flush_denormal(True)  # where the processor can
    with pytest.raises(check.Rejected, match="subnormal, or above"):
        check.read_safetensors(tmp_path / "small.safetensors")
    for name in ("zero", "minus-zero", "one"):
        check.read_safetensors(tmp_path / f"{name}.safetensors")


@pytest.mark.parametrize("small", [False, True], ids=["overflow", "subnormal"])
def test_the_checker_refuses_the_same(small, monkeypatch, tmp_path):
    """In a certificate by a program without these guards."""
    for file in (certified, linear, sys.modules["lipflow.graph.fold"]):
        monkeypatch.setattr(file, "in_range", lambda error: error)
    monkeypatch.setattr(frozen, "require_numbers", lambda vertex: None)
    if small:
        weight = torch.tensor([[1.0, 1e-309], [0.0, 1.0]], dtype=torch.float64)
        network = chain((2,), matrix(weight))
    else:
        network = _overflows()
    x = torch.tensor([[0.5, 0.1]], dtype=torch.float64)
    certificate_file.save(tmp_path, network, lipflow.certify(network, x), x, torch.zeros(1, dtype=torch.long))
    with pytest.raises(check.Rejected, match="subnormal, or above" if small else "beyond float64"):
        check.check(tmp_path, full=True)
