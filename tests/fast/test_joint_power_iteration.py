"""Power iterations of many operators at once, against one by one."""

import sys

import pytest
import torch

from lipflow import cpl_conv, cpl_dense
from lipflow.fast import joint_power_iteration
from lipflow.flows import Weight
from lipflow.operators.norm import power_iteration


def weights() -> list[Weight]:
    torch.manual_seed(0)
    layers = [
        cpl_conv(6, 2, in_size=(5, 7)),
        cpl_conv(6, 2, in_size=(5, 7)),
        cpl_conv(6, 2, in_size=(5, 7), padding_mode="circular"),
        cpl_conv(6, 2, in_size=(5, 7), padding_mode="circular"),
        cpl_conv(6, 4, in_size=(5, 7), groups=2),
        cpl_conv(6, 4, in_size=(5, 7), groups=2),
        cpl_conv(6, 2, in_size=(4, 4)),
        cpl_dense(8, 5),
        cpl_dense(8, 5),
    ]
    return [m for layer in layers for m in layer.double().modules() if isinstance(m, Weight)]


def iterate(weights: list[Weight]) -> list[torch.Tensor]:
    return joint_power_iteration([w.operator(None) for w in weights], [w.u for w in weights])


@pytest.mark.parametrize("group", [1, 2, 32])
def test_all_at_once_is_one_by_one(group, monkeypatch):
    monkeypatch.setattr(sys.modules["lipflow.fast.joint_power_iteration"], "MAX_GROUP", group)
    for weight, u in zip(weights(), iterate(weights()), strict=True):
        torch.testing.assert_close(u, power_iteration(weight.operator(None), weight.u, 1), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("scale", [0.0, 1e-170, 1e170])
def test_zeros_and_extremes(scale):
    chain = weights()
    with torch.no_grad():
        chain[0].weight.mul_(scale)
    found = iterate(chain)
    assert all(torch.isfinite(u).all() for u in found)
    assert float(found[0].norm()) == pytest.approx(1)
    assert torch.equal(found[0], chain[0].u) == (scale == 0)


def test_autocast_rounds_nothing():
    pair = [cpl_conv(8, 16, padding_mode="circular", in_size=(8, 8)).field.weight for _ in range(2)]
    expected = iterate(pair)
    with torch.autocast("cpu", torch.bfloat16):
        for u, full in zip(iterate(pair), expected, strict=True):
            assert torch.equal(u, full)


def test_u_stays_where_weights_are_nan_or_infinite():
    pair = [cpl_conv(3, 4, in_size=(8, 8)).field.weight for _ in range(2)]
    for value in (float("nan"), float("inf")):
        with torch.no_grad():
            pair[0].weight[0, 0, 0, 0] = value
        assert torch.equal(iterate(pair)[0], pair[0].u)
