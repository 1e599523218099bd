"""Accuracy on held-out images: clean and certified, by estimate during a run and exactly at its end.

During training the norms of layers are estimated by power iteration, from below, so the estimated radii may be too
large. They serve to monitor a run and to select the best network. `certify_split` freezes the network and gives the
radii of `lipflow certify`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipflow.certificate import CHUNK_IMAGES, certify
from lipflow.data import Split, to_unit
from lipflow.frozen import freeze
from lipflow.graph import fold, lower
from lipflow.losses import radii as estimated_radii
from lipflow.models import Network
from lipflow.operators import LinearOperator, norm_estimate
from lipflow.primitives import Descent
from lipflow.radius import parse_radius
from lipflow.train.distributed import Ranks
from lipflow.train.run import from_json

POWER_ITERATIONS = 20  # of an estimated norm


@dataclass(frozen=True)
class Accuracy:
    """Fractions of `images`: correct, and correct with a radius above each of the radii."""

    images: int
    clean: float
    certified: dict[str, float]

    @classmethod
    def from_json(cls, value: Any) -> "Accuracy":
        """The inverse of `asdict`; raise on other values."""
        found = from_json("accuracy", value, Accuracy)
        fractions = (found.clean, *found.certified.values())
        if not found.certified or not all(type(number) in (int, float) and 0 <= number <= 1 for number in fractions):
            raise ValueError(f"an accuracy has fractions from 0 to 1, not {value!r}")
        return found

    @property
    def score(self) -> float:
        """The number by which networks are selected: the certified fraction at the first radius."""
        return next(iter(self.certified.values()))

    def describe(self, how: str) -> str:
        """A line of text; `how` says how the radii were obtained, "estimated" or "exact"."""
        certified = "  ".join(f"{name}: {fraction:.1%}" for name, fraction in self.certified.items())
        return f"clean {self.clean:.1%}, certified ({how}) {certified}"


@torch.no_grad()
def estimate(network: Network, split: Split, radii: Sequence[str], batch_size: int, ranks: Ranks) -> Accuracy:
    """The estimated accuracy of a live network on a split; each rank evaluates its share. No buffer changes."""
    training = network.training
    network.eval()
    pairs = pair_estimates(network).to(ranks.device, torch.float32)
    thresholds = torch.tensor([0.0, *(float(parse_radius(text)) for text in radii)], device=ranks.device)
    counts = torch.zeros(len(thresholds))
    for batch in ranks.share(torch.arange(len(split))).split(batch_size):
        x, y = to_unit(split.images[batch].to(ranks.device)), split.labels[batch].to(ranks.device)
        counts += (estimated_radii(network(x), y, pairs)[:, None] > thresholds).sum(0).cpu()
    network.train(training)
    return _accuracy(counts, split, radii, ranks)


def certify_split(
    network: Network,
    split: Split,
    radii: Sequence[str],
    ranks: Ranks,
    through: Callable[[Sequence[Tensor]], Iterable[Tensor]],
) -> Accuracy:
    """Freeze a network and certify a split; each rank certifies its share.

    `through` is applied to the chunks of images of this rank, and may report progress while it iterates over them.
    """
    frozen = freeze(network.eval())
    counts = torch.zeros(1 + len(radii))
    for chunk in through(ranks.share(torch.arange(len(split))).split(CHUNK_IMAGES)):
        found = certify(frozen, split.images[chunk])
        right = found.label == split.labels[chunk]
        counts += torch.stack([right, *(right & found.certified(text) for text in radii)]).sum(1)
    return _accuracy(counts, split, radii, ranks)


def _accuracy(counts: Tensor, split: Split, radii: Sequence[str], ranks: Ranks) -> Accuracy:
    """The fractions from the counts of all ranks."""
    clean, *certified = (count / len(split) for count in ranks.sum(counts.tolist()))
    return Accuracy(len(split), clean, dict(zip(radii, certified, strict=True)))


@torch.no_grad()
def pair_estimates(network: Network) -> Tensor:
    """The Lipschitz constants of fᵢ - fⱼ, with estimates of norms instead of bounds  # (classes, classes).

    The step h = 2/(s‖W‖²) of a Convex Potential Layer contains an estimate of ‖W‖, which is used here.
    """
    graph = lower(network, network.in_shape, live=True)
    steps = (v.primitive for v in graph.vertices if isinstance(v.primitive, Descent))
    known = {id(p.op): math.sqrt(2 / (p.sigma.high * p.h)) for p in steps if p.follows and p.h > 0}

    def norm(op: LinearOperator) -> float:
        return known[id(op)] if id(op) in known else float(norm_estimate(op, iterations=POWER_ITERATIONS))

    return fold(graph, norm).pairs
