import pytest
import torch

import lipflow


def test_it_is_small_and_certified_as_it_is():
    network = lipflow.build("cpl-fast")
    assert sum(p.numel() for p in network.parameters()) == 4_378_298
    assert network(torch.rand(2, 3, 32, 32)).shape == (2, 10)


def test_other_sizes_freeze_and_certify():
    sizes = dict(channels=12, depth=(1, 2), inner=(4, 4), depth_linear=1, features=8)
    network = lipflow.build("cpl-fast", 3, (3, 16, 8), pool=1, **sizes)
    certificates = lipflow.certify(lipflow.freeze(network), torch.rand(4, 3, 16, 8))
    assert certificates.radius.shape == (4,)


@pytest.mark.parametrize(
    ("shape", "sizes", "message"),
    [
        ((3, 30, 32), {}, "30×32 images do not fit"),
        ((3, 32, 32), {"pool": 16}, "pooled by 16"),
        ((3, 32, 32), {"channels": 8}, "cannot hold the 12 channels"),
        ((3, 32, 32), {"depth": (1, 2, 3)}, "pairs"),
        ((3, 32, 32), {"lln": False}, "use the model cpl"),
    ],
)
def test_what_does_not_fit_is_said(shape, sizes, message):
    with pytest.raises(ValueError, match=message):
        lipflow.build("cpl-fast", 10, shape, **sizes)
