"""Attack campaign: every certified test image is attacked just inside of its radius, and none may fall.

A run prints how many attacks it made. Certified accuracy ≤ attacked accuracy ≤ clean accuracy, at every ε.
"""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

import lipflow
from lipflow.attack import PGD, pgd, square_distances
from lipflow.data import to_unit

ALMOST = 1 - 1e-9
EPSILONS = [Fraction(36, 255), Fraction(108, 255), Fraction(2)]


def campaign(trained, attack: PGD, seeds: int = 1) -> int:
    """The number of certified images whose label changed at (1 - 1e-9)·R, printed with the number of attacks."""
    certificates = trained.certificates
    certified = certificates.radius > 0
    radii = certificates.radius[certified] * ALMOST
    x, said = trained.x[certified], certificates.label[certified]
    broken = attacks = 0
    for seed in range(seeds):
        # The label to keep is the one that was certified, be it the true one or not.
        found = pgd(trained.frozen, x, said, [radii], replace(attack, seed=seed))
        attacks += len(x) * attack.restarts
        broken += int(found.success.sum())
        assert bool((found.distance[:, 0] < certificates.radius[certified]).all())
        # What the attack calls its strongest image really is one inside of the ball.
        squares = square_distances(x, found.images[:, 0])
        assert all(s <= Fraction(r) ** 2 for s, r in zip(squares, radii.tolist(), strict=True))
    print(f"{attacks} attacks of {attack.steps} steps on {len(x)} certified images at (1 - 1e-9)·R: {broken} broke one")
    return broken


def test_no_certified_image_falls(trained):
    assert campaign(trained, PGD()) == 0


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
    assert rows[-1][1] < 0.1 < rows[0][0], "the attack is too weak to mean anything, or the network certifies nothing"


def test_the_campaign_would_notice(trained):
    """Five times the certified radius is no certificate, and the same attack says so."""
    certificates = trained.certificates
    certified = certificates.radius > 0
    x, said, radii = (t[certified][:100] for t in (trained.x, certificates.label, certificates.radius))
    assert int(pgd(trained.frozen, x, said, [5 * radii]).success.sum()) > 30


@pytest.mark.campaign
def test_no_certified_image_falls_to_many_restarts(trained):
    assert campaign(trained, PGD(steps=50, restarts=20, stride=0.1), seeds=2) == 0


class _Single(nn.Module):
    """The frozen network as AutoAttack wants it: float32 in and out. It computes in float64 all the same."""

    def __init__(self, frozen: lipflow.Frozen) -> None:
        super().__init__()
        self.frozen = frozen

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x).float()


@pytest.mark.campaign
def test_no_certified_image_falls_to_autoattack(trained):
    """AutoAttack's standard set (APGD-CE, targeted APGD-DLR, targeted FAB, Square), in bins of nearly equal radius."""
    pyautoattack = pytest.importorskip("pyautoattack", reason="pip install pyautoattack (the `attack` extra) to run it")
    images = to_unit(torch.cat([trained.data.test.images, trained.data.validation.images]))
    certificates = lipflow.certify(trained.frozen, images)
    chosen = (certificates.radius > 1e-4).nonzero().flatten()[:500]
    chosen = chosen[certificates.radius[chosen].argsort()]
    x, said, radius = images[chosen], certificates.label[chosen], certificates.radius[chosen]
    assert len(x) == 500

    def run(part: Tensor, eps: float, **options) -> Tensor:
        attack = pyautoattack.AutoAttack(_Single(trained.frozen), norm="L2", eps=eps, seed=0, device="cpu", **options)
        return attack.run_standard_evaluation(x[part], said[part], batch_size=len(part))[0].clamp(0, 1)

    first = torch.arange(25)
    found = run(first, 2.0, version="custom", attacks=["apgd-ce"])
    assert int((trained.frozen(found).argmax(1) != said[first]).sum()) > 20, "the attack is too weak to mean anything"
    # Sorted by radius, so that the least of a bin is close to all of them.
    broken = 0
    for part in torch.arange(500).split(25):
        found = run(part, float(radius[part].min()) * ALMOST)
        broken += _broken(trained.frozen, x[part], found, said[part], radius[part])
    print(f"AutoAttack on {len(x)} certified images, each at just below the least radius of its bin: {broken} fell")
    assert broken == 0


def _broken(frozen: lipflow.Frozen, x: Tensor, found: Tensor, said: Tensor, radius: Tensor) -> int:
    """How many images have another label at an exact distance below their radius."""
    label = torch.cat([frozen(one[None]).argmax(1) for one in found])
    squares = square_distances(x, found)
    inside = torch.tensor([s < Fraction(r) ** 2 for s, r in zip(squares, radius.tolist(), strict=True)])
    assert math.isfinite(float(found.sum()))
    return int(((label != said) & inside).sum())
