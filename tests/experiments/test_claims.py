"""The rules of claims, on made-up results with a known outcome."""

import math

import pytest

from experiments import depth, effective, gradient, pgd, relaxed
from experiments.experiment import (
    NOT_JUDGED,
    NOT_SEEN,
    SEEN,
    Claim,
    Quantity,
    Rows,
    Verdict,
    above,
    every,
    holds,
    noise_of,
    shrinks,
)
from experiments.runner import experiments
from experiments.scale import CERTIFIED_RADII


def row(clean=0.5, certified=0.4, attacked=0.45, images=10000, **more):
    found = {
        "clean": clean,
        "certified": dict.fromkeys(CERTIFIED_RADII, certified),
        "contradictions": [],
        "diverged": False,
    }
    found |= dict.fromkeys(("images", "attacked_images", "validation_images"), images)
    return {**found, "attacked": dict.fromkeys(("36/255", "0.6", "0.8"), attacked), **more}


def rows(**of_labels):
    """Rows of one seed each."""
    return Rows({label: [found] for label, found in of_labels.items()})


def claim(name, start):
    """The claim of an experiment whose text begins with `start`."""
    (experiment,) = experiments([name])
    (found,) = (c for c in experiment.claims if c.text.startswith(start))
    return found


@pytest.mark.parametrize(
    ("a", "b", "options", "outcome"),
    [
        (row(0.6), row(0.5), {}, SEEN),
        (row(0.5), row(0.6), {}, NOT_SEEN),
        (row(0.505), row(0.5), {}, NOT_JUDGED),
        (row(0.6, images=50), row(0.5, images=50), {}, NOT_JUDGED),
        (row(0.65), row(0.6), {"by": 0.01}, SEEN),
        (row(0.65), row(0.6), {"by": 0.1}, NOT_SEEN),
    ],
)
def test_above_compares_a_difference_with_its_noise(a, b, options, outcome):
    verdict = above(rows(a=a, b=b), ("a", "clean"), ("b", "clean"), **options)
    assert verdict.outcome == outcome
    assert verdict.evidence.endswith(", of images alone)")


def test_above_counts_the_spread_of_seeds_as_noise():
    for seeds, outcome in (((0.6, 0.6, 0.6), SEEN), ((0.5, 0.7, 0.6), NOT_JUDGED)):
        measured = Rows({"a": [row(value) for value in seeds], "b": [row(0.55)] * 3})
        assert above(measured, ("a", "clean"), ("b", "clean")).outcome == outcome


def test_noise_of_few_seeds_is_students_and_of_images_two_standard_errors():
    """Three and three seeds of the same spread have 4 degrees of freedom, three and one have 2."""
    three, one = Quantity.of([0.4, 0.5, 0.6]), Quantity.of([0.5], of_images=1e-4)
    assert noise_of(three, three) == pytest.approx(2.7764451 * math.sqrt(2 / 300))
    assert noise_of(three) == pytest.approx(4.3026527 * math.sqrt(1 / 300))
    assert noise_of(one, one) == pytest.approx(2 * math.sqrt(2e-4))
    assert noise_of(Quantity.of([0.5, 0.5, 0.5], 1e-4)) == pytest.approx(2 * math.sqrt(1e-4))


def test_every_has_the_worst_outcome():
    yes, no, unknown = Verdict(SEEN, "y"), Verdict(NOT_SEEN, "n"), Verdict(NOT_JUDGED, "u")
    assert every(yes, yes).outcome == SEEN
    assert every(yes, unknown).outcome == NOT_JUDGED
    assert every(yes, unknown, no) == Verdict(NOT_SEEN, "y; u; n")


@pytest.mark.parametrize(
    ("clean", "certified", "images", "outcome"),
    [
        (0.6, 0.41, 10000, SEEN),
        (0.55, 0.6, 10000, NOT_SEEN),
        (0.6, 0.49, 10000, NOT_JUDGED),
        (0.6, 0.41, 50, NOT_JUDGED),
        (0.5, 0.3, 10000, NOT_JUDGED),  # no gain at first
        (0.4, 0.3, 10000, NOT_JUDGED),
    ],
)
def test_shrinks_needs_a_gain_that_is_larger_than_its_noise(clean, certified, images, outcome):
    measured = rows(a=row(clean, certified, images=images), b=row(0.5, 0.4, images=images))
    assert shrinks(measured, "a", "b", ("clean",), ("certified", "36/255")).outcome == outcome


def test_a_claim_without_its_numbers_cannot_be_judged():
    compare = Claim("a > b", lambda rows: above(rows, ("a", "clean"), ("b", "clean")))
    assert compare.judge("small", rows(a=row())) == (NOT_JUDGED, "not measured: b")
    assert compare.judge("small", rows(a={"diverged": True}, b=row())).outcome == NOT_JUDGED


def test_a_claim_cannot_be_judged_at_other_scales_than_its_own():
    large = Claim("S < M", lambda rows: holds(True, ""), scales=("paper",), otherwise="only S")
    assert large.judge("small", Rows({})) == (NOT_JUDGED, "only S")
    assert large.judge("paper", Rows({})).outcome == SEEN
    assert large.judge("smoke", Rows({})).outcome == NOT_JUDGED


SIZES = ("CPL-S", "CPL-M", "CPL-L", "CPL-XL")
BETTER = {"CPL-S": [row(0.7, 0.5, 0.6)], "Cayley (KW3)": [row()], "SOC-10": [row()]}
WORSE = {"CPL-S": [row(0.3, 0.2, 0.2)], "Cayley (KW3)": [row()], "SOC-10": [row()]}
MARGINS = {"m = 0.1": [row(0.5, 0.3, 0.4)], "m = 0.7": [row(0.6)], "m = 3": [row(0.7, 0.1, 0.2)]}


def fixed_steps(*clean, **more):
    found = {label: [row(value, **more)] for label, value in zip(relaxed.LABELS.values(), clean, strict=True)}
    return {**found, relaxed.CERTIFIED: [row(0.6)]}


def deep(shallow, deepest, epochs=4):
    return {
        label: [row(validation=value, epochs=epochs)]
        for label, value in (("100 layers", shallow), ("1000 layers", deepest))
    }


def norms(*fresh, learned=0.4):
    return {"100 layers": [row(gradient={"fresh": fresh, "trained": (0.5, 0.9)}, validation=learned, epochs=1)]}


def used(ours, theirs, spread=0.0):
    values = {"CPL-S": ours, "Cayley (KW3)": theirs, "SOC-10": theirs}
    return {k: [{"used": v + s, "used_mean": v + s} for s in (-spread, 0.0, spread)] for k, v in values.items()}


def starts(*seeds):
    """Accuracies of the deepest network at its steps, for each seed; the shallowest has learned at step 1."""
    deepest = [{"accuracies": list(enumerate(values, 1))} for values in seeds]
    return {"100 layers": [{"accuracies": [(1, 0.3)]}], "1000 layers": deepest}


@pytest.mark.parametrize(
    ("rule", "measured", "outcome"),
    [
        *(
            (claim("margin-cifar10", start).rule, MARGINS, NOT_SEEN)
            for start in ("A small", "At ε = 0.8 a large margin i")
        ),
        (claim("cifar10", "S < M").rule, {label: [row(0.5 + i / 10)] for i, label in enumerate(SIZES)}, SEEN),
        (claim("cifar10", "S < M").rule, {label: [row(0.5 - i / 10)] for i, label in enumerate(SIZES)}, NOT_SEEN),
        (relaxed.higher_clean_accuracy, fixed_steps(0.7, 0.8, 0.85), NOT_SEEN),
        (relaxed.relaxing_helps, fixed_steps(0.5, 0.8, 0.7), NOT_SEEN),
        (relaxed.stable, fixed_steps(0.8, 0.8, 0.8, diverged=True), NOT_SEEN),
        (claim("cifar10", "CPL-S is above Cayley").rule, BETTER, SEEN),
        (claim("certified-cifar10", "CPL-S certifies more than SOC").rule, WORSE, NOT_SEEN),
        (pgd.gain("cifar10", pgd.SOC, 0.3), BETTER, NOT_SEEN),
        (pgd.gain("cifar10", pgd.CAYLEY), WORSE, NOT_SEEN),
        (pgd.sound, {"CPL-S": [row(contradictions=["image 3 was broken"])]}, NOT_SEEN),
        (depth.trains("1000 layers"), deep(0.4, 0.3), SEEN),
        (depth.trains("1000 layers"), deep(0.4, 0.1), NOT_SEEN),
        (depth.trains("1000 layers"), deep(0.4, 0.1, epochs=1), NOT_JUDGED),
        (depth.no_gain, deep(0.4, 0.35), SEEN),
        (depth.no_gain, deep(0.3, 0.4), NOT_SEEN),
        (depth.no_gain, deep(0.4, 0.4), NOT_JUDGED),
        (depth.late_start, starts([0.1, 0.1, 0.4]), SEEN),
        (depth.late_start, starts([0.3]), NOT_SEEN),
        (depth.late_start, starts([0.1, 0.1, 0.1]), NOT_SEEN),
        (depth.late_start, starts([0.1, 0.4], [0.1, 0.1]), NOT_SEEN),
        (gradient.bounded, norms(0.5, 7.0), NOT_SEEN),
        (gradient.alive("fresh"), norms(0.5, 1.0), SEEN),
        (gradient.alive("trained"), norms(1e-11, 1.0), SEEN),
        (gradient.alive("trained"), norms(1e-11, 1.0, learned=0.1), NOT_JUDGED),
        (effective.less(effective.SOC), used(0.9, 0.3), NOT_SEEN),
        (effective.less(effective.SOC), used(0.5, 0.55, spread=0.1), NOT_JUDGED),
        (effective.below, used(1.1, 0.9), NOT_SEEN),
    ],
)
def test_rules_judge_made_up_results(rule, measured, outcome):
    """The other outcomes of these rules are those of the stored results: see test_runner."""
    assert rule(Rows(measured)).outcome == outcome
