"""The singular values of orthogonal layers are 1, fresh and after training."""

import pytest
import torch
from torch import nn

import lipflow
from lipflow.blocks import Bias, TakeChannels
from tests import contract
from tests.operators.geometry import affine_matrix

EXACT = [name for name in contract.LAYERS if name.startswith(("cayley", "bcop", "björck")) and "network" not in name]
SERIES = ["soc dense", "soc conv", "soc, scaled", "soc, wider", "soc, narrower, strided", "soc, 1×1", "soc, features"]


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("name", EXACT)
def test_singular_values_are_one(name, trained):
    layer = contract.make(name, trained=trained)
    values = torch.linalg.svdvals(affine_matrix(layer, contract.LAYERS[name].shape))
    assert float(values.min()) >= 1 - 1e-12
    assert float(values.max()) <= 1 + 1e-12


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("name", SERIES)
def test_a_truncated_series_is_orthogonal_up_to_its_remainder(name, trained):
    """e^{hA} has singular values 1; with k terms of its series they differ by at most (ha)ᵏ/k!."""
    layer = contract.make(name, trained=trained)
    shape = contract.LAYERS[name].shape
    if name == "soc, narrower, strided":
        layer = nn.Sequential(*[m for m in layer.children() if not isinstance(m, TakeChannels | Bias)])
    remainder = lipflow.lipschitz_bound(layer, in_shape=shape).lipschitz - 1
    values = torch.linalg.svdvals(affine_matrix(layer, shape))
    assert float(values.max()) <= 1 + remainder + 1e-12
    assert float(values.min()) >= 1 - remainder - 1e-12
