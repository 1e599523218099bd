"""Rounding attack: points a few ulps apart, on both sides of the decision boundary of the program.

There the margin is of the size of rounding errors, and a certificate that ignores them is violated (Jin, Ohrimenko and
Rubinstein 2022). A violation is two points with different labels whose exact distance, in rationals, is below the
radius of one of them.
"""

import copy
import time
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import lipflow
from lipflow.certificate import from_logits
from lipflow.operators import DenseOperator
from lipflow.operators.certified import certified_operator
from lipflow.primitives import Affine
from lipflow.rounding import sqrt_up
from tests import campaigns
from tests.soundness.attack_libraries import exact_square
from tests.soundness.graphs import Draw, chain, primitives

Subject = Callable[[Tensor], tuple[Tensor, Tensor]]  # images to labels and radii
BISECTIONS, AWAY = 60, [2.0**-k for k in (52, 46, 40, 36, 33, 30, 26, 20, 14, 8)]


class Outcome(NamedTuple):
    """Numbers of pairs searched, pairs with a violation, certified points, and the least distance/radius."""

    pairs: int
    violations: int
    certified: int
    tightest: float


def attack(subject: Subject, x: Tensor, pairs: int, neighbours: int, seed: int = 0) -> Outcome:
    """Search around `pairs` boundary points between images x, which have the dtype of the subject."""
    generator = torch.Generator().manual_seed(seed)
    labels = subject(x)[0]
    chosen = torch.randint(len(x), (20 * pairs, 2), generator=generator)
    chosen = chosen[labels[chosen[:, 0]] != labels[chosen[:, 1]]][:pairs]
    assert len(chosen) == pairs
    violations = certified = 0
    tightest = float("inf")
    for low, high in zip(*_boundary(subject, x[chosen[:, 0]], x[chosen[:, 1]]), strict=True):
        near = [_neighbour(end, generator) for end in (low, high) for _ in range(neighbours)]
        # Farther away from two random images, margins exceed the slack, and radii are positive.
        others = x[torch.randint(len(x), (2,), generator=generator)]
        far = [(e + t * (e - other)).clamp(0, 1) for e, other in zip((low, high), others, strict=True) for t in AWAY]
        points = torch.stack([low, high, *near, *far])
        # One by one, as batches may round differently.
        label, radius = map(torch.cat, zip(*(subject(point[None]) for point in points), strict=True))
        certified += int((radius > 0).sum())
        ratio = _least_ratio(points, label, radius)
        tightest, violations = min(tightest, float(ratio)), violations + (ratio < 1)
    return Outcome(pairs, violations, certified, tightest)


def _boundary(subject: Subject, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Neighbouring points of the segments from a to b with different labels."""
    first = subject(a)[0]
    low, high = torch.zeros(len(a), dtype=torch.float64), torch.ones(len(a), dtype=torch.float64)

    def at(t: Tensor) -> Tensor:
        return (a.double() + t[:, None, None, None] * (b.double() - a.double())).to(a.dtype).clamp(0, 1)

    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        same = subject(at(middle))[0] == first
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    return at(low), at(high)


def _neighbour(point: Tensor, generator: torch.Generator) -> Tensor:
    """Move one of the pixels, or up to three, by an ulp or two."""
    moved = point.flatten().clone()
    inner = ((moved > 0.05) & (moved < 0.95)).nonzero().flatten()
    few = torch.rand((), generator=generator) < 0.8
    count, ulps = (1, 1) if few else torch.randint(1, 4, (2,), generator=generator).tolist()
    for index in inner[torch.randperm(len(inner), generator=generator)[:count]].tolist():
        towards = torch.randint(2, (), generator=generator).to(moved.dtype)
        for _ in range(ulps):
            moved[index] = torch.nextafter(moved[index], towards)
    return moved.reshape(point.shape)


def _least_ratio(points: Tensor, label: Tensor, radius: Tensor) -> Fraction | float:
    """The least distance/radius over pairs with different labels; if it is near 1, in rationals."""
    flat = points.double().flatten(1)
    apart = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
    ratio = apart / torch.maximum(radius[:, None], radius[None]).clamp_min(1e-320)
    ratio = torch.where((label[:, None] != label[None]), ratio, torch.inf)
    i, j = divmod(int(ratio.argmin()), len(points))
    if float(ratio[i, j]) > 1 + 1e-6:
        return float(ratio[i, j])
    square = exact_square(flat[i], flat[j])
    bound = Fraction(float(torch.maximum(radius[i], radius[j]))) ** 2
    return min(float(ratio[i, j]), 1 - 1e-12) if square < bound else max(float(ratio[i, j]), 1.0)


def certified(trained) -> Subject:
    def subject(x: Tensor) -> tuple[Tensor, Tensor]:
        certificates = lipflow.certify(trained.frozen, x)
        return certificates.label, certificates.radius

    return subject


def without_slack(trained) -> Subject:
    """The same network in float64, with E = 0."""

    def subject(x: Tensor) -> tuple[Tensor, Tensor]:
        certificates = from_logits(trained.frozen(x), trained.frozen.pair_bounds, 0.0)
        return certificates.label, certificates.radius

    return subject


def single_precision(trained) -> Subject:
    """The same network in float32 with the certified step sizes, and the paper's radius, margin/√2."""
    live = copy.deepcopy(trained.live).eval()
    flows = [m for m in live.modules() if isinstance(m, lipflow.Flow)]
    steps = [p.h for p in primitives(trained.frozen, "descent")]
    for flow, h in zip(flows, steps, strict=True):
        flow.step = lipflow.ExplicitEuler(h)

    @torch.no_grad()
    def subject(x: Tensor) -> tuple[Tensor, Tensor]:
        logits = live(x)
        best = logits.topk(2).values
        return logits.argmax(1), ((best[:, 0] - best[:, 1]) / 2**0.5).double()

    return subject


def test_no_violation(trained):
    outcome = attack(certified(trained), trained.x, pairs=25, neighbours=12)
    print(outcome)
    assert outcome.violations == 0
    assert outcome.certified > 100, "too few of the points are certified"


@pytest.mark.parametrize(("weakened", "dtype"), [(single_precision, torch.float32), (without_slack, torch.float64)])
def test_the_attack_breaks_networks_without_slack(weakened, dtype, trained):
    outcome = attack(weakened(trained), trained.x.to(dtype), pairs=15, neighbours=16)
    print(outcome)
    assert outcome.violations >= 3


# A network whose Lipschitz constants are attained: the nearest other label is at the radius, up to the slack


def _tight(seed: int) -> lipflow.Frozen:
    """Three rotations or reflections of 3 pixels: every pair bound is attained everywhere."""
    draw = Draw(torch.Generator().manual_seed(seed))
    turns = [certified_operator(DenseOperator(torch.linalg.qr(draw.normal(3, 3)).Q)) for _ in range(3)]
    return chain((3,), *(Affine(op, draw.normal(3)) for op in turns))


def _slope(frozen: lipflow.Frozen, x: Tensor) -> tuple[Tensor, Tensor]:
    """The margin at x, and the direction of its gradient."""
    point = x.clone().requires_grad_()
    best = frozen(point[None])[0].topk(2).values
    (slope,) = torch.autograd.grad(best[0] - best[1], point)
    return (best[0] - best[1]).detach(), slope / slope.norm()


def _overtaken(frozen: lipflow.Frozen, rounding: float, images: int) -> tuple[int, float]:
    """(violations, the least distance - R) at points within a few ulps of the nearest other label.

    The images lie close to a boundary: constants are rounded up by a factor of 1 + 2⁻³², which exceeds E further out.
    """
    generator = torch.Generator().manual_seed(0)
    violations, tightest = 0, float("inf")
    for x in torch.rand(images, 3, generator=generator, dtype=torch.float64) / 2 + 0.25:
        margin, slope = _slope(frozen, x)
        x = x - (margin / 2**0.5 - 1e-9 * torch.rand((), generator=generator)) * slope
        row = from_logits(frozen(x[None]), frozen.pair_bounds, rounding)
        label, radius, slope = int(row.label), float(row.radius), _slope(frozen, x)[1]
        for k in [*range(-20, 20), *range(20, 300, 7)]:
            other = x - (radius + k * 2.0**-53) * slope
            if float(other.min()) < 0 or float(other.max()) > 1 or int(frozen(other[None]).argmax()) == label:
                continue
            square = exact_square(x, other)
            violations += square < Fraction(radius) ** 2
            tightest = min(tightest, float(square / sqrt_up(square) - Fraction(radius)))
    return violations, tightest


def test_no_violation_where_the_constants_are_attained():
    frozen = _tight(0)
    sound, tightest = _overtaken(frozen, frozen.rounding, images=80)
    unsound, _ = _overtaken(frozen, 0.0, images=80)
    print(f"distance - R ≥ {tightest:.3g}, E = {frozen.rounding:.3g}; without slack {unsound} violations")
    assert sound == 0
    assert unsound > 5


PAIRS, NEIGHBOURS = 1200, 40


@pytest.mark.campaign
def test_no_violation_in_a_thousand_pairs(trained):
    """Networks without slack break under the same attack with fewer pairs."""
    start = time.perf_counter()
    outcome = attack(certified(trained), trained.x, PAIRS, NEIGHBOURS, seed=1)
    print(outcome)
    single = attack(single_precision(trained), trained.x.float(), PAIRS // 6, NEIGHBOURS, seed=1)
    double = attack(without_slack(trained), trained.x, PAIRS // 6, NEIGHBOURS, seed=1)
    print("float32:", single, "float64:", double)
    assert outcome.certified > 5000
    assert min(single.violations, double.violations) > 50, "the attack is too weak"
    points = 2 + 2 * NEIGHBOURS + 2 * len(AWAY)
    campaigns.write(
        "rounding at the boundary",
        "thousand_pairs",
        time.perf_counter() - start,
        done=f"{outcome.pairs:,} pairs of points next to each other with different labels (seed 1), and {points} "
        f"points around each, every one evaluated singly; {outcome.certified:,} of them were certified, and the "
        f"nearest point with another label lay at {outcome.tightest:.3g} times the radius or further",
        violations=outcome.violations,
        control=f"of {single.pairs} pairs, without slack {single.violations} have a violation in float32 and "
        f"{double.violations} in float64",
    )
    assert outcome.violations == 0
