"""The mean over an image and its mirror image, live, frozen and checked."""

import dataclasses

import pytest
import torch
from torch import nn

import lipflow
from lipflow import blocks, check
from lipflow.certificate import file as certificate_file
from lipflow.train import train
from tests.train.tiny import tiny

SMALL = dict(in_shape=(1, 8, 8), channels=4, depth=(1, 2), inner=(3, 4), features=5)


def _pair():
    """A network, and the same network mirrored."""
    torch.manual_seed(0)
    network = lipflow.build("cpl-fast", **SMALL).double().eval()
    return network, network.with_flips()


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
    mirrored.recompute_activations()
    network.load_state_dict(state)
    assert torch.equal(mirrored(x), one)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("place", ["stages.mirrored", "stages.mirrored.inner"])
def test_hooks_are_heard(place, training):
    _, mirrored = _pair()
    heard = []
    mirrored.get_submodule(place).register_forward_hook(lambda *_: heard.append(1))
    mirrored.train(training)(torch.rand(1, 1, 8, 8, dtype=torch.float64))
    assert heard


@pytest.mark.parametrize("place", ["stages.mirrored", "stages.mirrored.inner"])
def test_hooks_are_part_of_what_is_frozen(place):
    _, mirrored = _pair()
    plain, bound = lipflow.freeze(mirrored), lipflow.lipschitz_bound(mirrored)
    mirrored.get_submodule(place).register_forward_hook(lambda module, args, output: 3 * output)
    frozen = lipflow.freeze(mirrored)
    assert frozen.lipschitz == pytest.approx(3 * plain.lipschitz, rel=1e-9)
    assert lipflow.lipschitz_bound(mirrored).lipschitz == pytest.approx(3 * bound.lipschitz, rel=1e-9)
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    bias = mirrored.head.bias.detach()
    torch.testing.assert_close(frozen(x) - bias, 3 * (plain(x) - bias), rtol=1e-12, atol=1e-12)


def test_a_forward_of_its_own_is_called_in_training():
    _, mirrored = _pair()
    x = torch.rand(1, 1, 8, 8, dtype=torch.float64)
    before = mirrored.train()(x)
    module = mirrored.stages.mirrored
    usual = module.forward
    module.forward = lambda x: 2 * usual(x)
    assert not torch.allclose(mirrored(x), before)


def test_a_network_is_mirrored_once_and_keeps_its_ways():
    network, _ = _pair()
    network.stages.at_half.eval()
    network.train().recompute_activations()
    network.stages.linear.eval()
    mirrored = network.with_flips()
    assert mirrored.with_flips() is mirrored
    assert mirrored.training
    assert mirrored.stages.mirrored.inner.linear.recompute_activations
    assert mirrored.stages.mirrored.training
    assert not network.stages.linear.training
    assert mirrored.stages.mirrored.inner.linear is network.stages.linear


def test_other_types_and_ways_to_run():
    network = lipflow.build("cpl-fast", **SMALL).to(torch.bfloat16).eval().with_flips()
    assert network(torch.rand(2, 1, 8, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    _, mirrored = _pair()
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    compiled = torch.compile(mirrored, backend="aot_eager")
    torch.testing.assert_close(compiled(x), mirrored(x), rtol=1e-12, atol=1e-12)
    assert mirrored(x[:0]).shape == (0, 10)


def test_it_is_trained_on_mirror_images_or_not_at_all(tmp_path):
    run = tiny(tmp_path)
    run = dataclasses.replace(run, model_args={**run.model_args, "mirror": True})
    with pytest.raises(ValueError, match="add --flip, or drop mirror=True"):
        train(run)
    run = dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, flip=True))
    trained = train(run).network
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(lipflow.load(tmp_path).eval()(x), trained.eval()(x))


def test_constants_are_those_of_the_network():
    network, mirrored = _pair()
    assert lipflow.lipschitz_bound(mirrored) == lipflow.lipschitz_bound(network)
    plain, frozen = lipflow.freeze(network), lipflow.freeze(mirrored)
    assert frozen.lipschitz == plain.lipschitz
    torch.testing.assert_close(frozen.pair_bounds, plain.pair_bounds, rtol=1e-12, atol=0)
    assert plain.rounding < frozen.rounding < 1.01 * plain.rounding
    x = torch.rand(300, 1, 8, 8, dtype=torch.float64)  # more than pass through at a time
    moved = (frozen(x) - (plain(x) + plain(x.flip(3))) / 2).norm(dim=1)
    assert float(moved.max()) <= frozen.rounding + plain.rounding


def test_built_by_name_saved_and_checked(tmp_path):
    network = lipflow.build("cpl-digits", mirror=True)
    assert network.model_args == {"mirror": True}
    frozen = lipflow.freeze(network)
    images = torch.randint(256, (40, 1, 8, 8), dtype=torch.uint8)
    certificates = lipflow.certify(frozen, images)
    certificate_file.save(tmp_path, frozen, certificates, images, certificates.label)
    check.check(tmp_path, full=True)
    again = lipflow.Frozen.load(tmp_path / certificate_file.WEIGHTS)
    assert torch.equal(again(images), frozen(images))
    with pytest.raises(ValueError, match="mirror is True or False, not 1"):
        lipflow.build("cpl-digits", mirror=1)


def test_images_only():
    with pytest.raises(ValueError, match=r"takes images \(batch, channels, height, width\), not \(2, 3\)"):
        blocks.FlipAverage(nn.Linear(3, 3))(torch.zeros(2, 3))


def test_a_mirror_of_vectors_is_refused_with_its_place():
    with pytest.raises(ValueError, match=r"FlipAverage takes images .*, not \(2, 4\)"):
        lipflow.freeze(nn.Sequential(nn.Flatten(), blocks.FlipAverage(nn.Linear(4, 3))), in_shape=(1, 2, 2))
