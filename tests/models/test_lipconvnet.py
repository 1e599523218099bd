"""LipConvnets: the published counts and layout, and how they are asked for."""

from typing import Any

import pytest
import torch

import lipflow
from lipflow import blocks

PARAMETERS = {"soc-10": 20.9, "soc-20": 27.2}  # millions, as published


def _skews(network):
    return [m for m in network.modules() if isinstance(m, lipflow.Skew)]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_as_published(name):
    with torch.device("meta"):
        network = lipflow.build(name)
    assert round(sum(p.numel() for p in network.parameters()) / 1e6, 1) == PARAMETERS[name]


@pytest.mark.parametrize(("name", "depth"), [("soc-10", 10), ("soc-20", 20), ("soc+-10", 10), ("soc+-20", 20)])
def test_the_layout_is_the_published_one(name, depth):
    with torch.device("meta"):
        network = lipflow.build(name)
    body: Any = network.stages.convolutions
    assert len(body) == depth
    kernels = [tuple(s.weight.weight.shape[2:]) for s in _skews(body)]
    assert kernels == [(3, 3)] * (depth - 1) + [(1, 1)]
    strided = [i for i, layer in enumerate(body) if any(isinstance(m, blocks.SpaceToDepth) for m in layer.modules())]
    assert strided == [depth // 5 * (stage + 1) - 1 for stage in range(5)]
    widths = [layer[0][-1].bias.numel() for layer in body]
    assert (widths[0], widths[-1]) == (32, 1024)
    householder = [m for m in network.modules() if isinstance(m, blocks.Householder)]
    plus = name.startswith("soc+")
    assert len(householder) == (depth if plus else 0)
    assert isinstance(network.head, blocks.LastLayerNormalization if plus else blocks.Truncate)
    assert len(_skews(network)) == depth + (0 if plus else 1)
    assert all(
        flow.step == lipflow.Exponential(1.0, 13, 6) for flow in network.modules() if isinstance(flow, lipflow.Flow)
    )
    assert network.stages.center.std.shape == (1,)


@pytest.mark.parametrize("lln", [False, True])
@pytest.mark.parametrize("classes", [2, 10, 100])
def test_any_number_of_classes(lln, classes):
    network = lipflow.build("soc-10", classes=classes, in_shape=(1, 8, 4), stages=2, channels=2, block=1, lln=lln)
    assert network(torch.rand(2, 1, 8, 4)).shape == (2, classes)
    assert network.head.pair_constants().shape == (classes, classes)


def test_householder_begins_as_maxmin():
    sizes = dict(in_shape=(1, 4, 4), stages=2, channels=2, block=1, lln=True)
    plus, plain = lipflow.build("soc+-10", **sizes).eval(), lipflow.build("soc-10", **sizes).eval()
    plain.load_state_dict({k: v for k, v in plus.state_dict().items() if "theta" not in k})
    x = torch.rand(5, 1, 4, 4)
    torch.testing.assert_close(plus(x), plain(x))


def test_every_parameter_learns():
    network = lipflow.build("soc+-10", in_shape=(3, 8, 8), stages=2, channels=4)
    network(torch.rand(8, 3, 8, 8)).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in network.parameters())


def test_its_bound_is_that_of_its_input_scale():
    """1/0.2507 from the input, and next to nothing for the cut series."""
    network = lipflow.build("soc-10", in_shape=(1, 4, 4), stages=2, channels=2).double()
    bound = lipflow.lipschitz_bound(network).lipschitz
    assert bound == pytest.approx(1 / 0.2507, rel=1e-4)
    frozen = lipflow.freeze(network)
    assert frozen.lipschitz == pytest.approx(bound, rel=1e-6)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (dict(in_shape=(3, 28, 28)), "sides that 32 divides, not 28×28"),
        (dict(activation="gelu"), "one of maxmin, householder, not 'gelu'"),
        (dict(channels=3), "they are even, not 3"),
        (dict(block=0), "block must be an integer of at least 1, not 0"),
        (dict(stages=1.5), "stages must be an integer of at least 1, not 1.5"),
    ],
)
def test_bad_sizes_are_answered(sizes, words):
    with pytest.raises(ValueError, match=words):
        lipflow.build("soc-10", **sizes)
