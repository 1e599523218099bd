"""The mean over an image and its mirror image, live, frozen and checked."""

import json

import pytest
import torch
from torch import nn

import lipflow
from lipflow import blocks, check, record
from lipflow.frozen import primitive as prim
from lipflow.frozen.linear import Map
from lipflow.operators import Dense

SMALL = dict(in_shape=(1, 8, 8), channels=4, depth=(1, 2), inner=(3, 4), features=5)


def _pair():
    """A network, and the same network mirrored."""
    torch.manual_seed(0)
    network = lipflow.build("cpl-fast", **SMALL).double().eval()
    return network, network.mirrored()


def test_it_is_the_mean_over_both_images():
    network, mirrored = _pair()
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(mirrored(x), (network(x) + network(x.flip(3))) / 2, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mirrored(x), mirrored(x.flip(3)), rtol=1e-12, atol=1e-12)


def test_in_training_it_is_the_network_itself():
    network, mirrored = _pair()
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    state = {name: t.clone() for name, t in network.state_dict().items()}
    one = network.train()(x)
    network.load_state_dict(state)  # training moves the vectors of power iteration, which the two share
    assert torch.equal(mirrored.train()(x), one)
    mirrored.checkpoint_activations = True
    network.load_state_dict(state)
    assert torch.equal(mirrored(x), one)


def test_a_hook_on_it_is_heard_in_training():
    _, mirrored = _pair()
    heard = []
    mirrored.stages.features.register_forward_hook(lambda *_: heard.append(1))
    mirrored.train()(torch.rand(1, 1, 8, 8, dtype=torch.float64))
    assert heard
    with pytest.raises(TypeError, match="has forward hooks"):
        lipflow.freeze(mirrored)


def test_constants_are_those_of_the_network():
    network, mirrored = _pair()
    assert lipflow.lipschitz_bound(mirrored) == lipflow.lipschitz_bound(network)
    plain, frozen = lipflow.freeze(network), lipflow.freeze(mirrored)
    assert frozen.lipschitz == plain.lipschitz
    assert torch.equal(frozen.pair_bounds, plain.pair_bounds)
    assert plain.rounding < frozen.rounding < 2 * plain.rounding
    x = torch.rand(300, 1, 8, 8, dtype=torch.float64)  # more than pass through at a time
    moved = (frozen(x) - (plain(x) + plain(x.flip(3))) / 2).norm(dim=1)
    assert float(moved.max()) <= frozen.rounding + plain.rounding


def test_built_by_name_saved_and_checked(tmp_path):
    network = lipflow.build("cpl-digits", mirror=True)
    assert network.sizes == {"mirror": True}
    frozen = lipflow.freeze(network)
    images = torch.randint(256, (40, 1, 8, 8), dtype=torch.uint8)
    certificates = lipflow.certify(frozen, images)
    record.write(tmp_path, frozen, certificates, images, certificates.label)
    check.check(tmp_path, full=True)
    again = lipflow.Frozen.load(tmp_path / record.WEIGHTS)
    assert torch.equal(again(images), frozen(images))
    with pytest.raises(ValueError, match="mirror is True or False, not 1"):
        lipflow.build("cpl-digits", mirror=1)


def test_images_only():
    with pytest.raises(ValueError, match=r"takes images \(batch, channels, height, width\), not \(2, 3\)"):
        blocks.Mirrored(nn.Linear(3, 3))(torch.zeros(2, 3))


# What is not a mirror and then its mean would mix the images of a batch, or give an image two labels


def _affine():
    return prim.Affine(Map.of(Dense(torch.eye(4, dtype=torch.float64)[:2])), torch.zeros(2, dtype=torch.float64))


UNEVEN = {
    "a mirror and no mean": lambda: [prim.Mirror(), prim.Flatten(), _affine()],
    "a mean and no mirror": lambda: [prim.Flatten(), prim.Mean(), _affine()],
    "a mean before its mirror": lambda: [prim.Mean(), prim.Mirror(), prim.Flatten(), _affine()],
    "two mirrors and one mean": lambda: [prim.Mirror(), prim.Mirror(), prim.Mean(), prim.Flatten(), _affine()],
}


@pytest.mark.parametrize("name", UNEVEN)
def test_what_is_uneven_is_refused(name):
    with pytest.raises(ValueError, match=r"a mirror before it makes|a classifier ends in"):
        lipflow.Frozen(UNEVEN[name](), (1, 2, 2))


@pytest.mark.parametrize("name", UNEVEN)
def test_the_checker_derives_nothing_from_what_is_uneven(name):
    made = UNEVEN[name]()
    described = [dict(kind=p.kind, map=dict(geometry=None)) if p.kind == "affine" else dict(kind=p.kind) for p in made]
    tensors = [dict(weight=p.map.weight.numpy(), bias=p.bias.numpy()) if p.kind == "affine" else {} for p in made]
    primitives = [check.KINDS[d["kind"]](d, t, 2) for d, t in zip(described, tensors, strict=True)]
    generous = [dict(lipschitz=1e9, rounding=1e9, reach=1e9)] * 5
    with pytest.raises(check.Rejected, match=r"a mean has no mirror before it|does not end in at least two scores"):
        check.derive(primitives, [1, 2, 2], generous)
    even = [check.KINDS[k](dict(kind=k), {}, None) for k in ("mirror", "mean", "flatten")]
    assert check.derive([*even, primitives[-1]], [1, 2, 2], generous)[3] == 2, json.dumps(described)
