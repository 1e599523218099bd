"""Training: `train(run)` writes a folder of results; a `Run` says what is trained, on what, how and where.

    from dataclasses import replace
    from lipflow.train import Run, train

    train(replace(Run.of("cpl-s", "cifar10"), seed=1))      # or: lipflow train --model cpl-s --data cifar10 --seed 1
    network = lipflow.load("runs/cpl-s-cifar10-1")

`train` and `Result` are imported on first use, so that the command line shows its flags without torch.
"""

from typing import TYPE_CHECKING, Any

from lipflow.train.recipe import RECIPES, SGD, Adam, Recipe
from lipflow.train.run import Run
from lipflow.train.schedule import Constant, Exponential, Linear, MultiStep, Triangular

if TYPE_CHECKING:
    from lipflow.train.loop import Result, train

__all__ = [
    "RECIPES",
    "SGD",
    "Adam",
    "Constant",
    "Exponential",
    "Linear",
    "MultiStep",
    "Recipe",
    "Result",
    "Run",
    "Triangular",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in ("Result", "train"):
        from lipflow.train import loop

        return getattr(loop, name)
    raise AttributeError(f"module 'lipflow.train' has no attribute {name!r}")
