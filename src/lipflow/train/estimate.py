"""Accuracy on held-out images during training: clean, and certified by *estimate*.

The norms of a live network are power-iteration estimates, from below, so these radii may be too large. They are good
to watch and to select by; a certificate comes from `lipflow.certify` on the frozen network.
"""

import math
from collections.abc import Sequence

import torch

from lipflow.blocks import Center
from lipflow.bound import Domain
from lipflow.data import Split, to_unit
from lipflow.flows import Flow
from lipflow.flows.cell import REFINE, Descent
from lipflow.losses import radii as certified_radii
from lipflow.models import Network
from lipflow.train.accuracy import Accuracy
from lipflow.train.distributed import Ranks
from lipflow.train.recipe import radius


@torch.no_grad()
def estimate(network: Network, split: Split, radii: Sequence[str], batch_size: int, ranks: Ranks) -> Accuracy:
    """Evaluate a live network on a split, each rank its share. Evaluation changes no buffer."""
    training = network.training
    network.eval()
    pairs = network.head.pair_bounds().to(ranks.device, torch.float32) * lipschitz_estimate(network)
    counts = [0.0] * (1 + len(radii))
    for batch in ranks.share(torch.arange(len(split))).split(batch_size):
        x, y = to_unit(split.images[batch].to(ranks.device)), split.labels[batch].to(ranks.device)
        radius_of = certified_radii(network(x), y, pairs)
        counts[0] += float((radius_of > 0).sum())
        for i, text in enumerate(radii, 1):
            counts[i] += float((radius_of > float(radius(text))).sum())
    network.train(training)
    clean, *certified = (count / len(split) for count in ranks.sum(counts))
    return Accuracy(len(split), clean, dict(zip(radii, certified, strict=True)))


@torch.no_grad()
def lipschitz_estimate(network: Network) -> float:
    """The constant of the map before the head, taking estimated norms for norms.

    It is 1, but for an input divided by std (1/min std) and for relaxed layers of a fixed h (max(1, hℓ̂ - 1)).
    """
    factors = [input_lipschitz(network)]
    for flow in (m for m in network.modules() if isinstance(m, Flow)):
        cell = flow.step.cell(flow.field)
        if isinstance(cell, Descent) and cell.h is not None:
            factors.append(max(1.0, cell.h * float(cell.field.smoothness_estimate(Domain(), False, REFINE)) - 1))
    return math.prod(factors)


def input_lipschitz(network: Network) -> float:
    """The constant of centring and scaling: 1, or 1/min std."""
    return math.prod(m.bound(Domain()).lipschitz for m in network.modules() if isinstance(m, Center))
