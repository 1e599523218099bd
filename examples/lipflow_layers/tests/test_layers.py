"""The layers of this package obey the laws of lipflow, and one of them is refused."""

import pytest
import torch
from torch import nn

import lipflow
from lipflow.testing import check_layer
from lipflow_layers import LoweredSDPLayer, SDPLayer, TwoBranches, WrongLayer


@pytest.mark.parametrize(
    ("layer", "shape"), [(TwoBranches(4), (4, 3, 5)), (SDPLayer(6, 9), (6,)), (LoweredSDPLayer(6, 9), (6,))]
)
def test_the_laws_hold(layer, shape):
    check_layer(layer, shape)


def test_none_of_them_stretches():
    for layer, shape in ((TwoBranches(4), (4, 3, 5)), (SDPLayer(6, 9), (6,)), (LoweredSDPLayer(6, 9), (6,))):
        assert lipflow.lipschitz_bound(layer, shape).lipschitz <= 1 + 1e-8


def test_a_layer_by_its_parts_is_recognised():
    torch.manual_seed(0)
    by_parts, lowered = SDPLayer(6, 9), LoweredSDPLayer(6, 9)
    lowered.load_state_dict(by_parts.state_dict())
    for layer in (by_parts, lowered):
        frozen = lipflow.freeze(layer, in_shape=(6,))
        assert [row.kind for row in frozen.ledger] == ["input", "descent"]
        assert frozen.lipschitz == lipflow.freeze(by_parts, in_shape=(6,)).lipschitz


def test_a_wrong_lower_is_refused():
    with pytest.raises(
        lipflow.LoweringError, match=r"^1 \(WrongLayer\) computes something else than it was lowered to"
    ):
        lipflow.freeze(nn.Sequential(nn.Flatten(), WrongLayer(6, 9)), in_shape=(6,))
