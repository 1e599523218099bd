"""A joint power iteration is one power iteration of each operator."""

import sys

import pytest
import torch

from lipflow import cpl_conv, cpl_dense
from lipflow.fast import joint_power_iteration
from lipflow.flows import Weight
from lipflow.operators.norm import power_iteration


@pytest.fixture
def weights() -> list[Weight]:
    circular, grouped = dict(padding_mode="circular"), dict(groups=2)
    twice = [cpl_conv(6, 4, in_size=(5, 7), **options) for options in ({}, circular, grouped) for _ in range(2)]
    layers = [*twice, cpl_conv(6, 4, in_size=(4, 4)), cpl_dense(8, 5), cpl_dense(8, 5)]
    return [m for layer in layers for m in layer.double().modules() if isinstance(m, Weight)]


def iterate(weights: list[Weight]) -> list[torch.Tensor]:
    return joint_power_iteration([w.operator(None) for w in weights], [w.u for w in weights])


@pytest.mark.parametrize("group", [1, 2, 32])
def test_each_vector_is_that_of_a_single_iteration(group, weights, monkeypatch):
    monkeypatch.setattr(sys.modules["lipflow.fast.joint_power_iteration"], "MAX_GROUP", group)
    for weight, u in zip(weights, iterate(weights), strict=True):
        torch.testing.assert_close(u, power_iteration(weight.operator(None), weight.u, 1), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("scale", [0.0, 1e-170, 1e170])
def test_weights_of_any_scale_have_unit_vectors(scale, weights):
    with torch.no_grad():
        weights[0].weight.mul_(scale)
    found = iterate(weights)
    assert all(torch.isfinite(u).all() for u in found)
    assert float(found[0].norm()) == pytest.approx(1)
    assert torch.equal(found[0], weights[0].u) == (scale == 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinite_weights_keep_their_vector(value, weights):
    with torch.no_grad():
        weights[0].weight[0, 0, 0, 0] = value
    assert torch.equal(iterate(weights)[0], weights[0].u)


def test_autocast_rounds_nothing(weights):
    weights = [weight.float() for weight in weights]
    expected = iterate(weights)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(u, full) for u, full in zip(iterate(weights), expected, strict=True))
