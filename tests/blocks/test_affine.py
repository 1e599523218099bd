"""Layers with normalized weights, and their norms."""

import pytest
import torch

import lipflow
from lipflow import blocks
from tests.operators.geometry import affine_matrix


def test_spectral_dense_divides_by_the_norm():
    layer = lipflow.spectral_dense(6, 4).double().eval()
    w = layer.weight.weight.weight.detach()
    expected = w / torch.linalg.matrix_norm(w, 2)
    torch.testing.assert_close(affine_matrix(layer, (6,)), expected, rtol=1e-6, atol=1e-6)
    assert 1 - 1e-12 <= lipflow.lipschitz_bound(layer, (6,)).lipschitz <= 1 + 1e-6


@pytest.mark.parametrize(("make", "least"), [(lipflow.spectral_conv, 0.9), (lipflow.reshaped_conv, 0.3)])
def test_trained_convolutions_have_norms_near_one(make, least):
    layer = make(2, 3, in_size=(5, 6)).double()
    x = torch.randn(4, 2, 5, 6, dtype=torch.float64)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.05)
    for _ in range(60):
        optimiser.zero_grad()
        layer(x).sub(1).square().mean().backward()
        optimiser.step()
    norm = float(torch.linalg.matrix_norm(affine_matrix(layer.eval(), (2, 5, 6)), 2))
    assert least <= norm <= 1.01
    assert norm <= lipflow.lipschitz_bound(layer, (2, 5, 6)).lipschitz <= 1.2


def test_the_bound_covers_a_norm_that_is_estimated_too_low(monkeypatch):
    layer = lipflow.spectral_dense(4, 4).double().eval()
    _, s, vh = torch.linalg.svd(layer.weight.weight.weight.detach())
    monkeypatch.setattr(layer.weight.weight, "top_vector", lambda *_: vh[1])
    assert lipflow.lipschitz_bound(layer, (4,)).lipschitz == pytest.approx(float(s[0] / s[1]), rel=1e-8)


@pytest.mark.parametrize(
    ("make", "shape"),
    [(lipflow.reshaped_conv, (2, 4, 4)), (lipflow.spectral_dense, (2,)), (lipflow.cayley_dense, (2,))],
)
def test_zero_weights_have_finite_gradients(make, shape):
    layer = make(2, 3)
    torch.nn.init.zeros_(layer.weight.weight.weight)
    layer(torch.randn(2, *shape)).sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in layer.parameters())


def test_bias_is_added_to_channels_and_features_and_is_an_isometry():
    bias, layer = blocks.Bias(3), lipflow.cayley_dense(4, 3)
    images, x = torch.randn(2, 3, 4, 5), torch.randn(2, 4)
    torch.testing.assert_close(bias(images) - images, bias.bias.reshape(1, 3, 1, 1).expand_as(images))
    torch.testing.assert_close(layer(x), layer.weight(x)(x) + layer.bias)
    assert lipflow.lipschitz_bound(bias, (3, 4, 5)) == (1, 0)
