"""Heads: the last map to one score a class, with a bound for every pair of classes.

A certificate divides the margin f_y - f_j by the Lipschitz constant of f_y - f_j, which a head knows better than
√2 times its own: `pair_bounds()[i, j]` bounds the Lipschitz constant of hᵢ - hⱼ for the head h alone.
"""

from abc import abstractmethod
from fractions import Fraction

import torch
from torch import Tensor, nn

from lipflow.bound import Bound, Domain, Lipschitz
from lipflow.operators import Dense, norm_bound
from lipflow.rounding import above, gamma, norm_up, power_of_two, sqrt_up, up


class Head(Lipschitz):
    """A map from features to one score a class."""

    classes: int

    @abstractmethod
    def pair_bounds(self) -> Tensor:
        """The Lipschitz constants of hᵢ - hⱼ, from above: `(classes, classes)`, float64, 0 for i = j."""


class Truncate(Head):
    """The first `classes` features, as in the paper: hᵢ - hⱼ = xᵢ - xⱼ is √2-Lipschitz."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        if classes < 1:
            raise ValueError(f"classes must be at least 1, not {classes}")
        self.classes = classes

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2 or x.shape[1] < self.classes:
            raise ValueError(
                f"Truncate({self.classes}) takes (batch, features) with at least as many, not {tuple(x.shape)}"
            )
        return x[:, : self.classes]

    def bound(self, domain: Domain) -> Bound:
        return Bound(1.0)

    def origin(self, domain: Domain) -> float:
        return 0.0

    def pair_bounds(self) -> Tensor:
        root = up(sqrt_up(Fraction(2)))
        return root * (1 - torch.eye(self.classes, dtype=torch.float64))

    def extra_repr(self) -> str:
        return str(self.classes)


class LastLayerNormalization(Head):
    """wᵢ·x/‖wᵢ‖ + bᵢ: unit rows and a bias (LLN, Singla, Singla and Feizi 2022).

    hᵢ - hⱼ is ‖wᵢ/‖wᵢ‖ - wⱼ/‖wⱼ‖‖-Lipschitz, which lies between 0 and 2.
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        if features < 1 or classes < 1:
            raise ValueError(f"features and classes must be at least 1, not {features} and {classes}")
        self.classes = classes
        linear = nn.Linear(features, classes)
        self.weight, self.bias = linear.weight, linear.bias

    def rows(self) -> Tensor:
        """The unit rows, in the dtype of the weights: what the forward pass uses."""
        length = torch.linalg.vector_norm(self.weight, dim=1, keepdim=True)
        return self.weight / torch.where(length > 0, length, torch.ones_like(length))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2 or x.shape[1] != self.weight.shape[1]:
            raise ValueError(f"this head takes (batch, {self.weight.shape[1]}) features, not {tuple(x.shape)}")
        return nn.functional.linear(x, self.rows(), self.bias)

    def bound(self, domain: Domain) -> Bound:
        return Bound(norm_bound(Dense(self.rows())))

    def origin(self, domain: Domain) -> float:
        return norm_up(self.bias)

    def pair_bounds(self) -> Tensor:
        return row_distances(self.rows())

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} → {self.classes}"


def row_distances(rows: Tensor) -> Tensor:
    """‖wᵢ - wⱼ‖ for all pairs of rows, rounded up  # (classes, classes), float64."""
    w = rows.detach().to("cpu", torch.float64)
    if not bool(torch.isfinite(w).all()):
        raise ValueError("the last layer has NaN or infinite weights, so no pair of its rows has a distance")
    features = w.shape[1]
    scale = power_of_two(float(w.abs().max())) or 1.0
    w = w / scale
    # The difference and its square round once each, the sum at most γ_features, the root once; a square that
    # underflows loses at most 2⁻¹⁰²², so that a root loses at most 2⁻⁵¹¹ for each of them, and so does the scaling.
    inflate, underflow = up(1 + gamma(features + 8)), up(Fraction(features + 2, 2**511))
    distances = torch.stack([(w - row).square().sum(1).sqrt() for row in w]) * inflate + underflow
    return above(above(distances) * scale).fill_diagonal_(0.0)
