"""No bound was lost when lowering was rewritten: L, E, pairs and scores against those of the first version.

first_version.json holds what the lowering that stood in lipflow.frozen.lower until then (commit e19398f) gave for every
layer of the contract, fresh and trained, and for the networks by name: L, E, and of the first class the constants of
pairs and the scores of one image, six of each at most. Both start from the same seeds.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import lipflow
from tests import contract

FIRST = json.loads((Path(__file__).parent / "first_version.json").read_text())


def no_worse(frozen: lipflow.Frozen, first: dict) -> None:
    """L and pairs no larger, up to 1e-12; E at most a tenth larger; scores equal within both E."""
    assert frozen.lipschitz <= first["lipschitz"] * (1 + 1e-12)
    pairs = torch.tensor(first["pairs"], dtype=torch.float64)
    assert bool((frozen.pair_bounds[0, : len(pairs)] <= pairs * (1 + 1e-12)).all())
    assert frozen.rounding <= 1.1 * first["rounding"]
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, *frozen.in_shape, generator=generator, dtype=torch.float64)
    scores = torch.tensor(first["scores"], dtype=torch.float64)
    apart = float((frozen(x)[0, : len(scores)] - scores).norm())
    assert apart <= frozen.rounding + first["rounding"]


@pytest.mark.parametrize("key", FIRST["layers"])
def test_layers(key):
    name, state = key.split("|")
    layer = contract.make(name, trained=state == "trained")
    no_worse(lipflow.freeze(nn.Sequential(layer, nn.Flatten()), contract.LAYERS[name].shape), FIRST["layers"][key])


SMALL = ("cpl-digits", "cpl-fast", "bcop-large")  # those that are frozen in a few seconds


@pytest.mark.parametrize("name", SMALL)
def test_networks(name):
    torch.manual_seed(0)
    no_worse(lipflow.freeze(lipflow.build(name)), FIRST["models"][name])


@pytest.mark.campaign
@pytest.mark.parametrize("name", [name for name in FIRST["models"] if name not in SMALL])
def test_large_networks(name):
    torch.manual_seed(0)
    no_worse(lipflow.freeze(lipflow.build(name)), FIRST["models"][name])
