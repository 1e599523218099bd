"""Recipes: the published numbers, and the same numbers by flat names."""

from dataclasses import fields, replace

import pytest
import torch

from lipflow.blocks import LastLayerNormalization
from lipflow.data import load
from lipflow.losses import CertificateRegularisation, OffsetCrossEntropy
from lipflow.models import MODELS, build
from lipflow.train import RECIPES, SGD, Adam, Exponential, MultiStep, Recipe, Run
from lipflow.train.learner import make_network
from lipflow.train.recipe import CHOICES, CPL, CPL_FAST, CPL_FAST_LONG, flat_names, recipe_for

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
}
# fmt: on


@pytest.mark.parametrize("model", PUBLISHED)
def test_recipes_have_the_published_numbers(model):
    assert RECIPES[model].flat() == PUBLISHED[model]


def test_recipe_for_a_model_a_dataset_and_a_budget():
    assert set(MODELS) <= set(RECIPES)
    assert Run.of("cpl-s", "cifar10").recipe is CPL
    assert recipe_for("cpl-s", "cifar100") == replace(CPL, lln=True)
    assert recipe_for("cpl-thousand", "cifar10") is CPL
    assert recipe_for("cpl-s", "cifar10", "2h") is CPL, "published recipes do not depend on the budget"
    assert recipe_for("cpl-fast", "digits", "2h") == CPL_FAST, "a square of 8 pixels covers a digit"
    recipes = [Run.of("cpl-fast", "cifar10", time).recipe for time in (None, "30m", "59m", "1h", "2h")]
    assert recipes == [CPL_FAST] * 3 + [CPL_FAST_LONG] * 2
    with pytest.raises(ValueError, match="no recipe for a model 'resnet'; there are cpl, cpl-s"):
        recipe_for("resnet", "digits")


# Flat names


def test_a_flat_name_belongs_to_one_choice():
    names = [field.name for field in fields(Recipe)]
    for kinds in CHOICES.values():
        names += {number.name for kind in kinds.values() for number in fields(kind)}
    assert len(names) == len(set(names))
    assert set(names) == flat_names()


@pytest.mark.parametrize("model", RECIPES)
def test_vary_is_the_inverse_of_flat(model):
    assert CPL.vary(**RECIPES[model].flat()) == RECIPES[model]


def test_vary_keeps_the_numbers_that_two_choices_share():
    soc = RECIPES["soc-20"]
    assert soc.vary(optimiser="adam").optimiser == Adam(lr=0.1, weight_decay=5e-4)
    assert soc.vary(schedule="exponential", decay=0.5).schedule == Exponential(0.5)
    assert CPL.vary(loss="offset-cross-entropy", offset=0.5).loss == OffsetCrossEntropy(0.5, 1.0)
    assert CPL.vary(lr=0.5, epochs=3) == replace(CPL, optimiser=Adam(lr=0.5), epochs=3)
    assert CPL.vary(loss="certificate").loss == CertificateRegularisation(0.1)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: CPL_FAST.vary(margin=3.0), ValueError, "--margin is for --loss multi-margin; this run has --loss off"),
        (lambda: CPL_FAST.vary(decay=0.5), ValueError, "--decay is for --schedule multistep or exponential; this run"),
        (lambda: CPL_FAST.vary(loss="certificate", offset=0.1), ValueError, "--offset is for --loss offset-cross-ent"),
        (lambda: CPL_FAST.vary(loss="l2"), ValueError, "--loss is one of multi-margin, .* not 'l2'"),
        (lambda: CPL.vary(margin=0.0), ValueError, "margin must be above 0"),
        (lambda: Recipe(loss="cross-entropy"), TypeError, r"the loss of a recipe is one of MultiMargin\(...\), .* not"),
        (lambda: Recipe(precision="float16"), ValueError, "--precision is one of float32, bfloat16, not 'float16'"),
        (lambda: Recipe(epochs=0), ValueError, "--epochs must be at least 1, not 0"),
        (lambda: Recipe(batch_size=-1), ValueError, "--batch-size must be at least 1, not -1"),
        (lambda: Recipe(radii=()), ValueError, "--radii needs at least one radius"),
        (lambda: Recipe(radii=("-1",)), ValueError, "a radius is at least 0, not -1"),
        (lambda: Adam(lr=float("nan")), ValueError, "--lr must be at least 0, not nan"),
        (lambda: SGD(momentum=-1.0), ValueError, "--momentum must be at least 0, not -1"),
        (lambda: Exponential(-0.5), ValueError, "--decay must be at least 0, not -0.5"),
        (lambda: MultiStep((0.5, 1.0)), ValueError, "--milestones are fractions"),
        (lambda: MultiStep((float("nan"),)), ValueError, "--milestones are fractions"),
    ],
)
def test_recipes_refuse_bad_values(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_rates_are_factors_of_the_learning_rate():
    assert Recipe(optimiser=Adam(2.0)).rate(0.4) == 2.0
    assert RECIPES["bcop-large"].rate(199.5 / 200) == pytest.approx(1e-3 * 0.96235**199)


# The network of a recipe


@pytest.mark.parametrize("model", RECIPES)
def test_lln_of_the_recipe_is_the_head_of_the_network(model):
    recipe = RECIPES[model]
    with torch.device("meta"):
        own, trained = build(model), build(model, lln=recipe.lln)
    assert isinstance(trained.head, LastLayerNormalization) == recipe.lln
    assert recipe.lln or not isinstance(own.head, LastLayerNormalization)


def test_a_network_refuses_a_head_that_it_cannot_have():
    run = Run.of("cpl-fast", "digits")
    with pytest.raises(ValueError, match="cpl-fast ends in last-layer normalization"):
        make_network(replace(run, recipe=replace(run.recipe, lln=False)), load("digits"))
