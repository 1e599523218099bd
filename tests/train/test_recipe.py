"""Recipes: the published numbers, and the same numbers under flat names."""

import sys
from dataclasses import fields, replace
from subprocess import run as run_process

import pytest
import torch

from lipflow.blocks import LastLayerNormalization
from lipflow.data import load
from lipflow.losses import CertificateRegularisation, CrossEntropy, MultiMargin, OffsetCrossEntropy
from lipflow.models import MODELS, build
from lipflow.train import RECIPES, Recipe, Run
from lipflow.train.learner import make_network
from lipflow.train.recipe import (
    CHOICES,
    CPL,
    CPL_FAST,
    CPL_FAST_LONG,
    SGD,
    Adam,
    flat_names,
    numbers,
    recipe_for,
)  # fmt: skip
from lipflow.train.schedule import Exponential, Linear, MultiStep, Triangular

# fmt: off
COMMON = dict(
    weight_decay=0.0, schedule="triangular", loss="multi-margin", batch_size=256, epochs=200, crop_padding=4,
    padding_mode="reflect", flip=True, cutout=0, normalize="mean", lln=False, radii=("36/255", "72/255", "108/255"),
    precision="float32", threads=0,
)
SOC = COMMON | dict(
    optimiser="sgd", lr=0.1, momentum=0.9, nesterov=False, weight_decay=5e-4, schedule="multistep",
    milestones=(0.5, 0.75), decay=0.1, loss="cross-entropy", batch_size=128, padding_mode="zeros",
)
PUBLISHED = {
    "cpl-s": COMMON | dict(optimiser="adam", lr=1e-3, margin=0.7),
    "cayley-kw3": COMMON | dict(optimiser="adam", lr=1e-2, margin=0.5),
    "bcop-large": COMMON | dict(
        optimiser="adam", lr=1e-3, schedule="exponential", decay=0.96235, margin=0.707, batch_size=128,
        normalize="model", padding_mode="zeros",
    ),
    "soc-20": SOC,
    "soc+-10": SOC | dict(loss="certificate", gamma=0.1, lln=True),
    "cpl-digits": COMMON | dict(
        optimiser="adam", lr=1e-2, margin=1.0, epochs=60, batch_size=128, crop_padding=0, flip=False, lln=True,
        radii=("36/255", "0.25", "0.5", "1"), threads=1,
    ),
    "cpl-fast": COMMON | dict(
        optimiser="adam", lr=1e-2, schedule="linear", loss="offset-cross-entropy", offset=0.35, temperature=0.25,
        epochs=40, batch_size=128, crop_padding=2, lln=True, precision="bfloat16",
    ),
}
# fmt: on


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_numbers(model):
    assert RECIPES[model].flat() == PUBLISHED[model]


def test_the_recipe_of_a_model_and_a_dataset():
    assert set(MODELS) <= set(RECIPES)
    assert Run.of("cpl-s", "cifar10").recipe is CPL
    assert recipe_for("cpl-s", "cifar100") == replace(CPL, lln=True)
    assert recipe_for("cpl-thousand", "cifar10") is CPL
    with pytest.raises(ValueError, match="no recipe for a model 'resnet'; there are cpl, cpl-s"):
        recipe_for("resnet", "digits")


def test_with_an_hour_cpl_fast_has_stronger_augmentation():
    assert replace(CPL_FAST, crop_padding=4, cutout=8) == CPL_FAST_LONG
    recipes = [recipe_for("cpl-fast", "cifar10", time) for time in (None, "30m", "59m", "1h", "2h")]
    assert recipes == [CPL_FAST] * 3 + [CPL_FAST_LONG] * 2
    assert recipe_for("cpl-fast", "digits", "2h") == CPL_FAST, "a square of 8 pixels is all of a digit"
    assert recipe_for("cpl-s", "cifar10", "2h") is CPL, "published recipes do not depend on the time"
    run = Run.of("cpl-fast", "cifar10", "2h")
    assert (run.budget, run.recipe) == ("2h", CPL_FAST_LONG)


# Flat names


def test_flat_names_have_one_meaning():
    """A name is that of a choice, of a field of the recipe, or of numbers of one kind of choice."""
    of_choices = {
        choice: {n.name for kind in kinds.values() for n in numbers(kind)} for choice, kinds in CHOICES.items()
    }
    named = [*(field.name for field in fields(Recipe)), *(name for names in of_choices.values() for name in names)]
    assert len(named) == len(set(named))
    assert set(named) == flat_names()


@pytest.mark.parametrize("model", RECIPES)
def test_vary_is_the_inverse_of_flat(model):
    assert CPL.vary(**RECIPES[model].flat()) == RECIPES[model]


def test_another_choice_keeps_the_numbers_in_common():
    soc = RECIPES["soc-20"]
    assert soc.vary(optimiser="adam").optimiser == Adam(lr=0.1, weight_decay=5e-4)
    assert soc.vary(schedule="exponential", decay=0.5).schedule == Exponential(0.5)
    assert CPL.vary(loss="offset-cross-entropy", offset=0.5).loss == OffsetCrossEntropy(0.5, 1.0)
    assert CPL.vary(lr=0.5, epochs=3) == replace(CPL, optimiser=Adam(lr=0.5), epochs=3)
    assert CPL.vary(loss="certificate").loss == CertificateRegularisation(0.1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"margin": 3.0}, "--margin is for --loss multi-margin; this run has --loss offset-cross-entropy"),
        ({"decay": 0.5}, "--decay is for --schedule multistep or exponential; this run has --schedule linear"),
        (
            {"optimiser": "sgd", "loss": "certificate", "offset": 0.1},
            "--offset is for --loss offset-cross-entropy; this",
        ),
        ({"loss": "l2"}, "--loss is one of multi-margin, .* not 'l2'"),
    ],
)
def test_a_number_that_the_choice_does_not_have_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        CPL_FAST.vary(**changes)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Recipe(precision="float16"), "--precision is one of float32, bfloat16, not 'float16'"),
        (lambda: Recipe(epochs=0), "--epochs must be at least 1, not 0"),
        (lambda: Recipe(batch_size=-1), "--batch-size must be at least 1, not -1"),
        (lambda: Adam(lr=float("nan")), "--lr must be at least 0, not nan"),
        (lambda: SGD(momentum=-1.0), "--momentum must be at least 0, not -1"),
        (lambda: Exponential(-0.5), "--decay must be at least 0, not -0.5"),
        (lambda: MultiStep((100.0, 150.0)), "--milestones are fractions of the run, between 0 and 1, not"),
        (lambda: MultiStep((0.5, 1.0)), "--milestones are fractions"),
        (lambda: MultiStep((float("nan"),)), "--milestones are fractions"),
        (lambda: CPL.vary(margin=0.0), "margin must be above 0"),
        (lambda: Recipe(radii=()), "--radii needs at least one radius"),
        (lambda: Recipe(radii=("-1",)), "a radius is at least 0, not -1"),
        (lambda: Recipe(radii=("1000001",)), "a radius is at most 1000000, .* not '1000001'"),
        (lambda: Recipe(radii=("1e999999999",)), "a radius is at most 1000000, .* not '1e999999999'"),
        (lambda: Recipe(radii=("1E-999999999",)), "its exponent within ±300, not '1E-999999999'"),
        (lambda: Recipe(radii=("1e1/2",)), "a radius is a number such as 36/255 or 0.25, not '1e1/2'"),
    ],
)
def test_bad_values_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_choice_by_its_name_is_refused_in_python():
    with pytest.raises(TypeError, match=r"the loss of a recipe is one of MultiMargin\(...\), .* not 'cross-entropy'"):
        Recipe(loss="cross-entropy")


def test_rates():
    recipe = Recipe(optimiser=SGD(lr=0.1), schedule=MultiStep((0.5,), 0.1), loss=CrossEntropy())
    assert [recipe.rate(progress) for progress in (0.1, 0.6)] == pytest.approx([0.1, 0.01])
    assert Recipe(optimiser=Adam(1.0), schedule=Linear()).rate(0.1) == pytest.approx(0.5)
    assert Recipe(optimiser=Adam(2.0), schedule=Triangular(), loss=MultiMargin()).rate(0.4) == 2.0
    bcop = RECIPES["bcop-large"]
    assert bcop.rate(199.5 / 200) == pytest.approx(1e-3 * 0.96235**199)


# The network of a recipe


@pytest.mark.parametrize("model", RECIPES)
def test_the_recipe_says_what_its_network_ends_in(model):
    """`lln` is an argument of every builder, so that run.json says what was trained."""
    recipe = RECIPES[model]
    with torch.device("meta"):
        own, trained = build(model), build(model, lln=recipe.lln)
    assert isinstance(trained.head, LastLayerNormalization) == recipe.lln
    assert recipe.lln or not isinstance(own.head, LastLayerNormalization)


def test_a_head_that_a_network_does_not_have_is_refused_and_not_ignored():
    run = Run.of("cpl-fast", "digits")
    with pytest.raises(ValueError, match="cpl-fast ends in last-layer normalization"):
        make_network(replace(run, recipe=replace(run.recipe, lln=False)), load("digits"))


def test_recipes_and_runs_need_no_torch():
    code = "import sys; from lipflow.train import Run; Run.of('cpl-s', 'cifar10'); assert 'torch' not in sys.modules"
    run_process([sys.executable, "-c", code], check=True)
