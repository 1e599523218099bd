"""Certificates: the rule in exact arithmetic, and images that are never certified."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lipflow
from lipflow import certificate
from lipflow.certificate import from_logits, require_pixels
from lipflow.cli import main

ROOT = 1.4142135623730951


def _pairs(classes: int, value: float = ROOT) -> torch.Tensor:
    return value * (1 - torch.eye(classes, dtype=torch.float64))


@settings(max_examples=200)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=5), st.floats(0, 0.1), st.floats(1e-3, 10))
def test_the_radius_is_never_above_the_rule(scores, rounding, distance):
    """R·d ≤ f_y - f_j - 4√2·E for every rival, in rationals, and nearly equal."""
    certificates = from_logits(torch.tensor([scores], dtype=torch.float64), _pairs(len(scores), distance), rounding)
    radius, label = float(certificates.radius[0]), int(certificates.label[0])
    rivals = [Fraction(s) for i, s in enumerate(scores) if i != label]
    # 4√2·E ≤ slack, squared to stay rational: 32E² ≤ (margin - R·d)²
    margin = Fraction(scores[label]) - max(rivals)
    slack = margin - Fraction(radius) * Fraction(distance)
    ideal = (float(margin) - 4 * math.sqrt(2) * rounding) / distance
    if radius > 0:
        assert slack >= 0
        assert slack**2 >= 32 * Fraction(rounding) ** 2
        assert radius == pytest.approx(ideal, rel=1e-9, abs=1e-12)
    else:
        assert ideal <= 1e-12


def test_cat_takes_any_iterable():
    rows = [from_logits(torch.randn(n, 3, dtype=torch.float64), _pairs(3), 0.0) for n in (2, 0, 3)]
    for parts in (rows, iter(rows)):
        joined = lipflow.Certificates.cat(parts)
        assert torch.equal(joined.radius, torch.cat([row.radius for row in rows]))
        assert joined.logits.shape == (5, 3)
    with pytest.raises(ValueError, match="certificates of at least one batch"):
        lipflow.Certificates.cat([])


def test_accuracy_counts_right_and_certified_labels():
    scores = torch.tensor([[1.0, 0.0], [0.3, 0.0], [0.0, 2.0], [0.5, 0.5]], dtype=torch.float64)
    certificates, truth = from_logits(scores, _pairs(2, 1.0), 0.0), torch.tensor([0, 0, 0, 0])
    assert certificates.accuracy(truth) == 0.75  # a tie has a label but no radius
    assert certificates.accuracy(truth, 0) == 0.5
    assert certificates.accuracy(truth, "1/2") == 0.25
    assert certificates.accuracy(truth.numpy().astype(np.uint16)) == certificates.accuracy([0, 0, 0, 0]) == 0.75


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0], r"one integer label for each of 2 images, not torch.int64 \(1,\)"),
        ([False, True], r"one integer label for each of 2 images, not torch.bool \(2,\)"),
        ([0.0, 1.0], r"one integer label for each of 2 images, not torch.float32 \(2,\)"),
        ([0, 3], "labels are from 0 to 2; one is 3"),
        ([-1, 0], "labels are from 0 to 2; one is -1"),
    ],
)
def test_accuracy_and_save_refuse_labels_that_are_no_classes(labels, message, tmp_path):
    frozen, x = lipflow.freeze(torch.nn.Linear(4, 3), (4,)), torch.rand(2, 4)
    certificates = lipflow.certify(frozen, x)
    with pytest.raises(ValueError, match=message):
        certificates.accuracy(labels)
    with pytest.raises(ValueError, match=message):
        certificate.save(tmp_path, frozen, certificates, x, labels)
    with pytest.raises(ValueError, match="2 certificates of 1 images"):
        certificate.save(tmp_path, frozen, certificates, x[:1], certificates.label)
    assert not list(tmp_path.iterdir())


def test_certified_is_exact_at_the_boundary():
    certificates = from_logits(torch.tensor([[0.25, 0.0]], dtype=torch.float64), _pairs(2, 1.0), 0.0)
    radius = Fraction(float(certificates.radius[0]))
    for eps, holds in ((radius, False), (radius - Fraction(1, 10**30), True), (radius + Fraction(1, 10**30), False)):
        assert bool(certificates.certified(eps)) == holds


@pytest.mark.parametrize("domain", [(0, 1), (-1, 3)])
def test_bytes_and_floats_have_the_same_radii(domain):
    frozen, pixels = lipflow.freeze(lipflow.build("cpl-digits"), domain=domain), torch.randint(256, (7, 1, 8, 8)).byte()
    from_bytes, from_floats = lipflow.certify(frozen, pixels), lipflow.certify(frozen, pixels.double() / 255)
    assert torch.equal(from_bytes.radius, from_floats.radius)
    assert bool((from_bytes.radius <= from_bytes.paper_radius).all())
    torch.testing.assert_close(from_bytes.radius, from_bytes.paper_radius, rtol=1e-6, atol=1e-9)
    assert len(lipflow.certify(frozen, torch.zeros(0, 1, 8, 8))) == 0


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (156.0, r"contain 156.0 \(divide them by 255, or"),
        (-0.5, r"contain -0.5 \(normalize inside"),
        (1 + 2**-20, r"contain 1.0000009536743164 \(clamp them"),
        (math.nan, "contain nan$"),
    ],
)
def test_pixels_outside_of_the_domain_are_refused_with_a_hint(value, hint):
    with pytest.raises(ValueError, match=hint):
        require_pixels(torch.tensor([0.0, value, 0.5]))


@pytest.mark.parametrize("domain", [(0.0, 1.0), (-2.0, 1.0)])
def test_load_reads_what_save_wrote(domain, tmp_path):
    low, high = domain
    frozen = lipflow.freeze(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), (1, 2, 2), domain)
    images = (low + (high - low) * torch.rand(5, 1, 2, 2)).double()
    truth, found = torch.arange(5) % 3, lipflow.certify(frozen, images)
    certificate.save(tmp_path, frozen, found, images, truth, split="test", network="best")
    loaded = certificate.load(tmp_path)
    expected = dict(vars(found), images=images, truth=truth)
    assert all(np.array_equal(getattr(loaded, name), column.numpy()) for name, column in expected.items())
    assert (loaded.domain, loaded.lipschitz, loaded.rounding) == (domain, frozen.lipschitz, frozen.rounding)
    assert (loaded.split, loaded.network, len(loaded.ledger)) == ("test", "best", len(frozen.ledger))
    if domain != (0.0, 1.0):
        assert main(["attack", str(tmp_path)]) == 2


def test_certificates_do_not_hold_outside_of_the_domain():
    """The example of docs/soundness.md: within R of x = 0 but outside of [0, 1], rounding changes the label."""
    layer = nn.Linear(1, 2).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1e6], [1e6 + 1e-9]], dtype=torch.float64))
        layer.bias.copy_(torch.tensor([1e-5, 0.0], dtype=torch.float64))
    frozen = lipflow.freeze(nn.Sequential(layer), in_shape=(1,))
    found = lipflow.certify(frozen, torch.zeros(1, 1, dtype=torch.float64))
    assert int(found.radius.item()) == 9542
    far = torch.tensor([[9318.2]], dtype=torch.float64)
    assert frozen(far).argmax().item() != found.label.item()
    with pytest.raises(ValueError, match=r"pixels in \[0, 1\]"):
        lipflow.certify(frozen, far)
