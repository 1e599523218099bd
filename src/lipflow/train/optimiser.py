"""Optimisers by name, and their state as named tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lipflow.blocks import Householder
from lipflow.train.recipe import Recipe

Groups = list[dict[str, Any]]


def _adam(groups: Groups, recipe: Recipe) -> Optimizer:
    return torch.optim.Adam(groups, recipe.lr, fused=True)


def _sgd(groups: Groups, recipe: Recipe) -> Optimizer:
    return torch.optim.SGD(groups, recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov, fused=True)


OPTIMISERS: dict[str, Callable[[Groups, Recipe], Optimizer]] = {"adam": _adam, "sgd": _sgd}


def make_optimiser(network: nn.Module, recipe: Recipe) -> Optimizer:
    """The recipe's optimiser. Activations have parameters that are angles, and no reason to be near 0: no decay."""
    angles = {id(p) for m in network.modules() if isinstance(m, Householder) for p in m.parameters()}
    groups: Groups = [
        {"params": [p for p in network.parameters() if id(p) not in angles], "weight_decay": recipe.weight_decay},
        {"params": [p for p in network.parameters() if id(p) in angles], "weight_decay": 0.0},
    ]
    return OPTIMISERS[recipe.optimiser]([group for group in groups if group["params"]], recipe)


def state_tensors(optimiser: Optimizer) -> dict[str, Tensor]:
    """The state as "3.exp_avg" → tensor, by the number of the parameter; None (a momentum not begun) is left out."""
    state = optimiser.state_dict()["state"]
    return {
        f"{number}.{name}": torch.as_tensor(value)
        for number, entries in state.items()
        for name, value in entries.items()
        if value is not None
    }


def load_state_tensors(optimiser: Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of `state_tensors`. The hyperparameters are the optimiser's own: they come from the run."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = tensor
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
