"""A run as data: through JSON and back, and what differs between two runs."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from lipflow.train import RECIPES, Run
from lipflow.train.run import CHANGEABLE, differences


@pytest.mark.parametrize("model", RECIPES)
def test_json_round_trip(model):
    run = replace(
        Run.of(model, "cifar100"), model_args={"depth": 3, "mean": [0.5, 0.1, 0.2], "sigma": "tanh"}, out=Path("a/b"),
        data_dir=Path("c"), budget="1h30m", validation_images=7,
    )  # fmt: skip
    assert Run.from_json(json.loads(json.dumps(run.to_json()))) == run


def test_json_is_nested():
    recipe = Run.of("cpl-fast", "cifar10").to_json()["recipe"]
    assert recipe["optimiser"] == {"type": "adam", "lr": 0.01, "weight_decay": 0.0}
    assert recipe["loss"] == {"type": "offset-cross-entropy", "offset": 0.35, "temperature": 0.25}
    assert recipe["epochs"] == 40


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"modell": "cpl"}, "run has no field 'modell'"),
        ({"model": 3}, "the field 'model' cannot be 3"),
        ({"seed": 1.5}, "the field 'seed' cannot be 1.5"),
        ({"recipe": {"optimiser": {"type": "adam", "lr": "high"}}}, "the field 'lr' cannot be 'high'"),
        ({"recipe": {"optimiser": {"type": "adam", "momentum": 0.9}}}, "optimiser has no field 'momentum'"),
        ({"recipe": {"optimiser": "adam"}}, "the field 'optimiser' cannot be 'adam'"),
        ({"recipe": {"loss": {"type": "l2"}}}, "the type of 'loss' is one of multi-margin, .* not 'l2'"),
        ({"recipe": {"loss": {"margin": 0.7}}}, "the type of 'loss' is one of multi-margin, .* not None"),
        ({"recipe": {"loss": {"type": "certificate", "lipschitz": 4.0}}}, "loss has no field 'lipschitz'"),
        ({"recipe": {"normalize": "std"}}, "the field 'normalize' cannot be 'std'"),
        ({"recipe": {"flip": 1}}, "the field 'flip' cannot be 1"),
        ({"recipe": {"radii": ["x"]}}, "a radius is a number such as 36/255 or 0.25, not 'x'"),
        ({"recipe": []}, r"the field 'recipe' cannot be \[\]"),
    ],
)
def test_json_of_another_type_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        Run.from_json({**Run().to_json(), **change})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Run(budget="soon"), "a duration is written as 90s, 30m, 2h or 1h30m, not 'soon'"),
        (lambda: Run(budget="0s"), "--budget must be above 0, not '0s'"),
        (lambda: Run(save_every="5"), "not '5'"),
        (lambda: Run(certify_validation=-1), "--certify-validation must be at least 0, not -1"),
        (lambda: Run(seed=2**64), "--seed is an integer of 64 bits, not"),
        (lambda: Run(seed=-(2**63) - 1), "--seed is an integer of 64 bits, not"),
    ],
)
def test_bad_values_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_tuples_are_stored_as_lists():
    assert Run(model_args={"depth": (3, 4)}).model_args == {"depth": [3, 4]}


def test_differences_name_the_flags():
    run = Run()
    other = replace(run, seed=4, device="cuda", out=Path("x"), recipe=run.recipe.vary(batch_size=3, lr=0.5))
    assert differences(run, run) == []
    assert set(map(str, differences(run, other))) == {
        "--seed 4 (the run has 0)", "--batch-size 3 (the run has 128)", "--lr 0.5 (the run has 0.01)",
    }  # fmt: skip
    other = replace(run, recipe=run.recipe.vary(loss="certificate"))
    assert list(map(str, differences(run, other))) == [
        "--loss certificate (the run has multi-margin)", "--gamma 0.1 (the run has None)",
    ]  # fmt: skip
    assert set(CHANGEABLE) < {field.name for field in fields(Run)}


def test_defaults_are_the_recipe_of_the_default_model():
    assert Run() == Run.of(Run.model, Run.data)
