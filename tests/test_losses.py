"""Losses against naive loops, in float64."""

import math

import pytest
import torch
from torch import nn

import lipflow
from lipflow.blocks import LastLayerNormalization, Truncate
from lipflow.losses import (
    LOSSES,
    CertificateRegularisation,
    CrossEntropy,
    MultiMargin,
    OffsetCrossEntropy,
    radii,
)

CLASSES = 5
HEADS = {"truncate": lambda: Truncate(CLASSES), "lln": lambda: LastLayerNormalization(7, CLASSES).double()}
MAKE = {
    "multi-margin": lambda: MultiMargin(0.7),
    "cross-entropy": CrossEntropy,
    "offset-cross-entropy": lambda: OffsetCrossEntropy(0.3, 0.25),
    "certificate": lambda: CertificateRegularisation(0.1, lipschitz=4.0),
}


@pytest.fixture
def batch():
    torch.manual_seed(0)
    return torch.randn(9, CLASSES, dtype=torch.float64), torch.randint(CLASSES, (9,))


def _multi_margin(f, y, d):
    return sum(max(0.0, 0.7 - f[y] + f[j]) for j in range(CLASSES) if j != y) / CLASSES


def _cross_entropy(f, y, d):
    return -math.log(math.exp(f[y]) / sum(math.exp(v) for v in f))


def _offset(f, y, d):
    return _cross_entropy([(v - 0.3 * (j == y)) / 0.25 for j, v in enumerate(f)], y, d)


def _certificate(f, y, d):
    certificate = min((f[y] - f[j]) / (4 * d[y][j]) for j in range(CLASSES) if j != y)
    return _cross_entropy(f, y, d) - 0.1 * max(0.0, certificate)


NAIVE = {
    "multi-margin": _multi_margin,
    "cross-entropy": _cross_entropy,
    "offset-cross-entropy": _offset,
    "certificate": _certificate,
}


def _distances(head):
    """Straight from the definition: √2, or the distance of the unit rows."""
    if isinstance(head, Truncate):
        return [[math.sqrt(2)] * CLASSES for _ in range(CLASSES)]
    rows = [[v / math.sqrt(sum(w * w for w in row)) for v in row] for row in head.weight.tolist()]
    return [[math.dist(a, b) for b in rows] for a in rows]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_is_the_naive_loop(name, head, batch):
    torch.manual_seed(1)
    head, loss, (logits, labels) = HEADS[head](), MAKE[name](), batch
    assert type(loss) is LOSSES[name]
    expected = [NAIVE[name](f, y, _distances(head)) for f, y in zip(logits.tolist(), labels.tolist(), strict=True)]
    torch.testing.assert_close(loss.each(logits, labels, head).tolist(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss(logits, labels, head).item(), sum(expected) / 9, rtol=1e-12, atol=1e-12)


def test_multi_margin_is_the_papers():
    """By hand: y = 0 and f = (1, 0.5, -1) leave a shortfall of 0.2 to the second class and none to the third."""
    loss = MultiMargin(0.7)(torch.tensor([[1.0, 0.5, -1.0]]), torch.tensor([0]), Truncate(3))
    assert float(loss) == pytest.approx(0.2 / 3)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_right(name, head, batch):
    head, (logits, labels) = HEADS[head](), batch
    loss = MAKE[name]()
    assert torch.autograd.gradcheck(lambda f: loss.each(f, labels, head), (logits.requires_grad_(),))


def test_the_certificate_moves_the_rows_of_the_head(batch):
    head, (logits, labels) = HEADS["lln"](), batch
    labels = logits.argmax(1)  # certified examples: relu passes their gradient

    def of_weight(weight):
        return torch.func.functional_call(_Constants(head), {"head.weight": weight}, ()).sum()

    assert torch.autograd.gradcheck(of_weight, (head.weight.detach().clone().requires_grad_(),))
    CertificateRegularisation(0.1)(logits, labels, head).backward()
    assert float(head.weight.grad.norm()) > 0


class _Constants(torch.nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self):
        return self.head.pair_constants()


@pytest.mark.parametrize("head", HEADS)
def test_live_constants_agree_with_the_certified_ones(head):
    head = HEADS[head]()
    live = head.pair_constants().detach()
    bounds = lipflow.freeze(nn.Sequential(head), in_shape=(7,)).pair_bounds
    assert bool((live <= bounds * (1 + 1e-12)).all())
    torch.testing.assert_close(live, bounds, rtol=1e-9, atol=1e-9)


def test_radii_are_negative_where_the_label_is_not_predicted(batch):
    logits, labels = batch
    right = logits.argmax(1) == labels
    assert torch.equal(radii(logits, labels, Truncate(CLASSES).pair_constants()) > 0, right)
    assert right.any()
    assert not right.all()


def test_equal_rows_give_no_nan():
    head = LastLayerNormalization(3, 2).double()
    with torch.no_grad():
        head.weight[1] = head.weight[0]
    loss = CertificateRegularisation(0.1)(torch.tensor([[1.0, 0.0]]).double(), torch.tensor([0]), head)
    loss.backward()
    assert math.isfinite(loss.item())
    assert bool(torch.isfinite(head.weight.grad).all())


def test_an_empty_batch_has_no_losses(batch):
    for make in MAKE.values():
        empty = torch.empty(0, CLASSES, requires_grad=True)
        each = make().each(empty, torch.empty(0, dtype=torch.int64), Truncate(CLASSES))
        assert each.shape == (0,)
        each.sum().backward()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MultiMargin(0.0), "margin must be above 0, not 0.0"),
        (lambda: OffsetCrossEntropy(-1.0, 1.0), "offset must be at least 0, not -1.0"),
        (lambda: OffsetCrossEntropy(1.0, 0.0), "temperature must be above 0, not 0.0"),
        (lambda: CertificateRegularisation(-0.1), "gamma must be at least 0, not -0.1"),
    ],
)
def test_bad_numbers_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_one_label_is_not_taken_for_that_of_all_images():
    with pytest.raises(ValueError, match=r"labels are one an image, not \(1,\) for scores of \(8, 10\)"):
        MultiMargin(0.7)(torch.zeros(8, 10), torch.zeros(1, dtype=torch.int64), Truncate(10))


def test_a_head_is_needed_only_where_it_is_looked_at(batch):
    logits, labels = batch
    for name in sorted(set(MAKE) - {"certificate"}):
        assert MAKE[name]()(logits, labels).isfinite()
    with pytest.raises(ValueError, match="the loss certificate needs the head of the network"):
        MAKE["certificate"]()(logits, labels)
