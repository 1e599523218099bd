"""Attack campaign: every certified test image is attacked just inside of its radius, and none may break.

Certified accuracy ≤ attacked accuracy ≤ clean accuracy, at every ε.
"""

import time
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

import lipflow
from lipflow.attack import PGD, SameDtype, pgd, square_distances
from lipflow.data import to_unit
from tests import campaigns
from tests.soundness.attack_libraries import broken_inside, library

ALMOST = 1 - 1e-9
EPSILONS = [Fraction(36, 255), Fraction(108, 255), Fraction(2)]


def campaign(trained, attack: PGD, seeds: int = 1) -> tuple[int, int]:
    """(attacks, certified images whose label changed at (1 - 1e-9)·R), printed."""
    certificates = trained.certificates
    certified = certificates.radius > 0
    radii = certificates.radius[certified] * ALMOST
    x, predicted = trained.x[certified], certificates.label[certified]
    broken = attacks = 0
    for seed in range(seeds):
        # The certified label must not change, whether it is the true one or not.
        found = pgd(trained.frozen, x, predicted, [radii], replace(attack, seed=seed))
        attacks += len(x) * attack.restarts
        broken += int(found.success.sum())
        assert bool((found.distance[:, 0] < certificates.radius[certified]).all())
        # The strongest image is inside of the ball.
        squares = square_distances(x, found.images[:, 0])
        assert all(s <= Fraction(r) ** 2 for s, r in zip(squares, radii.tolist(), strict=True))
    print(f"{attacks} attacks of {attack.steps} steps on {len(x)} certified images at (1 - 1e-9)·R: {broken} broke one")
    return attacks, broken


def test_no_certified_image_breaks(trained):
    assert campaign(trained, PGD())[1] == 0


def test_certified_at_most_attacked_at_most_clean(trained):
    x, labels = trained.x[:150], trained.labels[:150]
    certificates = lipflow.certify(trained.frozen, x)
    right = certificates.label == labels
    found = pgd(trained.frozen, x, labels, EPSILONS)
    clean = float(right.double().mean())
    rows = []
    for column, eps in enumerate(EPSILONS):
        certified = certificates.certified(eps) & right
        survived = ~found.success[:, column]
        assert not bool((certified & ~survived).any()), "a certified image was broken"
        rows.append((float(certified.double().mean()), float(survived.double().mean())))
        assert rows[-1][0] <= rows[-1][1] <= clean
    print("clean", clean, "certified and attacked", rows)
    assert rows[-1][1] < 0.1 < rows[0][0], "the attack is too weak, or too few images are certified"


def test_images_break_at_five_times_their_radius(trained):
    """The attack is strong enough to find violations."""
    certificates = trained.certificates
    certified = certificates.radius > 0
    x, predicted, radii = (t[certified][:100] for t in (trained.x, certificates.label, certificates.radius))
    assert int(pgd(trained.frozen, x, predicted, [5 * radii]).success.sum()) > 30


@pytest.mark.campaign
def test_no_certified_image_falls_to_many_restarts(trained):
    start, attack, seeds = time.perf_counter(), PGD(steps=50, restarts=20, stride=0.1), 2
    attacks, broken = campaign(trained, attack, seeds)
    certificates, certified = trained.certificates, trained.certificates.radius > 0
    x, predicted, radius = (t[certified] for t in (trained.x, certificates.label, certificates.radius))
    twice = int(pgd(trained.frozen, x, predicted, [2 * radius], attack).success.sum())
    print(f"at 2·R {twice} of {len(x)} images fall")
    assert len(x) > 250
    assert twice > 0, "the attack is too weak"
    campaigns.write(
        "PGD inside of the radius",
        "many_restarts",
        time.perf_counter() - start,
        done=f"{attacks:,} attacks of {attack.steps} steps of {attack.stride}·ε from random starts (seeds 0 and 1): "
        f"each of the {len(x)} certified test images, {attack.restarts * seeds} times at (1 - 10⁻⁹)·R",
        violations=broken,
        control=f"at 2·R {twice} of the {len(x)} images fall",
    )
    assert broken == 0


BIN, COUNT, FAR = 25, 500, 4


@pytest.mark.campaign
def test_no_certified_image_falls_to_autoattack(trained):
    """AutoAttack's standard set (APGD-CE, targeted APGD-DLR, targeted FAB, Square), in bins of nearly equal radius."""
    pyautoattack, start = library("pyautoattack"), time.perf_counter()
    images = to_unit(torch.cat([trained.data.test.images, trained.data.validation.images]))
    certificates = lipflow.certify(trained.frozen, images)
    chosen = (certificates.radius > 1e-4).nonzero().flatten()[:COUNT]
    chosen = chosen[certificates.radius[chosen].argsort()]
    x, predicted, radius = images[chosen], certificates.label[chosen], certificates.radius[chosen]
    assert len(x) == COUNT

    def run(part: Tensor, eps: float, **options) -> tuple[int, int]:
        """(labels changed, labels changed inside of the radius)."""
        network = SameDtype(trained.frozen)
        attack = pyautoattack.AutoAttack(network, norm="L2", eps=eps, seed=0, device="cpu", **options)
        found = attack.run_standard_evaluation(x[part], predicted[part], batch_size=len(part))[0].clamp(0, 1)
        return broken_inside(trained.frozen, x[part], found, predicted[part], radius[part])

    bins = torch.arange(COUNT).split(BIN)
    broken = fallen = 0
    for number, part in enumerate(bins, 1):
        least, greatest = float(radius[part].min()), float(radius[part].max())
        broken += run(part, least * ALMOST)[1]
        fallen += run(part, FAR * greatest, version="custom", attacks=["apgd-ce"])[0]
        seconds = time.perf_counter() - start
        print(
            f"bin {number} of {len(bins)}, radii {least:.4f} to {greatest:.4f}: {broken} fell so far inside of their "
            f"radius, {fallen} of {number * BIN} at {FAR} times the greatest; {seconds:.0f} s",
            flush=True,
        )
    assert fallen > COUNT / 5, "the attack is too weak"
    campaigns.write(
        "AutoAttack inside of the radius",
        "autoattack",
        time.perf_counter() - start,
        done=f"AutoAttack's standard set (seed 0) on {COUNT} certified test and validation images, in {len(bins)} bins "
        f"of nearly equal radius, at (1 - 10⁻⁹) times the least radius of the bin",
        violations=broken,
        control=f"at {FAR} times the greatest radius of their bin {fallen} of the {COUNT} images fall to APGD-CE alone",
    )
    assert broken == 0
