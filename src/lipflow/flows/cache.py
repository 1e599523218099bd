"""A cache for values that are computed from weights in evaluation.

The address and the version counter of a weight do not show every change: `p.data.mul_(2)` and fused optimisers change
neither. So the numbers are compared. A comparison reads a weight once; a Cayley transform, a Björck iteration or a norm
reads it many times.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from lipflow.torch_state import in_memory, may_store, storing, transformed


class Cache:
    """The last value of a function of some tensors, valid while their numbers stay the same.

    It is not part of a state dict. A copy of a cache has the same value; an unpickled cache is empty.
    """

    def __init__(self) -> None:
        self._entry: tuple[tuple[Tensor, ...], Hashable, Tensor] | None = None  # inputs, key and value

    @property
    def value(self) -> Tensor | None:
        """The last value."""
        entry = self._entry
        return None if entry is None else entry[2]

    def transform(self, compute: Callable[[], Tensor], *inputs: Tensor, training: bool, key: Hashable = None) -> Tensor:
        """compute(), differentiable in the inputs; cached in evaluation if no gradient of the inputs is needed."""
        differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        comparable = not torch.compiler.is_compiling() and not transformed() and all(map(in_memory, inputs))
        if training or differentiable or not comparable:
            return compute()
        dtype, autocast = inputs[0].dtype, torch.is_autocast_enabled(inputs[0].device.type)
        return self.constant(compute, *inputs, key=(key, dtype, autocast))

    def constant(self, compute: Callable[[], Tensor], *inputs: Tensor, key: Hashable = None) -> Tensor:
        """compute() without derivatives; cached."""
        entry = self._entry  # read once, as another thread may replace it; all parts are replaced in one assignment
        if entry is not None and entry[1] == key and _equal(entry[0], inputs):
            return entry[2]
        if not (may_store() and all(map(in_memory, inputs))):
            return compute()
        with storing():
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
