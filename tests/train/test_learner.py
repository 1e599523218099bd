"""A training step: its gradients, its rates and its optimiser, compared with a plain loop."""

from dataclasses import asdict, replace
from unittest.mock import Mock

import pytest
import torch

import lipflow
from lipflow.data import load
from lipflow.train import SGD, Run, train
from lipflow.train.distributed import Ranks
from lipflow.train.learner import Learner, make_network, make_optimiser
from lipflow.train.recipe import SOC
from lipflow.train.schedule import Plan
from tests.train.tiny import ARGS, log, tiny


def make_learner(run: Run) -> Learner:
    data = load("digits", validation=run.validation_images)
    return Learner(make_network(run, data), run, data.train, Ranks(0, 1, torch.device("cpu")))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"padding_mode": "zeros", "cutout": 3, "flip": False},
        {"optimiser": "sgd", "lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 5e-2},
        {"normalize": "mean-std"},
    ],
    ids=str,
)
def test_training_is_a_plain_loop(tmp_path, changes):
    """The weights are those of ten lines of PyTorch that use every number of the recipe."""
    run = tiny(tmp_path, epochs=2, images=50, batch_size=20, **{"crop_padding": 1, "flip": True, **changes})
    run = replace(run, seed=3)
    weights, recipe = train(run).network.state_dict(), run.recipe
    data = load("digits", validation=1447)
    torch.manual_seed(3)
    std = {"std": list(data.std)} if recipe.normalize == "mean-std" else {}
    network = lipflow.build("cpl-digits", mean=list(data.mean), lln=True, **std, **ARGS)
    kind = torch.optim.SGD if isinstance(recipe.optimiser, SGD) else torch.optim.Adam
    optimiser = kind(network.parameters(), **asdict(recipe.optimiser))
    names = ("crop_padding", "padding_mode", "flip", "cutout")
    augmentation = {name: getattr(recipe, name) for name in names}
    for step in range(6):
        batch = list(lipflow.data.batches(50, 20, 3, step // 3))[step % 3]
        images = lipflow.data.augment(data.train.images[batch], batch, 3, step // 3, **augmentation)
        logits, labels = network(lipflow.data.to_unit(images)), data.train.labels[batch]
        optimiser.zero_grad()
        torch.nn.functional.multi_margin_loss(logits, labels, margin=recipe.loss.margin).backward()
        optimiser.param_groups[0]["lr"] = run.recipe.rate(Plan.of(6).progress(step))
        optimiser.step()
    for name, value in network.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "recipe",
    [
        dict(optimiser="sgd", lr=0.1, nesterov=True, weight_decay=5e-4, schedule="multistep"),
        dict(loss="certificate", schedule="constant"),
        dict(loss="offset-cross-entropy", offset=0.5, temperature=0.5, normalize="mean-std"),
        dict(loss="cross-entropy", schedule="exponential", lln=False, normalize="model"),
        dict(precision="bfloat16"),
    ],
)
def test_every_choice_learns(recipe, tmp_path):
    train(tiny(tmp_path, epochs=8, **recipe))
    losses = [line["loss"] for line in log(tmp_path, "epoch")]
    assert losses[-1] < losses[0]


def test_bfloat16_products_change_weights_little_and_not_their_dtype(tmp_path):
    full, low = (train(tiny(tmp_path / p, epochs=1, precision=p)).network for p in ("float32", "bfloat16"))
    for ours, theirs in zip(full.parameters(), low.parameters(), strict=True):
        assert ours.dtype == theirs.dtype == torch.float32
        assert 0 < float((ours - theirs).detach().norm()) < 0.1 * float(ours.detach().norm())


def test_the_certificate_in_the_loss_is_measured_at_the_input(tmp_path):
    """Dividing the input by std stretches it by 1/std, and radii are measured before that."""
    run = replace(tiny(tmp_path, loss="certificate", gamma=0.3), model_args={**ARGS, "std": 0.25})
    learner = make_learner(run)
    given = []
    learner.loss = Mock(each=lambda logits, labels, pairs: given.append(pairs) or logits.sum(1))
    learner.gradients(torch.arange(8), 0)
    torch.testing.assert_close(given, [4 * learner.network.head.pair_constants()])


def test_weight_decay_does_not_apply_to_angles():
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), lipflow.blocks.Householder(4))
    decay = {id(p): g["weight_decay"] for g in make_optimiser(network, SOC.optimiser).param_groups for p in g["params"]}
    assert [decay[id(p)] for p in network.parameters()] == [5e-4, 5e-4, 0]
