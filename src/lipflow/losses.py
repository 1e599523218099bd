"""Losses for 1-Lipschitz classifiers, by name. They reward margins, as a margin gives a certified radius.

`loss.each` is the loss of each example, and `loss(...)` its mean over the batch. The parameters are fields. torch is
imported only when a loss is computed, so that the help of the command line needs no torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Loss(ABC):
    """A loss of logits (batch, classes) against labels (batch,).

    `pairs` are the Lipschitz constants of fᵢ - fⱼ, `network.pair_constants()`; only `certificate` uses them.
    """

    @abstractmethod
    def each(self, logits: Tensor, labels: Tensor, pairs: Tensor | None = None) -> Tensor:
        """The loss of each example, `(batch,)`."""

    def __call__(self, logits: Tensor, labels: Tensor, pairs: Tensor | None = None) -> Tensor:
        """The mean over the batch."""
        return self.each(logits, labels, pairs).mean()


@dataclass(frozen=True)
class MultiMargin(Loss):
    """(1/K) Σ_{j≠y} max(0, m - f_y + f_j), the paper's loss: every other score should be m below that of the label."""

    margin: float = 0.7

    def __post_init__(self) -> None:
        _require(self.margin > 0, f"margin must be above 0, not {self.margin}")

    def each(self, logits: Tensor, labels: Tensor, pairs: Tensor | None = None) -> Tensor:
        shortfall = (self.margin - gaps(logits, labels)).clamp_min(0)
        return shortfall.scatter(1, labels[:, None], 0).sum(1) / logits.shape[1]


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """-log softmax(f)_y."""

    def each(self, logits: Tensor, labels: Tensor, pairs: Tensor | None = None) -> Tensor:
        return _cross_entropy(logits, labels)


@dataclass(frozen=True)
class OffsetCrossEntropy(Loss):
    """Cross-entropy of (f - offset·onehot(y))/T: `offset` is subtracted from the label's score, and T is a temperature.

    1-Lipschitz logits are close together, so plain cross-entropy never saturates.
    """

    offset: float = 0.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _require(self.offset >= 0, f"offset must be at least 0, not {self.offset}")
        _require(self.temperature > 0, f"temperature must be above 0, not {self.temperature}")

    def each(self, logits: Tensor, labels: Tensor, pairs: Tensor | None = None) -> Tensor:
        offsets = logits.new_zeros(logits.shape).scatter(1, labels[:, None], self.offset)
        return _cross_entropy((logits - offsets) / self.temperature, labels)


@dataclass(frozen=True)
class CertificateRegularisation(Loss):
    """Cross-entropy - γ·relu(certificate) (Singla, Singla and Feizi 2022), which rewards larger certified radii.

    certificate = min_{j≠y} (f_y - f_j)/d_yj for the Lipschitz constants d of fᵢ - fⱼ, differentiable in d too, so in
    the rows of the head.
    """

    gamma: float = 0.1

    def __post_init__(self) -> None:
        _require(self.gamma >= 0, f"gamma must be at least 0, not {self.gamma}")

    def each(self, logits: Tensor, labels: Tensor, pairs: Tensor | None = None) -> Tensor:
        if pairs is None:
            raise ValueError(
                "the loss certificate needs Lipschitz constants: loss(logits, labels, network.pair_constants())"
            )
        certificate = radii(logits, labels, pairs)
        return _cross_entropy(logits, labels) - self.gamma * certificate.clamp_min(0)


LOSSES: Mapping[str, type[Loss]] = {
    "multi-margin": MultiMargin,
    "cross-entropy": CrossEntropy,
    "offset-cross-entropy": OffsetCrossEntropy,
    "certificate": CertificateRegularisation,
}


def gaps(logits: Tensor, labels: Tensor) -> Tensor:
    """f_y - f_j for every class j  # (batch, classes), 0 at j = y."""
    if labels.shape != logits.shape[:1]:  # a single label would be broadcast
        raise ValueError(f"each image needs one label, not {tuple(labels.shape)} for scores {tuple(logits.shape)}")
    return logits.gather(1, labels[:, None]) - logits


def radii(logits: Tensor, labels: Tensor, pairs: Tensor) -> Tensor:
    """min over j ≠ y of (f_y - f_j)/d_yj  # (batch,): negative where the label is not the prediction.

    It is the certified radius if d = `pairs` (classes, classes) bounds the Lipschitz constants of fᵢ - fⱼ. The norms of
    a live network are estimates, so there it is an estimate and not a certificate.
    """
    import torch

    own = torch.zeros_like(logits, dtype=torch.bool).scatter(1, labels[:, None], True)
    distances = pairs.to(logits)[labels].masked_fill(own, 1)
    tiny = torch.finfo(distances.dtype).tiny  # the distance of equal rows is 0
    return (gaps(logits, labels) / distances.clamp_min(tiny)).masked_fill(own, math.inf).amin(1)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits, labels, reduction="none")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
