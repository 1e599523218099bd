"""Non-decreasing scalar functions by name: the σ of a Convex Potential Layer."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Nonlinearity(NamedTuple):
    """A scalar function σ with slopes in [low, high] and |σ| ≤ sup, applied to each entry."""

    function: Callable[[Tensor], Tensor]
    low: float
    high: float
    sup: float = math.inf


def _softplus(x: Tensor) -> Tensor:
    """log(1 + eˣ) by logaddexp, as torch's softplus is discontinuous at its threshold."""
    return torch.logaddexp(x, torch.zeros_like(x))


NONLINEARITIES: dict[str, Nonlinearity] = {
    "relu": Nonlinearity(torch.relu, 0.0, 1.0),
    "softplus": Nonlinearity(_softplus, 0.0, 1.0),
    "tanh": Nonlinearity(torch.tanh, 0.0, 1.0, sup=1.0),
    "sigmoid": Nonlinearity(torch.sigmoid, 0.0, 0.25, sup=1.0),
    "hardtanh": Nonlinearity(F.hardtanh, 0.0, 1.0, sup=1.0),
}

EXACT_SIGMAS = ("relu", "hardtanh")  # they do not round, and have σ(0) = 0 and slopes in [0, 1]


def name_of(sigma: Nonlinearity) -> str:
    """The name of σ in the table, or "custom"."""
    return next((name for name, known in NONLINEARITIES.items() if known.function is sigma.function), "custom")
