"""Normalised layers: what they divide by, and what is promised of them."""

import math

import pytest
import torch

import lipflow
from lipflow import blocks

CONVOLUTIONS = {"spectral": lipflow.spectral_conv, "reshaped": lipflow.reshaped_conv}


def _matrix(layer: torch.nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    n = math.prod(shape)
    with torch.no_grad():
        origin = layer(torch.zeros(1, *shape, dtype=torch.float64))
        return (layer(torch.eye(n, dtype=torch.float64).reshape(n, *shape)) - origin).flatten(1).T


def test_spectral_normalisation_divides_by_the_norm():
    layer = lipflow.spectral_dense(6, 4).double()
    x = torch.randn(8, 6, dtype=torch.float64)
    for _ in range(200):
        layer(x)
    w = layer.weight.weight.weight.detach()
    torch.testing.assert_close(_matrix(layer.eval(), (6,)), w / torch.linalg.matrix_norm(w, 2), rtol=1e-6, atol=1e-6)
    bound = lipflow.lipschitz_bound(layer, (6,)).lipschitz
    assert 1 - 1e-12 <= bound <= 1 + 1e-6


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_trained_convolutions_stay_near_one(name):
    layer = CONVOLUTIONS[name](2, 3, in_size=(5, 6)).double()
    x = torch.randn(4, 2, 5, 6, dtype=torch.float64)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.05)
    for _ in range(60):
        optimiser.zero_grad()
        layer(x).sub(1).square().mean().backward()
        optimiser.step()
    norm = float(torch.linalg.matrix_norm(_matrix(layer.eval(), (2, 5, 6)), 2))
    bound = lipflow.lipschitz_bound(layer, (2, 5, 6)).lipschitz
    assert norm <= bound
    assert bound <= 1.2
    assert (0.9 if name == "spectral" else 0.3) <= norm <= 1.01


def test_an_estimate_from_below_is_paid_for_in_the_bound(monkeypatch):
    layer = lipflow.spectral_dense(4, 4).double().eval()
    _, s, vh = torch.linalg.svd(layer.weight.weight.weight.detach())
    monkeypatch.setattr(layer.weight.weight, "top_vector", lambda *_: vh[1])
    assert lipflow.lipschitz_bound(layer, (4,)).lipschitz == pytest.approx(float(s[0] / s[1]), rel=1e-8)


def test_zero_weights_stay_zero():
    layer = lipflow.reshaped_conv(2, 3)
    torch.nn.init.zeros_(layer.weight.weight.weight)
    y = layer(torch.randn(1, 2, 4, 4))
    assert torch.equal(y, layer.bias.reshape(1, -1, 1, 1).expand_as(y))
    y.sum().backward()
    assert bool(torch.isfinite(layer.weight.weight.weight.grad).all())


def test_the_bias_of_a_dense_layer_is_along_the_features():
    layer = lipflow.cayley_dense(4, 3)
    x = torch.randn(2, 4)
    plain = layer.weight(x)(x)
    torch.testing.assert_close(layer(x), plain + layer.bias)


def test_shift_adds_its_bias_and_is_an_isometry():
    shift = blocks.Bias(3)
    x = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(shift(x) - x, shift.bias.reshape(1, 3, 1, 1).expand_as(x))
    assert lipflow.lipschitz_bound(shift, (3, 4, 5)) == (1, 0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: blocks.Bias(0), "at least 1, not 0"),
        (lambda: blocks.Bias(3)(torch.zeros(2, 4)), r"takes \(batch, 3, …\), not \(2, 4\)"),
        (lambda: blocks.TakeChannels(4)(torch.zeros(2, 3)), "cannot widen an input of 3 channels"),
        (lambda: blocks.TakeChannels(0), "at least 1, not 0"),
        (lambda: lipflow.ReshapedScale(0.0), "finite number above 0, not 0.0"),
    ],
)
def test_bad_input_is_answered(call, words):
    with pytest.raises(ValueError, match=words):
        call()
