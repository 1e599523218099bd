"""The CPL networks: sizes, shapes, and how they are asked for."""

import pytest
import torch

import lipflow

# Millions, with the inner width 5 of the authors' code.
PARAMETERS = {"cpl-s": 41.34, "cpl-m": 78.74, "cpl-l": 236.23, "cpl-xl": 275.69}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_table_1(name):
    with torch.device("meta"):
        network = lipflow.build(name)
    assert round(sum(p.numel() for p in network.parameters()) / 1e6, 2) == PARAMETERS[name]


@pytest.mark.parametrize("lln", [False, True])
@pytest.mark.parametrize("classes", [10, 100])
def test_any_number_of_classes(lln, classes):
    network = lipflow.build("cpl", classes=classes, depth=1, depth_linear=1, features=8, lln=lln)
    assert network(torch.rand(2, 3, 32, 32)).shape == (2, classes)
    assert network.classes == classes
    assert network.head.pair_constants().shape == (classes, classes)


def test_a_thousand_layers_take_a_training_step():
    network = lipflow.build("cpl", in_shape=(3, 8, 8), depth=1000, channels=30, depth_linear=1, features=8)
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    loss = torch.nn.functional.multi_margin_loss(network(torch.rand(2, 3, 8, 8)), torch.tensor([0, 1]))
    loss.backward()
    optimiser.step()
    gradients = [p.grad for p in network.parameters()]
    assert all(g is not None and bool(torch.isfinite(g).all()) for g in gradients)
    first = network.stages.convolutions[0].field.weight.weight.grad
    assert float(first.norm()) > 0


def test_the_bound_of_a_live_network_covers_it():
    network = lipflow.build("cpl-digits").double().eval()
    bound = lipflow.lipschitz_bound(network)
    assert bound.tolerance == 0
    x = torch.rand(20, 1, 8, 8, dtype=torch.float64)
    y = x + 0.01 * torch.randn_like(x)
    with torch.no_grad():
        stretch = (network(x) - network(y)).norm(dim=1) / (x - y).flatten(1).norm(dim=1)
    assert 0 < float(stretch.max()) <= bound.lipschitz


def test_a_depth_may_be_0():
    network = lipflow.build("cpl", in_shape=(3, 8, 8), depth=0, depth_linear=0)
    assert network(torch.rand(2, 3, 8, 8)).shape == (2, 10)


def test_list_models():
    assert {"cpl", "cpl-s", "cpl-m", "cpl-l", "cpl-xl", "cpl-digits"} <= set(lipflow.list_models())


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: lipflow.build("cpl-xs"), ValueError, "there is no model 'cpl-xs'; there are cpl, cpl-s"),
        (lambda: lipflow.build("cpl", depht=3), TypeError, "no argument 'depht'; it has channels, depth"),
        (lambda: lipflow.build("cpl", in_shape=(32, 32)), ValueError, r"in_shape is .*not \(32, 32\)"),
        (lambda: lipflow.build("cpl", classes=1), ValueError, "at least 2 classes, not 1"),
        (lambda: lipflow.build("cpl", channels=2), ValueError, "channels=2 cannot hold the 3 channels"),
        (lambda: lipflow.build("cpl", in_shape=(3, 2, 2)), ValueError, "pool=4 does not fit images of 2×2"),
        (lambda: lipflow.build("cpl", in_shape=32), ValueError, "in_shape is .*not 32"),
        (lambda: lipflow.build("cpl", pool=0), ValueError, "pool must be an integer of at least 1, not 0"),
        (lambda: lipflow.build("cpl", features=0), ValueError, "features must be .*not 0"),
        (lambda: lipflow.build("cpl", inner=2.5), ValueError, "inner must be .*not 2.5"),
        (lambda: lipflow.build("cpl", depth=-1), ValueError, "depth must be an integer of at least 0, not -1"),
        (lambda: lipflow.build("cpl", depth_linear=-5), ValueError, "depth_linear must be .*not -5"),
        (lambda: lipflow.build("cpl", classes=2000), ValueError, "cannot be truncated to 2000 classes"),
        (
            lambda: lipflow.build("cpl-digits")(torch.rand(2, 3, 8, 8)),
            ValueError,
            r"takes images \(batch, 1, 8, 8\), not",
        ),
        (lambda: lipflow.build("cpl-digits")(torch.rand(1, 8, 8)), ValueError, r"takes images \(batch, 1, 8, 8\), not"),
    ],
)
def test_bad_input_is_answered(call, error, words):
    with pytest.raises(error, match=words):
        call()
