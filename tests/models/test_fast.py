import pytest
import torch

import lipflow
from lipflow.flows import Weight


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
        ((3, 30, 32), {}, "multiples of 8 with pool=2, not 30×32"),
        ((3, 32, 32), {"pool": 16}, "multiples of 64"),
        ((1, 28, 28), {}, "not 28×28"),
        ((3, 32, 32), {"channels": 8}, "cannot hold the 12 channels"),
        ((3, 32, 32), {"depth": (1, 2, 3)}, "pairs"),
        ((3, 32, 32), {"depth": 3}, "pairs"),
        ((3, 32, 32), {"depth": (1, -1)}, "depth must be an integer of at least 0, not -1"),
        ((3, 32, 32), {"inner": (0, 1)}, "inner must be an integer of at least 1, not 0"),
        ((3, 32, 32), {"pool": 0}, "pool must be an integer of at least 1, not 0"),
        ((3, 32, 32), {"depth_linear": -1}, "depth_linear must be"),
        ((3, 32, 32), {"lln": False}, "use the model cpl"),
    ],
)
def test_what_does_not_fit_is_said(shape, sizes, message):
    with pytest.raises(ValueError, match=message):
        lipflow.build("cpl-fast", 10, shape, **sizes)


def test_dense_layers_begin_as_reflections_and_know_their_norm():
    network = lipflow.build("cpl-fast", 10, (3, 16, 16), channels=12, features=24)
    for name, parameter in network.named_parameters():
        if ".linear." in name and parameter.ndim == 2:
            torch.testing.assert_close(parameter @ parameter.mT, torch.eye(24), rtol=0, atol=1e-5)
    weights = [m for m in network.stages.get_submodule("linear").modules() if isinstance(m, Weight)]
    assert len(weights) == 4
    for weight in weights:
        torch.testing.assert_close((weight.weight @ weight.u).norm(), torch.tensor(1.0))


def test_convolutions_begin_near_the_identity_on_some_channels():
    network = lipflow.build("cpl-fast", 10, (3, 16, 16), channels=12)
    kernel = next(p for name, p in network.named_parameters() if ".at_half." in name and p.ndim == 4)
    middle = kernel[:, :, 1, 1]
    torch.testing.assert_close(middle.mT @ middle, torch.eye(12), rtol=0, atol=0.5)
    assert 0 < float(kernel[:, :, 0, 0].detach().abs().max()) < 0.1
