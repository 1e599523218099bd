"""Learning-rate schedules: the factor on `lr` as a function of progress, from 0 at the start to 1 at the end."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lipflow.train.recipe import Recipe

Schedule = Callable[[float, "Recipe"], float]

_PAPER = ((0.0, 0.0), (2 / 5, 1.0), (4 / 5, 1 / 20), (1.0, 0.0))
_LINEAR = ((0.0, 0.0), (1 / 5, 1.0), (1.0, 0.0))


def triangular(progress: float, recipe: "Recipe") -> float:
    """Straight lines through (0, 0), (2/5, 1), (4/5, 1/20) and (1, 0): the paper's."""
    return _between(_PAPER, progress)


def linear(progress: float, recipe: "Recipe") -> float:
    """Straight lines through (0, 0), (1/5, 1) and (1, 0)."""
    return _between(_LINEAR, progress)


def _between(corners: Sequence[tuple[float, float]], progress: float) -> float:
    right = min(max(bisect_right(corners, (progress, 2.0)), 1), len(corners) - 1)
    (x0, y0), (x1, y1) = corners[right - 1], corners[right]
    return y0 + (y1 - y0) * (progress - x0) / (x1 - x0)


def multistep(progress: float, recipe: "Recipe") -> float:
    """× `decay` at each of the `milestones`, which are fractions of the run."""
    return recipe.decay ** sum(progress >= milestone for milestone in recipe.milestones)


def exponential(progress: float, recipe: "Recipe") -> float:
    """× `decay` after each of the recipe's epochs; a run cut short by a budget goes through the same rates faster."""
    return recipe.decay ** int(progress * recipe.epochs)


def constant(progress: float, recipe: "Recipe") -> float:
    """The same rate throughout."""
    return 1.0


SCHEDULES: dict[str, Schedule] = {
    "triangular": triangular,
    "linear": linear,
    "multistep": multistep,
    "exponential": exponential,
    "constant": constant,
}


def rate_at(progress: float, recipe: "Recipe") -> float:
    """The learning rate at some progress along the recipe's schedule."""
    return recipe.lr * SCHEDULES[recipe.schedule](progress, recipe)
