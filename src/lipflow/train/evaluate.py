"""Accuracy on held-out images during training: clean, and certified by *estimate*.

The norms of a live network are power-iteration estimates, from below, so these radii may be too large. They are good
to watch and to select by; a certificate comes from `lipflow.certify` on the frozen network.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lipflow.blocks import Center
from lipflow.data import Split, to_unit
from lipflow.graph import fold, lower
from lipflow.losses import radii as certified_radii
from lipflow.models import Network
from lipflow.operators import LinearOperator, norm_estimate
from lipflow.primitives import Descent
from lipflow.train.accuracy import Accuracy
from lipflow.train.distributed import Ranks
from lipflow.train.recipe import radius

ITERATIONS = 20  # of the power iteration that stands for a norm


@torch.no_grad()
def estimate(network: Network, split: Split, radii: Sequence[str], batch_size: int, ranks: Ranks) -> Accuracy:
    """Evaluate a live network on a split, each rank its share. Evaluation changes no buffer."""
    training = network.training
    network.eval()
    pairs = pair_estimates(network).to(ranks.device, torch.float32)
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
def pair_estimates(network: Network) -> Tensor:
    """The Lipschitz constants of fᵢ - fⱼ, taking estimated norms for norms  # (classes, classes).

    The step h = 2/(s‖W‖²) of a Convex Potential Layer was made of an estimate of ‖W‖, which is the one that is taken.
    """
    graph = lower(network, network.in_shape, live=True)
    steps = (v.primitive for v in graph.vertices if isinstance(v.primitive, Descent))
    known = {id(p.op): math.sqrt(2 / (p.sigma.high * p.h)) for p in steps if p.follows and p.h > 0}

    def norm(op: LinearOperator) -> float:
        return known[id(op)] if id(op) in known else float(norm_estimate(op, iterations=ITERATIONS))

    return fold(graph, norm).pairs


def input_lipschitz(network: Network) -> float:
    """The constant of centring and scaling: 1, or 1/min std."""
    deviations = (m.std for m in network.modules() if isinstance(m, Center) and m.std is not None)
    return math.prod(1 / float(std.min()) for std in deviations)
