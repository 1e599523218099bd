"""Attacks: L2-PGD as the paper's authors run it, the nearest adversarial image, and files of outcomes."""

from lipflow.attack.file import EXAMPLES, OUTCOME, Examples, Outcome, load, save
from lipflow.attack.projected_gradient import (
    PGD,
    Attacked,
    Model,
    Nearest,
    SameDtype,
    nearest,
    pgd,
    project,
    pull_inside,
    square_distances,
    unit,
)

__all__ = [
    "EXAMPLES",
    "OUTCOME",
    "PGD",
    "Attacked",
    "Examples",
    "Model",
    "Nearest",
    "Outcome",
    "SameDtype",
    "load",
    "nearest",
    "pgd",
    "project",
    "pull_inside",
    "save",
    "square_distances",
    "unit",
]
