"""Attacks: the ball is L2 and exact, batches do not matter, and weak networks break."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lipflow
from lipflow.attack import PGD, nearest, pgd, project, pull_inside, square_distances, unit
from tests.soundness.attack_libraries import exact_square


def _exact(x: Tensor, z: Tensor) -> list[Fraction]:
    """‖z - x‖² of each image, in rationals."""
    return [exact_square(a, b) for a, b in zip(x, z, strict=True)]


def _inside(x: Tensor) -> bool:
    return bool(((x >= 0) & (x <= 1)).all())


def _half_space(direction: list[float], offset: float = 0.0) -> nn.Module:
    """Two classes: the second where direction·x > offset."""
    layer = nn.Linear(len(direction), 2).double()
    with torch.no_grad():
        layer.weight[:] = torch.tensor([[0.0] * len(direction), direction])
        layer.bias[:] = torch.tensor([0.0, -offset])
    return nn.Sequential(nn.Flatten(), layer)


def _undefended() -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4))


def _images(count: int) -> Tensor:
    return torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(0))


def _labels(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


# The ball


def test_project_is_onto_the_l2_ball():
    """It scales the whole step by one factor; a projection onto a cube would clip its long side only."""
    x = torch.full((2, 1, 1, 2), 0.5, dtype=torch.float64)
    step = torch.tensor([[0.3, 0.04], [0.003, 0.004]], dtype=torch.float64).reshape(x.shape)
    away = project(x, x + step, torch.tensor([0.1, 0.1], dtype=torch.float64)) - x
    length = math.hypot(0.3, 0.04)
    torch.testing.assert_close(away[0].flatten(), torch.tensor([0.03, 0.004], dtype=torch.float64) / length)
    torch.testing.assert_close(away[1].flatten(), step[1].flatten(), rtol=1e-12, atol=1e-15)
    # Each image has its own radius, and pixels stay in the box.
    x, radius = torch.zeros(3, 1, 2, 2, dtype=torch.float64), torch.tensor([0.5, 1.0, 9.0], dtype=torch.float64)
    assert project(x, x + 5, radius).flatten(1).norm(dim=1).tolist() == pytest.approx([0.5, 1.0, 2.0])
    assert _inside(project(x, x + 5, radius))


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([torch.float32, torch.float64]), st.floats(1e-6, 3))
def test_pull_inside_is_exact(seed, dtype, radius):
    """The exact distance is at most ε, and the image moves by a few ulps only."""
    generator = torch.Generator().manual_seed(seed)
    x, z = torch.rand(2, 3, 1, 4, 4, generator=generator, dtype=torch.float64).to(dtype)
    z = project(x, z, torch.full((3,), radius, dtype=dtype))
    eps = Fraction(radius)
    pulled = pull_inside(x, z, [eps] * 3)
    assert _inside(pulled)
    assert all(square <= eps**2 for square in _exact(x, pulled))
    lost = (pulled - z).double().flatten(1).norm(dim=1)
    assert float(lost.max()) <= 1e4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e-170, 5e-324])
def test_square_distances_are_upper_bounds(scale):
    x = torch.zeros(2, 1, 2, 2, dtype=torch.float64)
    z = scale * torch.tensor([[1, 0, 3, 1], [0, 0, 0, 0]], dtype=torch.float64).reshape(x.shape)
    above, true = square_distances(x, z), _exact(x, z)
    assert above[0] >= true[0] > 0
    assert above[1] == true[1] == 0
    if scale > 1e-100:
        assert above[0] <= true[0] * (1 + Fraction(1, 10**14))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("radius", [Fraction(36, 255), Fraction(1, 10**7), Fraction(0), Fraction(9)])
def test_pgd_stays_in_its_ball(dtype, radius):
    model, x = _undefended().to(dtype), _images(20).to(dtype)
    labels = model(x).argmax(1)
    found = pgd(model, x, labels, [radius], PGD(restarts=2))
    assert _inside(found.images)
    squares = _exact(x, found.images[:, 0])
    assert all(square <= radius**2 for square in squares)
    assert all(Fraction(d) ** 2 >= s for d, s in zip(found.distance[:, 0].tolist(), squares, strict=True))
    assert torch.equal(model(found.images[:, 0]).argmax(1), found.label[:, 0])
    assert torch.equal(found.success[:, 0], found.label[:, 0] != labels)


def test_pgd_counts_no_image_outside_of_the_ball():
    """The boundary is at a distance of exactly 1/4: nothing can be found at ε = 1/4, and something just above."""
    model, x = _half_space([1.0, 0.0], offset=0.5), torch.tensor([[0.25, 0.5]]).reshape(1, 1, 1, 2).double()
    found = pgd(model, x, _labels(1), ["1/4", Fraction(1, 4) + Fraction(1, 10**6)], PGD(steps=40, restarts=5))
    assert found.success.tolist() == [[False, True]]


# Gradients


@pytest.mark.parametrize("scale", [1.0, 1e-300, 1e300, 0.0, math.nan, math.inf])
def test_unit_works_at_any_scale(scale):
    direction, usable = unit(scale * torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    assert bool(usable) == (0 < scale < math.inf)
    if bool(usable):
        torch.testing.assert_close(direction, torch.tensor([[0.6, 0.8]], dtype=torch.float64))


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return torch.full_like(grads[0], ctx.value), None


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_pgd_without_a_usable_gradient_is_a_random_search(value):
    """It stays in the ball and still finds images that are easy to find."""
    model = _half_space([1.0, 1.0, 1.0, 1.0], offset=2.0)
    x = torch.full((30, 1, 2, 2), 0.499, dtype=torch.float64)
    found = pgd(lambda z: model(_Broken.apply(z, value)), x, _labels(30), ["1/4"])
    assert bool(torch.isfinite(found.images).all())
    assert all(square <= Fraction(1, 16) for square in _exact(x, found.images[:, 0]))
    assert int(found.success.sum()) > 5


def test_no_image_breaks_constant_scores_and_every_image_breaks_nan_scores():
    x, labels = _images(3).double(), _labels(3)
    for attack in (lambda f: pgd(f, x, labels, [1]).success, lambda f: nearest(f, x, labels).found):
        with pytest.warns(UserWarning, match="no gradient"):
            assert not bool(attack(lambda z: torch.tensor([[1.0, 0.0]]).expand(len(z), 2)).any())
    assert bool(pgd(lambda z: z.flatten(1)[:, :2] * math.nan, x, labels, [1]).success.all())  # NaN is a wrong answer


SEVERAL = [np.array([0.25, 0.5]), iter([0.25, 0.5]), (0.25, Decimal("0.5")), {0.25: 1, 0.5: 2}]
ONE = [0.25, "1/4", Fraction(1, 4), np.float32(0.25), torch.tensor(0.25), [0.25], torch.full((3,), 0.25)]


@pytest.mark.parametrize(("given", "radii"), [*((s, ["1/4", "1/2"]) for s in SEVERAL), *((o, ["1/4"]) for o in ONE)])
def test_pgd_takes_radii_in_any_form(given, radii):
    """One number, or one for each image, or several of either."""
    x = _images(3)
    found = pgd(_undefended(), x, _labels(3), given)
    assert found.success.shape == (3, len(radii))
    assert torch.equal(found.images, pgd(_undefended(), x, _labels(3), radii).images)


# Strength


def test_pgd_breaks_an_undefended_network_more_often_at_larger_radii():
    model, x = _undefended(), _images(50)
    found = pgd(model, x, model(x).argmax(1), ["1/20", "1/10", "1/5", "1/2"])
    rates = found.success.double().mean(0).tolist()
    assert bool((found.success[:, 1:] >= found.success[:, :-1]).all())
    assert 0 < rates[0] < rates[-1]
    assert rates[-1] > 0.8
    alone = pgd(model, x, model(x).argmax(1), ["1/20"])
    assert torch.equal(alone.success[:, 0], found.success[:, 0])


def test_nearest_finds_the_boundary_of_a_half_space():
    half_space, distance = _half_space([3.0, 4.0], offset=3.5), (3.5 - 7 * 0.4) / 5  # of the point (0.4, 0.4)
    x = torch.full((4, 1, 1, 2), 0.4, dtype=torch.float64)
    found = nearest(half_space, x, _labels(4), attack=PGD(restarts=3))
    assert bool((found.found & (found.label == 1)).all())
    assert bool(((found.distance >= distance) & (found.distance <= 1.2 * distance)).all())
    assert _inside(found.images)
    assert torch.equal(half_space(found.images).argmax(1), found.label)
    assert all(Fraction(d) ** 2 >= s for d, s in zip(found.distance.tolist(), _exact(x, found.images), strict=True))


def test_pgd_finds_more_with_more_restarts():
    model, x = _undefended(), _images(50)
    labels = model(x).argmax(1)
    once, often = (pgd(model, x, labels, ["1/20"], PGD(steps=1, restarts=r)).success for r in (1, 8))
    assert bool((often >= once).all())
    assert int(often.sum()) > int(once.sum())


def test_misclassified_images_are_at_distance_0():
    model, pixels = _undefended(), (_images(5) * 255).to(torch.uint8)
    x = pixels.float() / 255
    found = pgd(model, pixels, (model(x).argmax(1) + 1) % 4, [0])
    assert bool(found.success.all())
    assert found.distance.tolist() == [[0.0]] * 5
    assert torch.equal(found.images[:, 0], x)  # bytes are read as k/255
    none = pgd(model, x[:0], _labels(0), ["1/10", "1/5"])
    assert (none.success.shape, none.images.shape) == ((0, 2), (0, 2, 1, 4, 4))


# Batches, and the state of the network


def _frozen() -> lipflow.Frozen:
    return lipflow.freeze(lipflow.build("cpl-digits", in_shape=(1, 4, 4)))


@pytest.mark.parametrize("model", [_undefended(), _frozen(), _frozen().module()], ids=["live", "frozen", "module"])
def test_pgd_does_not_depend_on_the_batch(model):
    x = _images(23)
    labels = model(x).argmax(1)
    whole = pgd(model, x, labels, ["1/10"], PGD(restarts=2))
    by_three = pgd(model, x, labels, ["1/10"], PGD(restarts=2, batch=3))
    part = pgd(model, x[10:], labels[10:], ["1/10"], PGD(restarts=2), indices=torch.arange(10, 23))
    for other, rows in ((by_three, slice(None)), (part, slice(10, None))):
        assert torch.equal(whole.success[rows], other.success)
        torch.testing.assert_close(whole.images[rows], other.images, rtol=0, atol=1e-4)
    assert not torch.equal(whole.images, pgd(model, x, labels, ["1/10"], PGD(restarts=2, seed=1)).images)


def test_pgd_leaves_the_network_as_it_was():
    """Modes, weights and gradients; and no parameter requires a gradient during the attack."""
    network, during = lipflow.build("cpl-digits").train(), []
    network.stages.head.eval()
    next(network.parameters()).requires_grad_(False)
    network.register_forward_hook(lambda *_: during.append(any(p.requires_grad for p in network.parameters())))
    before = {k: v.clone() for k, v in network.state_dict().items()}
    learns = [p.requires_grad for p in network.parameters()]
    pgd(network, torch.rand(3, 1, 8, 8), _labels(3), ["1/10"])
    assert set(during) == {False}
    assert (network.training, network.stages.head.training) == (True, False)
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    assert [p.requires_grad for p in network.parameters()] == learns
    assert all(p.grad is None for p in network.parameters())


def test_nearest_does_not_depend_on_the_batch():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    x = torch.rand(7, 1, 2, 2, dtype=torch.float64)
    labels, eps = model(x).argmax(1), [torch.linspace(0.1, 0.4, 7), torch.linspace(0.5, 2, 7)]
    found = [nearest(model, x, labels, eps, PGD(batch=batch)) for batch in (3, 7, 100)]
    for other in found[1:]:
        assert torch.equal(found[0].found, other.found)
        torch.testing.assert_close(found[0].images, other.images)
        torch.testing.assert_close(found[0].distance, other.distance)
    assert bool(found[0].found.any())
    assert nearest(model, x[:0], labels[:0]).images.shape == (0, 1, 2, 2)


# Refusals


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(epsilons=[]), "at least one ε"),
        (dict(epsilons=["1/2", "1/4"]), "increasing"),
        (dict(epsilons=[-1]), "at least 0"),
        (dict(epsilons=[torch.ones(2)]), "one for each of the 3"),
        (dict(images=torch.full((3, 1, 4, 4), 7.0)), "not 7.0"),
        (dict(images=torch.full((3, 1, 4, 4), math.nan)), "not nan"),
        (dict(images=torch.ones(3, 1, 4, 4, dtype=torch.int64)), "not torch.int64"),
        (dict(labels=_labels(2)), "one label per image"),
        (dict(labels=torch.zeros(3)), "int64"),
        (dict(labels=[0, 1, 2]), "images and labels are tensors"),
        (dict(labels=torch.tensor([0, 1, 50])), "labels are 0 to 3, not 0 to 50"),
    ],
)
def test_pgd_refuses_invalid_arguments(change, words):
    with pytest.raises((ValueError, TypeError), match=words):
        pgd(_undefended(), **(dict(images=_images(3), labels=_labels(3), epsilons=[1]) | change))


def test_pgd_settings_are_checked():
    for bad in (dict(steps=-1), dict(restarts=0), dict(stride=0.0), dict(batch=0)):
        with pytest.raises(ValueError, match="an attack takes"):
            PGD(**bad)
