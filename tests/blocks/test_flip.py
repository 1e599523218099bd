"""FlipAverage and `Network.with_flips`: in training and evaluation, and frozen."""

import dataclasses

import pytest
import torch

import lipflow
from lipflow.train import train
from tests.train.tiny import tiny

SMALL = dict(in_shape=(1, 8, 8), channels=4, depth=(1, 2), inner=(3, 4), features=5)


@pytest.fixture
def pair():
    """A network, and the same network mirrored."""
    network = lipflow.build("cpl-fast", **SMALL).double().eval()
    return network, network.with_flips()


def test_scores_are_the_mean_over_both_images(pair):
    network, mirrored = pair
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(mirrored(x), (network(x) + network(x.flip(3))) / 2, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mirrored(x), mirrored(x.flip(3)), rtol=1e-12, atol=1e-12)


def test_flip_average_is_its_chain_in_training(pair):
    network, mirrored = pair
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    state = {name: t.clone() for name, t in network.state_dict().items()}
    one = network.train()(x)
    network.load_state_dict(state)  # training changes the vectors of power iteration, which the two share
    assert torch.equal(mirrored.train()(x), one)
    mirrored.recompute_activations()
    network.load_state_dict(state)
    assert torch.equal(mirrored(x), one)


@pytest.mark.parametrize("place", ["stages.mirrored", "stages.mirrored.inner"])
def test_hooks_are_called_and_frozen(place, pair):
    _, mirrored = pair
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    plain, bias, before = lipflow.freeze(mirrored), mirrored.head.bias.detach(), mirrored.train()(x)
    mirrored.get_submodule(place).register_forward_hook(lambda module, args, output: 3 * output)
    assert not torch.allclose(mirrored(x), before)
    frozen = lipflow.freeze(mirrored.eval())
    assert frozen.lipschitz == pytest.approx(3 * plain.lipschitz, rel=1e-9)
    torch.testing.assert_close(frozen(x) - bias, 3 * (plain(x) - bias), rtol=1e-12, atol=1e-12)


def test_with_flips_mirrors_once_and_keeps_the_modes_of_modules(pair):
    network, _ = pair
    network.stages.at_half.eval()
    network.train().recompute_activations()
    network.stages.linear.eval()
    mirrored = network.with_flips()
    assert mirrored.with_flips() is mirrored
    assert mirrored.model_args == {**network.model_args, "mirror": True}
    linear = mirrored.stages.mirrored.inner.linear
    assert linear is network.stages.linear
    assert linear.recompute_activations
    assert (mirrored.training, mirrored.stages.mirrored.training, linear.training) == (True, True, False)


def test_training_without_flips_is_refused(tmp_path):
    run = tiny(tmp_path)
    run = dataclasses.replace(run, model_args={**run.model_args, "mirror": True})
    with pytest.raises(ValueError, match="--flip"):
        train(run)
    run = dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, flip=True))
    trained = train(run).network
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(lipflow.load(tmp_path).eval()(x), trained.eval()(x))


def test_constants_are_those_of_the_network(pair):
    network, mirrored = pair
    assert lipflow.lipschitz_bound(mirrored) == lipflow.lipschitz_bound(network)
    plain, frozen = lipflow.freeze(network), lipflow.freeze(mirrored)
    assert frozen.lipschitz == plain.lipschitz
    torch.testing.assert_close(frozen.pair_bounds, plain.pair_bounds, rtol=1e-12, atol=0)
    assert plain.rounding < frozen.rounding < 1.01 * plain.rounding
