"""Heads: the last map, to one score for each class.

A certificate divides the margin f_y - f_j by the Lipschitz constant of f_y - f_j, which is often far below √2 times
that of f. Certificates use the bounds of the frozen network (`lipflow.graph.fold`), and losses
`Network.pair_constants`.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from lipflow.shapes import require_positive


class Head(nn.Module, ABC):
    """A map from features to one score for each class."""

    classes: int

    @abstractmethod
    def pair_constants(self) -> Tensor:
        """The Lipschitz constants of hᵢ - hⱼ for the head h alone, differentiable  # (classes, classes)."""


class Truncate(Head):
    """The first `classes` features, as in the paper: hᵢ - hⱼ = xᵢ - xⱼ is √2-Lipschitz."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        require_positive(classes=classes)
        self.classes = classes

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2 or x.shape[1] < self.classes:
            raise ValueError(f"Truncate takes (batch, features ≥ {self.classes}), not {tuple(x.shape)}")
        return x[:, : self.classes]

    def pair_constants(self) -> Tensor:
        return math.sqrt(2) * (1 - torch.eye(self.classes, dtype=torch.float64))

    def extra_repr(self) -> str:
        return str(self.classes)


class LastLayerNormalization(Head):
    """wᵢ·x/‖wᵢ‖ + bᵢ: unit rows and a bias (LLN; Singla, Singla and Feizi 2022).

    hᵢ - hⱼ is ‖wᵢ/‖wᵢ‖ - wⱼ/‖wⱼ‖‖-Lipschitz, which lies between 0 and 2.
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        require_positive(features=features, classes=classes)
        self.classes = classes
        linear = nn.Linear(features, classes)
        self.weight, self.bias = linear.weight, linear.bias

    def rows(self) -> Tensor:
        """The unit rows of the forward pass."""
        length = torch.linalg.vector_norm(self.weight, dim=1, keepdim=True)
        return self.weight / torch.where(length > 0, length, torch.ones_like(length))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2 or x.shape[1] != self.weight.shape[1]:
            raise ValueError(f"this head takes features (batch, {self.weight.shape[1]}), not {tuple(x.shape)}")
        return nn.functional.linear(x, self.rows(), self.bias)

    def pair_constants(self) -> Tensor:
        """‖rᵢ - rⱼ‖, from ‖rᵢ - rⱼ‖² = 2 - 2rᵢ·rⱼ for unit rows."""
        rows = self.rows()
        own = torch.eye(self.classes, dtype=torch.bool, device=rows.device)
        square = (2 - 2 * rows @ rows.mT).clamp_min(torch.finfo(rows.dtype).eps)
        return square.masked_fill(own, 1).sqrt().masked_fill(own, 0)  # √ has no derivative at 0, on the diagonal

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} → {self.classes}"
