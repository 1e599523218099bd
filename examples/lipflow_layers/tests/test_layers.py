"""The layers pass the tests of lipflow, and the wrong one is refused."""

import pytest
import torch
from torch import nn

import lipflow
from lipflow.testing import check_layer
from lipflow_layers import LoweredSDPLayer, SDPLayer, TwoBranches, WrongLayer


@pytest.mark.parametrize(
    ("layer", "shape"), [(TwoBranches(4), (4, 3, 5)), (SDPLayer(6, 9), (6,)), (LoweredSDPLayer(6, 9), (6,))]
)
def test_layer_is_1_lipschitz_and_passes_check_layer(layer, shape):
    check_layer(layer, shape)
    assert lipflow.lipschitz_bound(layer, shape).lipschitz <= 1 + 1e-8


def test_residual_layer_without_lower_is_recognised():
    torch.manual_seed(0)
    by_parts, lowered = SDPLayer(6, 9), LoweredSDPLayer(6, 9)
    lowered.load_state_dict(by_parts.state_dict())
    for layer in (by_parts, lowered):
        frozen = lipflow.freeze(layer, in_shape=(6,))
        assert [row.kind for row in frozen.ledger] == ["input", "descent"]
        assert frozen.lipschitz == lipflow.freeze(by_parts, in_shape=(6,)).lipschitz


def test_wrong_lower_is_refused():
    with pytest.raises(
        lipflow.LoweringError, match=r"^1 \(WrongLayer\) computes something else than it was lowered to"
    ):
        lipflow.freeze(nn.Sequential(nn.Flatten(), WrongLayer(6, 9)), in_shape=(6,))
