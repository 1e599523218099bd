"""Modules while they are lowered: their `lower` methods, a float64 copy, and how their state is restored."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lipflow.node import LoweringError, Node

# The `lower` of classes that cannot be changed: {class: function(module, node) -> node}.
LOWERINGS: dict[type[nn.Module], Callable[[Any, Node], Node]] = {}


def lowering_of(kind: type) -> Callable[[Any, Node], Node] | None:
    """The entry of a class in LOWERINGS, or its `lower`, unless a subclass below it overrides `forward`."""
    if kind in LOWERINGS:
        return LOWERINGS[kind]
    owners = {name: next((c for c in kind.__mro__ if name in vars(c)), None) for name in ("forward", "lower")}
    if owners["lower"] is None or owners["forward"] is None or not issubclass(owners["lower"], owners["forward"]):
        return None
    return vars(owners["lower"])["lower"]


@contextmanager
def lowered_forwards(module: nn.Module) -> Iterator[None]:
    """While entered, modules with a `lower` run it instead of `forward`."""
    changed = []
    try:
        for part in module.modules():
            lowering = lowering_of(type(part))
            if lowering is not None and "forward" not in vars(part):
                part.forward = partial(_run_lower, lowering, part)
                changed.append(part)
        yield
    finally:
        for part in changed:
            del part.forward


def _run_lower(lowering: Callable[[Any, Node], Node], part: nn.Module, *args: Any, **kwargs: Any) -> Node:
    result = lowering(part, *args, **kwargs)
    if not isinstance(result, Node):
        raise LoweringError(f"`lower` of {type(part).__name__} returns a {type(result).__name__}, and not a node")
    return result


def float64_copy(module: nn.Module) -> nn.Module | None:
    """A copy in float64 (complex128 where it is complex) and evaluation mode; None if it cannot be copied."""
    try:
        twin = copy.deepcopy(module).to("cpu")
        for t in (*twin.parameters(), *twin.buffers()):
            if t.is_floating_point() or t.is_complex():
                t.data = t.data.to(torch.complex128 if t.is_complex() else torch.float64)
        return twin.eval()
    except Exception:  # the module of a user may raise any exception; it is then lowered without a copy
        return None


@contextmanager
def state_restored(module: nn.Module) -> Iterator[None]:
    """While entered, a module is in evaluation mode; afterwards its modes, attributes and buffers are restored."""
    tables = ("_parameters", "_buffers", "_modules")
    before = [(m, dict(vars(m)), {name: dict(vars(m).get(name, {})) for name in tables}) for m in module.modules()]
    tensors = [t for _, plain, inner in before for t in (*plain.values(), *inner["_buffers"].values())]
    copies = [(t, t.detach().clone()) for t in tensors if isinstance(t, Tensor)]
    module.eval()
    try:
        yield
    finally:
        for m, plain, inner in before:
            vars(m).clear()
            vars(m).update(plain)
            for name, entries in inner.items():
                if name in plain:
                    plain[name].clear()
                    plain[name].update(entries)
        with torch.no_grad():
            for t, values in copies:
                if not torch.equal(t, values):
                    t.copy_(values)
