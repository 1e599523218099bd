"""KW-Large networks of Cayley and BCOP layers: the published counts and layout, and how they are asked for."""

import pytest
import torch

import lipflow
from lipflow import blocks


def _kernels(network):
    """(inputs, outputs, kernel) of the convolutions."""
    return [
        (*m.weight.channels, (m.weight.axes.count(0) + 1, m.weight.axes.count(1) + 1))
        if isinstance(m.weight, blocks.BlockConvolution)
        else (*m.weight.channels, tuple(m.weight.weight.weight.shape[2:]))
        for m in network.stages.convolutions.modules()
        if isinstance(m, blocks.Affine)
    ]


def _dense(network):
    return [m.weight.channels for m in network.stages.linear.modules() if isinstance(m, blocks.Affine)]


def test_cayley_kw3_as_published():
    with torch.device("meta"):
        network = lipflow.build("cayley-kw3")
        other = lipflow.build("cayley-kw3", classes=100)
    assert round(sum(p.numel() for p in network.parameters()) / 1e6, 1) == 20.0
    assert _kernels(network) == [(3, 96, (3, 3)), (384, 96, (1, 1)), (96, 192, (3, 3)), (768, 192, (1, 1))]
    assert _dense(network) == [(12288, 1536), (1536, 512), (512, 10)]
    assert _dense(other) == [(12288, 1536), (1536, 512), (512, 100)]
    assert sum(n.endswith("alpha") for n, _ in network.named_parameters()) == 7


def test_bcop_large_as_published():
    """3/4/3/4: a strided 4×4 kernel is 2×2 on blocks of 2×2 pixels."""
    with torch.device("meta"):
        network = lipflow.build("bcop-large")
    assert _kernels(network) == [(3, 32, (3, 3)), (128, 32, (2, 2)), (32, 64, (3, 3)), (256, 64, (2, 2))]
    assert _dense(network) == [(4096, 512), (512, 512), (512, 10)]
    convolutions = [m for m in network.modules() if isinstance(m, blocks.BlockConvolution)]
    assert [len(m.halves) for m in convolutions] == [4, 2, 4, 2]
    assert all(m.halves.shape[1] == 2 * m.halves.shape[2] for m in convolutions)
    assert all(m.iterations == 20 for m in network.modules() if hasattr(m, "iterations"))


@pytest.mark.parametrize("name", ["cayley-kw3", "bcop-large"])
@pytest.mark.parametrize("lln", [False, True])
@pytest.mark.parametrize("classes", [2, 100])
def test_any_number_of_classes(name, lln, classes):
    network = lipflow.build(name, classes=classes, in_shape=(1, 4, 8), channels=2, hidden=6, features=4, lln=lln)
    assert network(torch.rand(2, 1, 4, 8)).shape == (2, classes)
    assert isinstance(network.head, blocks.LastLayerNormalization if lln else blocks.Truncate)
    assert _dense(network) == [(8, 6), (6, 4)] + ([] if lln else [(4, classes)])


@pytest.mark.parametrize("name", ["cayley-kw3", "bcop-large"])
def test_every_parameter_learns(name):
    network = lipflow.build(name, in_shape=(3, 8, 8), channels=4, hidden=16, features=8)
    network(torch.rand(8, 3, 8, 8)).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in network.parameters())
    assert lipflow.lipschitz_bound(network).lipschitz == pytest.approx(1, abs=1e-5)


def test_inputs_as_published():
    with torch.device("meta"):
        sizes = dict(in_shape=(3, 4, 4), channels=2, hidden=2, features=2)
        cayley, bcop = lipflow.build("cayley-kw3", **sizes), lipflow.build("bcop-large", **sizes)
    assert cayley.stages.center.std is None
    assert bcop.stages.center.std is None
    assert lipflow.build("bcop-large", **sizes).stages.center.mean.tolist() == [0.0]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (dict(family="soc"), "one of cayley, bcop, not 'soc'"),
        (dict(in_shape=(3, 30, 32)), "sides that 4 divides, not 30×32"),
        (dict(channels=3), "so they are even, not 3"),
        (dict(hidden=0), "hidden must be an integer of at least 1, not 0"),
        (dict(features=2.0), "features must be an integer of at least 1, not 2.0"),
    ],
)
def test_bad_sizes_are_answered(sizes, words):
    with pytest.raises(ValueError, match=words):
        lipflow.build("cayley-kw3", **sizes)
