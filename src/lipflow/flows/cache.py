"""A cache for values that evaluation derives from weights.

Address and version counter do not detect every change of a weight: `p.data.mul_(2)` and fused optimisers change
neither. So the numbers are compared. A comparison reads a weight once; a Cayley transform, a Björck iteration or a norm
reads it many times.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from lipflow.fast.torch_state import in_memory, may_keep, to_keep, transformed


class Cache:
    """The last value of a function of some tensors, valid while their numbers stay the same.

    It is not part of a state dict. Copies share the value, and pickles start empty.
    """

    def __init__(self) -> None:
        self._entry: tuple[tuple[Tensor, ...], Hashable, Tensor] | None = None  # inputs, key and value

    @property
    def value(self) -> Tensor | None:
        """The last value."""
        entry = self._entry
        return None if entry is None else entry[2]

    def transform(self, compute: Callable[[], Tensor], *inputs: Tensor, training: bool, key: Hashable = None) -> Tensor:
        """compute(), differentiable in the inputs. Cached in evaluation, if no derivative can flow to the inputs."""
        differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        numbers = not torch.compiler.is_compiling() and not transformed() and all(map(in_memory, inputs))
        if training or differentiable or not numbers:
            return compute()
        dtype, autocast = inputs[0].dtype, torch.is_autocast_enabled(inputs[0].device.type)
        return self.constant(compute, *inputs, key=(key, dtype, autocast))

    def constant(self, compute: Callable[[], Tensor], *inputs: Tensor, key: Hashable = None) -> Tensor:
        """compute(), without derivatives."""
        entry = self._entry  # read once and written at once, because other threads may do so meanwhile
        if entry is not None and entry[1] == key and _equal(entry[0], inputs):
            return entry[2]
        if not (may_keep() and all(map(in_memory, inputs))):
            return compute()
        with to_keep():
            copies, value = tuple(t.detach().clone() for t in inputs), compute()
        self._entry = copies, key, value
        return value

    def clear(self) -> None:
        self._entry = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Cache":
        new = Cache()
        new._entry = self._entry
        return new

    def __reduce__(self) -> tuple[type["Cache"], tuple[()]]:
        return Cache, ()


def _equal(before: tuple[Tensor, ...], now: tuple[Tensor, ...]) -> bool:
    return len(before) == len(now) and all(
        a.device == b.device and a.shape == b.shape and torch.equal(a.to(b.dtype), b)
        for a, b in zip(before, now, strict=True)
    )
