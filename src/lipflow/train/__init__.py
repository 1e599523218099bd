"""Training: `train(run)` writes a folder of results; a `Run` says what is trained, on what, how and where.

    from dataclasses import replace
    from lipflow.train import Run, load_run, train

    train(replace(Run.of("cpl-s", "cifar10"), seed=1))      # or: lipflow train --model cpl-s --data cifar10 --seed 1
    run, network = load_run("runs/cpl-s-cifar10-1")

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
    "load_model": "checkpoint",
    "load_run": "record",
    "save_model": "checkpoint",
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
    "load_model",
    "load_run",
    "save_model",
    "train",
]

if TYPE_CHECKING:
    from lipflow.train.checkpoint import load_model as load_model
    from lipflow.train.checkpoint import save_model as save_model
    from lipflow.train.loop import Result as Result
    from lipflow.train.loop import train as train
    from lipflow.train.recipe import RECIPES as RECIPES
    from lipflow.train.recipe import SGD as SGD
    from lipflow.train.recipe import Adam as Adam
    from lipflow.train.recipe import Recipe as Recipe
    from lipflow.train.record import load_run as load_run
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
