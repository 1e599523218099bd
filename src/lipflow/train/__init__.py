"""Training: `train(run)` writes a folder of results; a `Run` says what is trained, on what, how and where.

    from dataclasses import replace
    from lipflow.train import Run, train

    train(replace(Run.of("cpl-s", "cifar10"), seed=1))      # or: lipflow train --model cpl-s --data cifar10 --seed 1
    network = lipflow.load("runs/cpl-s-cifar10-1")

Names are imported on first use, so that the command line shows its flags without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "RECIPES": "recipe",
    "SGD": "recipe",
    "Adam": "recipe",
    "Constant": "schedule",
    "Exponential": "schedule",
    "Linear": "schedule",
    "MultiStep": "schedule",
    "Recipe": "recipe",
    "Result": "loop",
    "Run": "run",
    "Triangular": "schedule",
    "train": "loop",
}

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

if TYPE_CHECKING:
    from lipflow.train.loop import Result as Result
    from lipflow.train.loop import train as train
    from lipflow.train.recipe import RECIPES as RECIPES
    from lipflow.train.recipe import SGD as SGD
    from lipflow.train.recipe import Adam as Adam
    from lipflow.train.recipe import Recipe as Recipe
    from lipflow.train.run import Run as Run
    from lipflow.train.schedule import Constant as Constant
    from lipflow.train.schedule import Exponential as Exponential
    from lipflow.train.schedule import Linear as Linear
    from lipflow.train.schedule import MultiStep as MultiStep
    from lipflow.train.schedule import Triangular as Triangular


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"lipflow.train.{_HOME[name]}"), name)
    raise AttributeError(f"module 'lipflow.train' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
