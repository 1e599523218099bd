"""Accuracy on held-out images when a run has ended: clean, and certified *exactly*, by the frozen network.

During a run certified accuracy is an estimate (`estimate`). This is what `lipflow certify` says of the same images.
"""

from collections.abc import Callable, Sequence

import torch

from lipflow.data import Split
from lipflow.frozen import CHUNK, certify, freeze
from lipflow.models import Network
from lipflow.train.accuracy import Accuracy
from lipflow.train.distributed import Ranks
from lipflow.train.progress import told
from lipflow.train.recipe import radius


def exact(
    network: Network, split: Split, radii: Sequence[str], ranks: Ranks, say: Callable[[str], object] = lambda line: None
) -> Accuracy:
    """Freeze a network and certify a split, each rank its share. The network is left as it was.

    `say` is told now and then how far this rank is.
    """
    training = network.training
    try:
        frozen = freeze(network.eval())
    finally:
        network.train(training)
    counts = [0.0] * (1 + len(radii))
    mine = ranks.share(torch.arange(len(split)))
    for chunk in told(mine.split(CHUNK), "certifying", say):
        found = certify(frozen, split.images[chunk])
        right = found.label == split.labels[chunk]
        counts[0] += float(right.sum())
        for i, text in enumerate(radii, 1):
            counts[i] += float((right & found.certified(radius(text))).sum())
    clean, *certified = (count / len(split) for count in ranks.sum(counts))
    return Accuracy(len(split), clean, dict(zip(radii, certified, strict=True)))
