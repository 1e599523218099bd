"""Attacks: L2-PGD as the paper's authors run it, and a search for the nearest adversarial image.

A model is any function from pixels in [0, 1], (batch, channels, height, width), to scores (batch, classes) that torch
can differentiate: a live network, or a frozen one in float64.

Note [exact balls]. Projection in floating point can leave an image a few ulps outside of the ball, and a certificate
may not hold there. An image counts only if Σ(x' - x)² ≤ ε² holds for the numbers that the model gets: an upper bound of
the sum (Note [error model]) is compared as a rational. If it is too large, the image is moved a few ulps towards x.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lipflow.data.counter import ATTACK, key
from lipflow.pixels import to_unit
from lipflow.radius import parse_radius
from lipflow.rounding import TINY, gamma, sqrt_up, up

Model = Callable[[Tensor], Tensor]
Radius = Fraction | float | str | Tensor  # one number for all images, or a tensor (n,) with one for each

BISECTIONS = 30  # of the segment from an image to the adversarial image that `nearest` found


@dataclass(frozen=True)
class PGD:
    """`steps` steps of length `stride`·ε from each of `restarts` random starts. The defaults are the authors'.

    Random numbers depend on (seed, restart, index of the image) only. `batch` images are attacked at a time.
    """

    steps: int = 10
    restarts: int = 1
    stride: float = 0.2
    seed: int = 0
    batch: int = 250

    def __post_init__(self) -> None:
        if self.steps < 0 or self.restarts < 1 or self.batch < 1 or not self.stride > 0:
            raise ValueError(f"an attack takes steps ≥ 0, restarts ≥ 1, batch ≥ 1 and stride > 0, not {self}")


@dataclass(frozen=True, eq=False)
class Attacked:
    """The strongest image found in each ball: one row per image, one column per ε.

    A misclassified image is its own adversarial image, at distance 0.
    """

    success: Tensor  # (n, k) bool: the label is not the true one
    images: Tensor  # (n, k, channels, height, width)
    label: Tensor  # (n, k) int64, the labels of these images
    distance: Tensor  # (n, k) float64, not below the true distance


@dataclass(frozen=True, eq=False)
class Nearest:
    """The nearest image found with another label; the image itself if none was found."""

    found: Tensor  # (n,) bool
    images: Tensor  # (n, channels, height, width)
    label: Tensor  # (n,) int64
    distance: Tensor  # (n,) float64, not below the true distance


def pgd(
    model: Model,
    images: Tensor,
    labels: Tensor,
    epsilons: Iterable[Radius] | Radius,
    attack: PGD | None = None,
    indices: Tensor | None = None,
) -> Attacked:
    """Attack images (uint8, or floats in [0, 1]) at one ε, such as "36/255", or at several in increasing order.

    A tensor is one ε with a value for each image, such as `certificates.radius`.

    z ← Π(z + stride·ε·g/‖g‖), where g is the gradient of the cross-entropy at z, and Π projects onto the L2 ball around
    x and then onto [0, 1]. Once an attack on an image has succeeded, the image is not attacked in larger balls.
    `indices` are the positions of the images in their dataset, by default 0, 1, …; they determine the random numbers,
    so that parts of a dataset give the same results as the whole.
    """
    attack = PGD() if attack is None else attack
    x = _receive(model, images, labels)
    indices = torch.arange(len(x)) if indices is None else indices
    many = isinstance(epsilons, Iterable) and not isinstance(epsilons, str | Tensor)
    several: Any = epsilons if many else [epsilons]
    radii = [_radii(eps, len(x)) for eps in several]
    if not radii or any(list(column) != sorted(column) for column in zip(*radii, strict=True)):
        raise ValueError("give at least one ε, in increasing order")
    parts = []
    with _evaluation(model):
        for first in range(0, max(1, len(x)), attack.batch):
            part = slice(first, first + attack.batch)
            balls = [column[part] for column in radii]
            parts.append(_attack(model, x[part], labels[part], balls, attack, indices[part].tolist()))
    return Attacked(*(torch.cat(column) for column in zip(*parts, strict=True)))


def nearest(
    model: Model,
    images: Tensor,
    labels: Tensor,
    epsilons: Sequence[Radius] | None = None,
    attack: PGD | None = None,
    indices: Tensor | None = None,
) -> Nearest:
    """Attack in growing balls, up to the diameter of the box by default; then bisect the segment to the image found.

    The distance found is an upper bound of the distance to the nearest image with another label.
    """
    attack, x = PGD() if attack is None else attack, _receive(model, images, labels)
    grid = _grid(x[0].numel() if len(x) else 1) if epsilons is None else epsilons
    for eps in grid:
        _radii(eps, len(x))  # raises unless there is one radius for all images, or one for each
    indices = torch.arange(len(x)) if indices is None else indices
    parts = []
    for first in range(0, max(1, len(x)), attack.batch):  # pgd returns an image for every ε: keep one batch of them
        part = slice(first, first + attack.batch)
        balls = [eps[part] if isinstance(eps, Tensor) else eps for eps in grid]
        parts.append(_nearest(model, x[part], labels[part], balls, attack, indices[part]))
    return Nearest(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _nearest(
    model: Model, x: Tensor, labels: Tensor, grid: Sequence[Radius], attack: PGD, indices: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`nearest` for one batch."""
    attacked = pgd(model, x, labels, grid, attack, indices)
    rows, column = torch.arange(len(x)), attacked.success.long().argmax(1)
    found = attacked.success.any(1)
    end = torch.where(_per_image(found, x), attacked.images[rows, column], x)
    near, label = end, torch.where(found, attacked.label[rows, column], attacked.label[:, -1])
    low, high = x.new_zeros(len(x)), x.new_ones(len(x))
    with _evaluation(model):
        for _ in range(BISECTIONS if len(x) else 0):
            middle = (low + high) / 2
            z = (x + _per_image(middle, x) * (end - x)).clamp(0, 1)
            wrong, _, predicted = _judge(model, z, labels)
            low, high = torch.where(wrong, low, middle), torch.where(wrong, middle, high)
            nearer = wrong & found
            near, label = torch.where(_per_image(nearer, x), z, near), torch.where(nearer, predicted, label)
    return found, near, label, _distances(square_distances(x, near))


def _attack(
    model: Model, x: Tensor, labels: Tensor, radii: list[list[Fraction]], attack: PGD, indices: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`pgd` for one batch."""
    best = x.clone()
    broken, loss, label = _judge(model, x, labels)
    columns = []
    for ball in radii:
        for restart in range(attack.restarts):
            remaining = (~broken).nonzero().flatten()
            if not len(remaining):
                break
            chosen = [ball[i] for i in remaining.tolist()]
            drawn = [_draw(x[0], key(ATTACK, attack.seed, restart, indices[i])) for i in remaining.tolist()]
            end = _ascend(model, x[remaining], labels[remaining], chosen, attack, drawn)
            end = pull_inside(x[remaining], end, chosen)
            wrong, value, predicted = _judge(model, end, labels[remaining])
            better = wrong | (value > loss[remaining])
            where = remaining[better]
            best[where], loss[where], label[where] = end[better], value[better], predicted[better]
            broken[remaining] = wrong
        distance = _distances(square_distances(x, best), ball)
        columns.append((broken.clone(), best.clone(), label.clone(), distance))
    success, images, predicted, distance = (torch.stack(column, 1) for column in zip(*columns, strict=True))
    return success, images, predicted, distance


def _ascend(
    model: Model, x: Tensor, labels: Tensor, radii: list[Fraction], attack: PGD, drawn: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """The last iterate of PGD. Where the gradient is zero or not finite, a random direction takes its place."""
    radius = torch.tensor([float(r) for r in radii]).to(x)
    start, fallback = (torch.stack(part).to(x) for part in zip(*drawn, strict=True))
    z = project(x, x + _per_image(radius, x) * start, radius)
    for _ in range(attack.steps):
        direction, usable = unit(_gradient(model, z, labels))
        direction = torch.where(_per_image(usable, x), direction, fallback)
        z = project(x, z + attack.stride * _per_image(radius, x) * direction, radius)
    return z


def _draw(like: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """A uniform point of the unit ball and a random unit vector, determined by the seed."""
    generator = torch.Generator("cpu").manual_seed(seed >> 1)
    normal = torch.randn(2, *like.shape, generator=generator, dtype=torch.float64)
    (point, direction), _ = unit(normal)
    length = torch.rand((), generator=generator, dtype=torch.float64) ** (1 / like.numel())
    return point * length, direction


def _gradient(model: Model, z: Tensor, labels: Tensor) -> Tensor:
    """The gradient of the cross-entropy of each image; 0, with a warning, if the scores have none."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        logits = model(z)
        if not logits.requires_grad:
            warnings.warn("the scores have no gradient, so this attack is a random search", stacklevel=2)
            return torch.zeros_like(z)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return torch.autograd.grad(loss, z, materialize_grads=True)[0]


@torch.no_grad()
def _judge(model: Model, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(whether the predicted label is wrong, the loss, the predicted label). With NaN scores it counts as wrong."""
    logits = model(x)
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < logits.shape[1]:
        raise ValueError(f"labels are 0 to {logits.shape[1] - 1}, not {int(labels.min())} to {int(labels.max())}")
    label = logits.argmax(1)
    wrong = (label != labels) | logits.isnan().any(1)
    return wrong, F.cross_entropy(logits, labels, reduction="none"), label


def unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """x/‖x‖ for each image, without overflow or underflow; and whether it exists: not for 0, NaN or infinite values."""
    greatest = x.flatten(1).abs().amax(1)
    usable = (greatest > 0) & torch.isfinite(greatest)
    scaled = x / _per_image(greatest, x)
    return scaled / _per_image(scaled.flatten(1).norm(dim=1), x), usable


def project(x: Tensor, z: Tensor, radius: Tensor) -> Tensor:
    """Project z onto the L2 ball around x, with a radius per image, then onto [0, 1]; up to rounding."""
    away = z - x
    length = away.flatten(1).norm(dim=1)
    shrink = torch.where(length > radius, radius / length, 1.0)
    return (x + _per_image(shrink, x) * away).clamp(0, 1)


def pull_inside(x: Tensor, z: Tensor, radii: Sequence[Fraction]) -> Tensor:
    """Move z towards x in growing steps, from one ulp, until it is within the radius in exact arithmetic."""
    away, step, z = z - x, torch.finfo(x.dtype).eps, z.clone()
    while True:
        squares = square_distances(x, z)
        outside = [i for i, (square, r) in enumerate(zip(squares, radii, strict=True)) if square > r * r]
        if not outside:
            return z
        z[outside] = (x[outside] + max(0.0, 1 - step) * away[outside]).clamp(0, 1)
        step *= 4


def square_distances(x: Tensor, z: Tensor) -> list[Fraction]:
    """Upper bounds of ‖z - x‖² for each image: the difference, its square and the sum round (Note [error model])."""
    away = (z.detach().double() - x.detach().double()).flatten(1)
    terms = away.shape[1]
    underflow, factor = terms * TINY, 1 / (1 - gamma(terms + 3))
    moved = (away != 0).any(1).tolist()  # a computed difference is 0 only for equal numbers
    return [(Fraction(s) + underflow) * factor * m for s, m in zip((away * away).sum(1).tolist(), moved, strict=True)]


def _distances(squares: list[Fraction], radii: list[Fraction] | None = None) -> Tensor:
    lengths = [sqrt_up(square) for square in squares]
    if radii is not None:  # `pull_inside` has proved that the distance is at most ε
        lengths = [min(length, r) for length, r in zip(lengths, radii, strict=True)]
    return torch.tensor([up(length) for length in lengths], dtype=torch.float64)


def _receive(model: Model, images: Tensor, labels: Tensor) -> Tensor:
    """Convert images to the dtype of the model's parameters; float64 if it has none, such as a frozen network."""
    if not (isinstance(images, Tensor) and isinstance(labels, Tensor)):
        given = f"{type(images).__name__} and {type(labels).__name__}"
        raise TypeError(f"images and labels are tensors (torch.as_tensor of arrays and lists), not {given}")
    if labels.shape != images.shape[:1] or labels.dtype != torch.int64:
        given = f"{labels.dtype} of shape {tuple(labels.shape)}"
        raise ValueError(f"give one label per image, as an int64 tensor of shape ({len(images)},), not {given}")
    parameters = model.parameters() if isinstance(model, nn.Module) else iter(())
    dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float64)
    if images.dtype == torch.uint8:
        return to_unit(images, dtype)
    if not images.is_floating_point():
        raise TypeError(f"images are uint8, or floats in [0, 1], not {images.dtype}")
    inside = (images >= 0) & (images <= 1)  # false for NaN
    if not bool(inside.all()):
        raise ValueError(f"images are uint8, or floats in [0, 1], not {images[~inside][0].item()}")
    return images.detach().to(dtype)


def _radii(eps: Radius, count: int) -> list[Fraction]:
    if isinstance(eps, Tensor) and eps.ndim:  # not parsed: radii of certificates may be the largest float64
        values = [Fraction(e) for e in eps.tolist()]
    else:
        values = [parse_radius(eps)] * count
    if len(values) != count or any(v < 0 for v in values):
        raise ValueError(f"ε is a radius of at least 0 for all images, or one for each of the {count}, not {eps}")
    return values


def _grid(pixels: int) -> list[Fraction]:
    """Radii from 1/16 on, each 1.5 times the last, up to the diameter of the box [0, 1]ᵈ."""
    grid = [Fraction(1, 16)]
    while grid[-1] ** 2 < pixels:
        grid.append(grid[-1] * 3 / 2)
    return grid


def _per_image(value: Tensor, x: Tensor) -> Tensor:
    """Reshape one value per image so that it broadcasts against images."""
    return value.reshape(-1, *[1] * (x.ndim - 1))


@contextmanager
def _evaluation(model: Model) -> Iterator[None]:
    """Put the model into evaluation mode without gradients of its parameters, and restore both at the end."""
    modules, parameters = ([*model.modules()], [*model.parameters()]) if isinstance(model, nn.Module) else ([], [])
    modes, learned = [m.training for m in modules], [p.requires_grad for p in parameters]
    for module in modules:
        module.training = False
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for module, training in zip(modules, modes, strict=True):
            module.training = training
        for parameter, requires in zip(parameters, learned, strict=True):
            parameter.requires_grad_(requires)


class SameDtype(nn.Module):
    """Wrap a network so that its scores have the dtype of its images, for attack libraries that need float32.

    AutoAttack fails on float64 scores. The network still computes in float64: classify the images
    that an attack returns with the network itself.
    """

    def __init__(self, network: Model) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).to(x.dtype)
