"""The rules of claims, on results made up for it: both outcomes, and what cannot be judged."""

import math

import pytest

from experiments import depth, effective, gradient, pgd, relaxed
from experiments.experiment import (
    NOT_JUDGED,
    NOT_SEEN,
    SEEN,
    STUDENT,
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
from experiments.scale import GRID


def row(clean=0.5, certified=0.4, attacked=0.45, images=10000, **more):
    at = dict.fromkeys(GRID, certified)
    standing = dict.fromkeys(("36/255", "0.6", "0.8"), attacked)
    return {
        "clean": clean,
        "certified": at,
        "attacked": standing,
        "standing": standing,
        "images": images,
        "attacked_images": images,
        "contradictions": [],
        "diverged": False,
        **more,
    }


def rule(name, start):
    """The rule of a claim, by the beginning of its text."""
    (experiment,) = experiments([name])
    (claim,) = (c for c in experiment.claims if c.text.startswith(start))
    return claim.rule


@pytest.mark.parametrize(
    ("a", "b", "images", "outcome"),
    [(0.6, 0.5, 10000, SEEN), (0.5, 0.6, 10000, NOT_SEEN), (0.505, 0.5, 10000, NOT_JUDGED), (0.6, 0.5, 50, NOT_JUDGED)],
)
def test_a_difference_is_judged_by_its_noise(a, b, images, outcome):
    rows = Rows({"a": [row(a, images=images)], "b": [row(b, images=images)]})
    verdict = above(rows, ("a", "clean"), ("b", "clean"))
    assert verdict.outcome == outcome
    assert verdict.evidence.endswith(", of images alone)")


def test_the_spread_of_seeds_is_noise():
    steady, shaky = [row(0.6)] * 3, [row(0.5), row(0.7), row(0.6)]
    base = [row(0.55)] * 3
    assert above(Rows({"a": steady, "b": base}), ("a", "clean"), ("b", "clean")).outcome == SEEN
    assert above(Rows({"a": shaky, "b": base}), ("a", "clean"), ("b", "clean")).outcome == NOT_JUDGED


def test_noise_is_students_for_few_seeds_and_two_standard_errors_for_images():
    """For three and three seeds of one spread there are 4 degrees of freedom; for three and one, 2."""
    three, one = Quantity.of([0.4, 0.5, 0.6]), Quantity.of([0.5], of_images=1e-4)
    assert noise_of(three, three) == pytest.approx(2.777 * math.sqrt(2 / 300))
    assert noise_of(three) == pytest.approx(4.303 * math.sqrt(1 / 300))
    assert noise_of(one, one) == pytest.approx(2 * math.sqrt(2e-4))
    assert noise_of(Quantity.of([0.5, 0.5, 0.5], 1e-4)) == pytest.approx(2 * math.sqrt(1e-4))


def test_students_factors():
    student = pytest.importorskip("scipy.stats").t
    for freedom, factor in STUDENT:
        exact = float(student.ppf(0.975, freedom))
        assert exact <= factor < 1.001 * exact


def test_a_difference_can_be_asked_to_be_large():
    rows = Rows({"a": [row(0.65)], "b": [row(0.6)]})
    assert above(rows, ("a", "clean"), ("b", "clean"), by=0.1).outcome == NOT_SEEN
    assert above(rows, ("a", "clean"), ("b", "clean"), by=0.01).outcome == SEEN


def test_every_takes_the_worst():
    yes, no, open_ = Verdict(SEEN, "y"), Verdict(NOT_SEEN, "n"), Verdict(NOT_JUDGED, "o")
    assert every(yes, yes).outcome == SEEN
    assert every(yes, open_).outcome == NOT_JUDGED
    assert every(yes, open_, no) == Verdict(NOT_SEEN, "y; o; n")


def test_a_gain_shrinks_only_if_there_is_one_and_the_noise_allows_it():
    def verdict(clean, certified, images=10000):
        rows = {"a": [row(clean, certified, images=images)], "b": [row(0.5, 0.4, images=images)]}
        return shrinks(Rows(rows), "a", "b", ("clean",), ("certified", "36/255"))

    assert verdict(0.6, 0.41).outcome == SEEN
    assert verdict(0.55, 0.6).outcome == NOT_SEEN
    assert verdict(0.6, 0.49).outcome == NOT_JUDGED
    assert verdict(0.6, 0.41, images=50).outcome == NOT_JUDGED
    assert verdict(0.5, 0.3).outcome == NOT_JUDGED
    assert "no gain to speak of" in verdict(0.4, 0.3).evidence


def test_what_was_not_measured_is_not_judged():
    claim = Claim("a > b", lambda rows: above(rows, ("a", "clean"), ("b", "clean")))
    assert claim.judge("small", Rows({"a": [row()]})) == (NOT_JUDGED, "not measured: b")
    assert claim.judge("small", Rows({"a": [{"run": "x", "diverged": True}], "b": [row()]})).outcome == NOT_JUDGED


def test_a_scale_can_be_too_small_for_a_claim():
    claim = Claim("S < M", lambda rows: holds(True, ""), scales=("paper",), otherwise="only S")
    assert claim.judge("small", Rows({})) == (NOT_JUDGED, "only S")
    assert claim.judge("paper", Rows({})).outcome == SEEN
    assert claim.judge("smoke", Rows({})).outcome == NOT_JUDGED


def test_the_order_of_sizes_is_not_judged_at_the_small_scale():
    (table,) = experiments(["cifar10"])
    (claim,) = (c for c in table.claims if c.text.startswith("S < M"))
    sizes = {label: [row(0.5 + i / 10)] for i, label in enumerate(("CPL-S", "CPL-M", "CPL-L", "CPL-XL"))}
    assert claim.judge("small", Rows(sizes)).outcome == NOT_JUDGED
    assert claim.judge("paper", Rows(sizes)).outcome == SEEN
    backwards = dict(zip(sizes, reversed(list(sizes.values())), strict=True))
    assert claim.judge("paper", Rows(backwards)).outcome == NOT_SEEN


def test_margin():
    between = {"m = 0.7": [row(0.6)]}
    traded = Rows({"m = 0.1": [row(0.7, 0.1, 0.2)], "m = 3": [row(0.5, 0.3, 0.4)], **between})
    reverse = Rows({"m = 0.1": [row(0.5, 0.3, 0.4)], "m = 3": [row(0.7, 0.1, 0.2)], **between})
    for start in ("A small margin", "At ε = 0.8 a large margin certifies", "At ε = 0.8 a large margin is above"):
        assert rule("margin-cifar10", start)(traded).outcome == SEEN
        assert "in between, m = 0.7 " in rule("margin-cifar10", start)(traded).evidence
        assert rule("margin-cifar10", start)(reverse).outcome == NOT_SEEN


def test_relaxed():
    def rows(*clean):
        found = {label: [row(value)] for label, value in zip(relaxed.LABELS.values(), clean, strict=True)}
        return Rows({**found, relaxed.CERTIFIED: [row(0.6)]})

    assert relaxed.cleaner(rows(0.85, 0.8, 0.7)).outcome == SEEN
    assert relaxed.cleaner(rows(0.7, 0.8, 0.85)).outcome == NOT_SEEN
    assert relaxed.relaxing_helps(rows(0.85, 0.8, 0.7)).outcome == SEEN
    assert relaxed.stable(rows(0.8, 0.8, 0.8)).outcome == SEEN
    lost = {**rows(0.8, 0.8, 0.8).measured, "h = 1": [{"diverged": True}]}
    assert relaxed.stable(Rows(lost)) == (NOT_SEEN, "diverged: h = 1")


def test_rivals_and_attacks():
    better = Rows({"CPL-S": [row(0.7, 0.5, 0.6)], "Cayley (KW3)": [row()], "SOC-10": [row()]})
    worse = Rows({"CPL-S": [row(0.3, 0.2, 0.2)], "Cayley (KW3)": [row()], "SOC-10": [row()]})
    for name, start in (("cifar10", "CPL-S is above Cayley"), ("certified-cifar10", "CPL-S certifies more than SOC")):
        assert rule(name, start)(better).outcome == SEEN
        assert rule(name, start)(worse).outcome == NOT_SEEN
    assert pgd.gain("cifar10", pgd.SOC)(better).outcome == SEEN
    assert pgd.gain("cifar10", pgd.SOC, 0.3)(better).outcome == NOT_SEEN
    mixed = Rows({**better.measured, "Cayley (KW3)": [row(attacked=0.9)]})
    assert pgd.gain("cifar10", pgd.SOC)(mixed).outcome == SEEN
    assert pgd.gain("cifar10", pgd.CAYLEY)(mixed).outcome == NOT_SEEN
    assert pgd.sound(better).outcome == SEEN
    assert pgd.sound(Rows({"CPL-S": [row(contradictions=["image 3 was broken"])]})) == (NOT_SEEN, "image 3 was broken")


def test_depth():
    def rows(shallow, deep, epochs=4):
        made = {"100 layers": shallow, "1000 layers": deep}
        kept = {"validation_images": 5000, "epochs": epochs, "diverged": False}
        return Rows({label: [{**kept, "validation": v}] for label, v in made.items()})

    deep = depth.trains("1000 layers")
    assert deep(rows(0.4, 0.3)).outcome == SEEN
    assert deep(rows(0.4, 0.1)).outcome == NOT_SEEN
    assert deep(rows(0.4, 0.1, epochs=1)).outcome == NOT_JUDGED
    assert depth.trains("100 layers")(rows(0.4, 0.1)).outcome == SEEN
    assert depth.no_gain(rows(0.4, 0.35)).outcome == SEEN
    assert depth.no_gain(rows(0.3, 0.4)).outcome == NOT_SEEN
    assert depth.no_gain(rows(0.4, 0.4)).outcome == NOT_JUDGED


def test_gradient_and_effective_constant():
    def norms(*fresh, learned=0.4):
        reached = {"validation": learned, "validation_images": 5000, "epochs": 1, "diverged": False}
        return Rows({"100 layers": [{"gradient": {"fresh": fresh, "trained": (0.5, 0.9)}, **reached}]})

    assert gradient.bounded(norms(0.5, 1.0)).outcome == SEEN
    assert gradient.bounded(norms(0.5, 7.0)).outcome == NOT_SEEN
    assert gradient.alive("fresh")(norms(0.5, 1.0)).outcome == SEEN
    assert gradient.alive("fresh")(norms(1e-11, 1.0)).outcome == NOT_SEEN
    assert gradient.alive("trained")(norms(1e-11, 1.0)).outcome == SEEN
    assert gradient.alive("trained")(norms(1e-11, 1.0, learned=0.1)).outcome == NOT_JUDGED

    def used(ours, theirs, spread=0.0):
        values = {"CPL-S": ours, "Cayley (KW3)": theirs, "SOC-10": theirs}
        seeds = (-spread, 0.0, spread)
        return Rows({k: [{"used": v + s, "used_mean": v + s} for s in seeds] for k, v in values.items()})

    less = effective.less(effective.SOC)
    assert less(used(0.3, 0.9)).outcome == SEEN
    assert less(used(0.9, 0.3)).outcome == NOT_SEEN
    assert less(used(0.5, 0.55, spread=0.1)).outcome == NOT_JUDGED
    assert effective.below(used(1.0, 0.9)).outcome == SEEN
    assert effective.below(used(1.1, 0.9)).outcome == NOT_SEEN


@pytest.mark.parametrize(
    ("seeds", "outcome"),
    [
        ([[[1, 0.1], [2, 0.1], [3, 0.4]]], SEEN),
        ([[[1, 0.3]]], NOT_SEEN),
        ([[[1, 0.1], [2, 0.1], [3, 0.1]]], NOT_SEEN),
        ([[[1, 0.1], [3, 0.4]], [[1, 0.1], [3, 0.1]]], NOT_SEEN),
    ],
    ids=["late", "at once", "never", "never with one seed"],
)
def test_a_late_start_is_a_start(seeds, outcome):
    deep = [{"validations": validations} for validations in seeds]
    rows = Rows({"100 layers": [{"validations": [[1, 0.3]]}], "1000 layers": deep})
    assert rule("depth", "The deepest take some epochs")(rows).outcome == outcome
