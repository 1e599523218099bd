"""A run as data: through JSON and back, and the differences between two runs."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from lipflow.train import RECIPES, Run
from lipflow.train.run import CHANGEABLE, differences


@pytest.mark.parametrize("model", RECIPES)
def test_from_json_is_the_inverse_of_to_json(model):
    arguments = {"depth": 3, "mean": (0.5, 0.1, 0.2), "sigma": "tanh"}
    run = replace(Run.of(model, "cifar100", "1h30m"), model_args=arguments, out=Path("a/b"), validation_images=7)
    assert Run.from_json(json.loads(json.dumps(run.to_json()))) == run


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"modell": "cpl"}, "run has no field 'modell'"),
        ({"model": 3}, "'model' cannot be 3"),
        ({"seed": 1.5}, "'seed' cannot be 1.5"),
        ({"recipe": {"optimiser": {"type": "adam", "lr": "high"}}}, "'lr' cannot be 'high'"),
        ({"recipe": {"optimiser": {"type": "adam", "momentum": 0.9}}}, "optimiser has no field 'momentum'"),
        ({"recipe": {"optimiser": "adam"}}, "'optimiser' cannot be 'adam'"),
        ({"recipe": {"loss": {"type": "l2"}}}, "the type of 'loss' is one of multi-margin, .* not 'l2'"),
        ({"recipe": {"loss": {"margin": 0.7}}}, "the type of 'loss' .* not None"),
        ({"recipe": {"loss": {"type": "certificate", "lipschitz": 4.0}}}, "loss has no field 'lipschitz'"),
        ({"recipe": {"normalize": "std"}}, "'normalize' cannot be 'std'"),
        ({"recipe": {"flip": 1}}, "'flip' cannot be 1"),
        ({"recipe": {"radii": ["x"]}}, "a radius is a number .* not 'x'"),
        ({"recipe": []}, r"'recipe' cannot be \[\]"),
        ({"budget": "soon"}, "a duration is written as .* not 'soon'"),
        ({"budget": "0s"}, "--budget must be above 0, not '0s'"),
        ({"save_every": "5"}, "not '5'"),
        ({"certify_validation": -1}, "--certify-validation must be at least 0, not -1"),
        ({"seed": 2**64}, "--seed is an integer from"),
        ({"seed": -(2**63) - 1}, "--seed is an integer from"),
    ],
)
def test_from_json_refuses_bad_values(change, words):
    with pytest.raises(ValueError, match=words):
        Run.from_json({**Run().to_json(), **change})


def test_differences_are_flags_that_change_the_result():
    run = Run()
    for other, flags in [
        (replace(run, device="cuda", out=Path("x")), []),
        (replace(run, seed=4), ["--seed 4 (the run has 0)"]),
        (replace(run, recipe=run.recipe.vary(batch_size=3)), ["--batch-size 3 (the run has 128)"]),
        (
            replace(run, recipe=run.recipe.vary(loss="certificate")),
            ["--loss certificate (the run has multi-margin)", "--gamma 0.1 (the run has None)"],
        ),
    ]:
        assert list(map(str, differences(run, other))) == flags
    assert set(CHANGEABLE) < {field.name for field in fields(Run)}
