"""Losses against naive loops, in float64."""

import math

import pytest
import torch
from torch import nn

import lipflow
from lipflow.blocks import LastLayerNormalization, Truncate
from lipflow.losses import LOSSES, CertificateRegularisation, CrossEntropy, MultiMargin, OffsetCrossEntropy, radii

CLASSES = 5


def naive_multi_margin(f, y, d):
    return sum(max(0.0, 0.7 - f[y] + f[j]) for j in range(CLASSES) if j != y) / CLASSES


def naive_cross_entropy(f, y, d):
    return -math.log(math.exp(f[y]) / sum(math.exp(v) for v in f))


def naive_offset(f, y, d):
    return naive_cross_entropy([(v - 0.3 * (j == y)) / 0.25 for j, v in enumerate(f)], y, d)


def naive_certificate(f, y, d):
    certificate = min((f[y] - f[j]) / d[y][j] for j in range(CLASSES) if j != y)
    return naive_cross_entropy(f, y, d) - 0.1 * max(0.0, certificate)


CASES = {
    "multi-margin": (MultiMargin(0.7), naive_multi_margin),
    "cross-entropy": (CrossEntropy(), naive_cross_entropy),
    "offset-cross-entropy": (OffsetCrossEntropy(0.3, 0.25), naive_offset),
    "certificate": (CertificateRegularisation(0.1), naive_certificate),
}


@pytest.fixture
def batch():
    return torch.randn(9, CLASSES, dtype=torch.float64), torch.randint(CLASSES, (9,))


@pytest.fixture(params=["truncate", "lln"])
def head(request):
    return Truncate(CLASSES) if request.param == "truncate" else LastLayerNormalization(7, CLASSES).double()


def distances(head):
    """By definition: √2, or the distance of the unit rows."""
    if isinstance(head, Truncate):
        return [[math.sqrt(2)] * CLASSES for _ in range(CLASSES)]
    rows = [[v / math.hypot(*row) for v in row] for row in head.weight.tolist()]
    return [[math.dist(a, b) for b in rows] for a in rows]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_the_naive_loop_with_its_gradient(name, head, batch):
    (loss, naive), (logits, labels), pairs = CASES[name], batch, head.pair_constants().detach()
    assert type(loss) is LOSSES[name]
    expected = [naive(f, y, distances(head)) for f, y in zip(logits.tolist(), labels.tolist(), strict=True)]
    torch.testing.assert_close(loss.each(logits, labels, pairs).tolist(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss(logits, labels, pairs).item(), sum(expected) / 9, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda f: loss.each(f, labels, pairs), (logits.requires_grad_(),))
    empty = loss.each(logits[:0], labels[:0], pairs)
    assert empty.shape == (0,)
    empty.sum().backward()


def test_certificate_has_the_gradient_in_the_rows_of_the_head(batch):
    head, logits = LastLayerNormalization(7, CLASSES).double(), batch[0]
    weight = head.weight.detach().clone().requires_grad_()
    del head.weight

    def loss(weight):
        head.weight = weight
        labels = logits.argmax(1)  # certified, so relu is not flat
        return CertificateRegularisation(0.1)(logits, labels, head.pair_constants())

    assert torch.autograd.gradcheck(loss, (weight,))
    assert float(torch.autograd.grad(loss(weight), weight)[0].norm()) > 0


def test_pair_constants_are_at_most_the_certified_ones_and_close(head):
    live = head.pair_constants().detach()
    bounds = lipflow.freeze(nn.Sequential(head), in_shape=(7,)).pair_bounds
    assert bool((live <= bounds * (1 + 1e-12)).all())
    torch.testing.assert_close(live, bounds, rtol=1e-9, atol=1e-9)


def test_radii_are_negative_where_the_label_is_not_predicted(batch):
    logits, labels = batch
    right = logits.argmax(1) == labels
    assert torch.equal(radii(logits, labels, Truncate(CLASSES).pair_constants()) > 0, right)
    assert 0 < int(right.sum()) < len(right)


def test_certificate_is_finite_for_equal_rows():
    head = LastLayerNormalization(3, 2).double()
    with torch.no_grad():
        head.weight[1] = head.weight[0]
    loss = CertificateRegularisation(0.1)(torch.tensor([[1.0, 0.0]]).double(), torch.tensor([0]), head.pair_constants())
    loss.backward()
    assert math.isfinite(loss.item())
    assert bool(torch.isfinite(head.weight.grad).all())


@pytest.mark.parametrize(
    ("make", "quoted"),
    [
        (lambda: MultiMargin(0.0), "margin must be above 0, not 0.0"),
        (lambda: OffsetCrossEntropy(-1.0, 1.0), "offset must be at least 0, not -1.0"),
        (lambda: OffsetCrossEntropy(1.0, 0.0), "temperature must be above 0, not 0.0"),
        (lambda: CertificateRegularisation(-0.1), "gamma must be at least 0, not -0.1"),
        (lambda: MultiMargin()(torch.zeros(8, 10), torch.zeros(1, dtype=torch.int64)), r"not \(1,\) for .* \(8, 10\)"),
        (lambda: CertificateRegularisation()(torch.zeros(1, 2), torch.zeros(1).long()), "needs Lipschitz constants"),
    ],
)
def test_losses_reject_wrong_arguments(make, quoted):
    with pytest.raises(ValueError, match=quoted):
        make()
