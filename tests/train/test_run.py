"""A run as data: recipes, schedules, durations, and the way through JSON."""

import json
import sys
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from subprocess import run as run_process

import pytest
import torch

from lipflow.blocks import LastLayerNormalization
from lipflow.data import load
from lipflow.losses import LOSSES
from lipflow.models import MODELS, build
from lipflow.train import RECIPES, Recipe, Run
from lipflow.train.duration import format_duration, parse_duration
from lipflow.train.learner import make_network
from lipflow.train.optimiser import OPTIMISERS
from lipflow.train.plan import Plan
from lipflow.train.recipe import CHOICES, CPL, CPL_FAST, OF, radius, recipe_for, require_used
from lipflow.train.run import PLACE, differences
from lipflow.train.schedule import SCHEDULES, rate_at


def test_a_run_needs_no_torch():
    code = "import sys; from lipflow.train import Run; Run.of('cpl-s', 'cifar10'); assert 'torch' not in sys.modules"
    run_process([sys.executable, "-c", code], check=True)


def test_every_model_has_a_recipe():
    assert set(MODELS) <= set(RECIPES)


def test_choices_are_the_tables():
    assert set(CHOICES["loss"]) == set(LOSSES)
    assert set(CHOICES["optimiser"]) == set(OPTIMISERS)
    assert set(CHOICES["schedule"]) == set(SCHEDULES)


@pytest.mark.parametrize("milestones", [(100.0, 150.0), (0.5, 1.0), (0.0, 0.5), (float("nan"),)])
def test_milestones_are_fractions(milestones):
    """Given as epochs, they would never come."""
    with pytest.raises(ValueError, match="--milestones are fractions of the run, between 0 and 1, not"):
        replace(CPL, milestones=milestones)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_seeds_have_64_bits(seed):
    with pytest.raises(ValueError, match="--seed is an integer of 64 bits, not"):
        Run(seed=seed)


def test_the_papers_recipe():
    recipe = Run.of("cpl-s", "cifar10").recipe
    assert recipe is CPL
    assert (recipe.optimiser, recipe.lr, recipe.weight_decay) == ("adam", 1e-3, 0)
    assert (recipe.batch_size, recipe.epochs, recipe.schedule) == (256, 200, "triangular")
    assert (recipe.loss, recipe.margin) == ("multi-margin", 0.7)
    assert (recipe.pad, recipe.pad_mode, recipe.flip, recipe.inputs) == (4, "reflect", True, "mean")
    assert not recipe.lln
    assert recipe_for("cpl-s", "cifar100") == replace(CPL, lln=True)
    assert recipe_for("cpl-thousand", "cifar10") is CPL


def test_the_rivals_recipes():
    cayley, bcop, soc, plus = (RECIPES[name] for name in ("cayley-kw3", "bcop-large", "soc-20", "soc+-10"))
    assert (cayley.optimiser, cayley.lr, cayley.margin, cayley.batch_size) == ("adam", 0.01, 0.5, 256)
    assert (bcop.lr, bcop.margin, bcop.batch_size, bcop.schedule) == (1e-3, 0.707, 128, "exponential")
    assert rate_at(Plan.of(200).progress(199), bcop) == pytest.approx(1e-3 * 0.96235**199)
    assert (soc.optimiser, soc.lr, soc.momentum, soc.weight_decay) == ("sgd", 0.1, 0.9, 5e-4)
    assert (soc.loss, soc.batch_size, soc.pad_mode) == ("cross-entropy", 128, "zeros")
    assert [rate_at(Plan.of(4).progress(step), soc) for step in range(4)] == pytest.approx([0.1, 0.1, 0.01, 0.001])
    assert replace(plus, loss="cross-entropy", lln=False) == soc
    assert (plus.loss, plus.gamma) == ("certificate", 0.1)


def test_with_an_hour_cpl_fast_has_stronger_augmentation():
    short, long = CPL_FAST, replace(CPL_FAST, pad=4, erase=8)
    assert [recipe_for("cpl-fast", "cifar10", time) for time in (None, "30m", "59m", "1h", "2h")] == [short] * 3 + [
        long
    ] * 2
    assert recipe_for("cpl-fast", "digits", "2h") == short, "a square of 8 pixels is all of a digit"
    assert recipe_for("cpl-s", "cifar10", "2h") is CPL, "published recipes are what was published"
    run = Run.of("cpl-fast", "cifar10", "2h")
    assert (run.budget, run.recipe) == ("2h", long)


def test_a_number_that_nothing_looks_at_is_refused():
    base = recipe_for("cpl-fast", "cifar10")
    require_used(base, base)
    require_used(replace(base, loss="multi-margin", margin=0.3), base)
    require_used(replace(base, loss="cross-entropy"), base)
    with pytest.raises(ValueError, match="--margin is for --loss multi-margin; this run has --loss offset-cross-entro"):
        require_used(replace(base, margin=3.0), base)
    with pytest.raises(
        ValueError, match="--decay is for --schedule multistep or exponential; this run has --schedule li"
    ):
        require_used(replace(base, decay=0.5), base)
    assert set(OF) < {field.name for field in fields(Recipe)}
    assert all(set(values) <= set(CHOICES[choice]) for choice, values in OF.values())


def test_no_recipe_is_guessed():
    with pytest.raises(ValueError, match="no recipe for a model 'resnet'; there are cpl, cpl-s"):
        recipe_for("resnet", "digits")


def test_json_round_trip():
    run = replace(
        Run.of("cpl-m", "cifar100"), sizes={"depth": 3, "mean": [0.5, 0.1, 0.2], "sigma": "tanh"}, out=Path("a/b"),
        data_dir=Path("c"), budget="1h30m", validation=7,
    )  # fmt: skip
    assert Run.from_json(json.loads(json.dumps(run.to_json()))) == run


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"modell": "cpl"}, "a Run has no field 'modell'"),
        ({"model": 3}, "the field 'model' cannot be 3"),
        ({"seed": 1.5}, "the field 'seed' cannot be 1.5"),
        ({"recipe": {"lr": "high"}}, "the field 'lr' cannot be 'high'"),
        ({"recipe": {"loss": "l2"}}, "the field 'loss' cannot be 'l2'"),
        ({"recipe": {"flip": 1}}, "the field 'flip' cannot be 1"),
        ({"recipe": {"radii": ["x"]}}, "a radius is a number such as 36/255 or 0.25, not 'x'"),
        ({"recipe": []}, r"a Recipe is a table of fields, not \[\]"),
    ],
)
def test_what_is_no_run_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        Run.from_json({**Run().to_json(), **change})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Recipe(loss="l2"), "--loss is one of multi-margin, .* not 'l2'"),
        (lambda: Recipe(epochs=0), "--epochs must be at least 1, not 0"),
        (lambda: Recipe(batch_size=-1), "--batch-size must be at least 1, not -1"),
        (lambda: Recipe(lr=float("nan")), "--lr must be at least 0, not nan"),
        (lambda: Recipe(radii=()), "--radii needs at least one radius"),
        (lambda: Recipe(radii=("-1",)), "a radius is at least 0, not -1"),
        (lambda: Recipe(radii=("1000001",)), "a radius is at most 1000000, .* not '1000001'"),
        (lambda: Recipe(radii=("1e999999999",)), "a radius is at most 1000000, .* not '1e999999999'"),
        (lambda: Recipe(radii=("1E-999999999",)), "its exponent within ±300, not '1E-999999999'"),
        (lambda: Recipe(radii=("1e1/2",)), "a radius is a number such as 36/255 or 0.25, not '1e1/2'"),
        (lambda: Run(budget="soon"), "a duration is written as 90s, 30m, 2h or 1h30m, not 'soon'"),
        (lambda: Run(budget="0s"), "--budget must be above 0, not '0s'"),
        (lambda: Run(checkpoint_every="5"), "not '5'"),
    ],
)
def test_bad_values_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_differences_name_the_flags():
    run = Run()
    other = replace(run, seed=4, device="cuda", out=Path("x"), recipe=replace(run.recipe, batch_size=3))
    assert differences(run, run) == []
    assert list(map(str, differences(run, other))) == ["--seed 4 (the run has 0)", "--batch-size 3 (the run has 128)"]
    assert set(PLACE) < {field.name for field in fields(Run)}


# Schedules


@pytest.mark.parametrize(
    ("progress", "factor"), [(0, 0), (0.2, 0.5), (0.4, 1), (0.6, 0.525), (0.8, 0.05), (0.9, 0.025), (1, 0)]
)
def test_triangular(progress, factor):
    assert SCHEDULES["triangular"](progress, CPL) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize(("progress", "factor"), [(0, 0), (0.1, 0.5), (0.2, 1), (0.6, 0.5), (1, 0)])
def test_linear(progress, factor):
    assert SCHEDULES["linear"](progress, CPL) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 7, 1000])
def test_no_step_is_taken_at_rate_zero(steps):
    """And the mean rate is the schedule's: half the base times the height of each piece (exact for 5 | steps)."""
    rates = [rate_at(Plan.of(steps).progress(step), CPL) for step in range(steps)]
    assert min(rates) > 0
    assert max(rates) <= CPL.lr
    if steps == 1000:
        mean = CPL.lr * (0.4 * 0.5 + 0.4 * 0.525 + 0.2 * 0.025)
        assert sum(rates) / steps == pytest.approx(mean, rel=1e-12)
        assert rates[-1] < 2 * CPL.lr / 20 / steps * 5


def test_the_other_schedules():
    recipe = replace(CPL, schedule="multistep", lr=0.1, milestones=(0.5, 0.75), decay=0.1)
    assert [rate_at(Plan.of(4).progress(step), recipe) for step in range(4)] == pytest.approx([0.1, 0.1, 0.01, 0.001])
    recipe = replace(CPL, schedule="exponential", lr=1.0, decay=0.5, epochs=3)
    assert [rate_at(Plan.of(6).progress(step), recipe) for step in range(6)] == pytest.approx(
        [1, 1, 0.5, 0.5, 0.25, 0.25]
    )
    assert rate_at(Plan.of(6).progress(3), replace(CPL, schedule="constant")) == CPL.lr


# Durations


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("2h", 7200), ("1h30m", 5400), ("1d", 86400), ("0.5s", 0.5), ("1H 30M", None)],
)
def test_durations(text, seconds):
    if seconds is None:
        with pytest.raises(ValueError, match="not '1H 30M'"):
            parse_duration(text)
    else:
        assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "30", "1.2.3s", "30m2h", "-5s", "nans"])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="a duration is written as"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (59.7, "1m00s"), (185, "3m05s"), (7620, "2h07m"), (97500, "1d03h")]
)
def test_durations_are_written(seconds, text):
    assert format_duration(seconds) == text


def test_radii_are_exact():
    assert radius("36/255") == Fraction(36, 255)
    assert radius("0.1") == Fraction(1, 10)


@pytest.mark.parametrize("model", RECIPES)
def test_the_recipe_says_what_its_network_ends_in(model):
    """`lln` goes to every builder, so that what run.json says is what was trained."""
    recipe = RECIPES[model]
    with torch.device("meta"):
        own, trained = build(model), build(model, lln=recipe.lln)
    assert isinstance(trained.head, LastLayerNormalization) == recipe.lln
    assert recipe.lln or not isinstance(own.head, LastLayerNormalization)


def test_a_head_that_a_network_does_not_have_is_refused_and_not_ignored():
    run = Run.of("cpl-fast", "digits")
    with pytest.raises(ValueError, match="cpl-fast ends in last-layer normalization"):
        make_network(replace(run, recipe=replace(run.recipe, lln=False)), load("digits"))
