"""What evaluation derives from a weight, computed once and never stale.

A weight can change in ways that leave no trace on its tensor: `p.data.mul_(2)` keeps both its address and its version
counter, and so do fused optimisers. So the numbers are compared. That reads a weight once, where a Cayley transform, a
Björck iteration or a norm reads it many times.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from lipflow.fast.torch_state import in_memory, may_keep, to_keep, transformed


class Cache:
    """The last value of a function of some tensors, valid while their numbers stay the same.

    It is no part of a state dict. Copies of it share what it holds, and pickles start empty.
    """

    def __init__(self) -> None:
        self._inputs: tuple[Tensor, ...] = ()
        self._key: Hashable = None
        self.value: Tensor | None = None

    def transform(self, compute: Callable[[], Tensor], *inputs: Tensor, key: Hashable = None) -> Tensor:
        """compute(), differentiable in the inputs: held only while no derivative can flow to them."""
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        if wanted or torch.compiler.is_compiling() or transformed() or not all(map(in_memory, inputs)):
            return compute()
        dtype, autocast = inputs[0].dtype, torch.is_autocast_enabled(inputs[0].device.type)
        return self.constant(compute, *inputs, key=(key, dtype, autocast))

    def constant(self, compute: Callable[[], Tensor], *inputs: Tensor, key: Hashable = None) -> Tensor:
        """compute(), through which no derivatives flow."""
        if self.value is not None and self._key == key and self._fits(inputs):
            return self.value
        if not (may_keep() and all(map(in_memory, inputs))):
            return compute()
        with to_keep():
            self._inputs, self._key = tuple(t.detach().clone() for t in inputs), key
            self.value = value = compute()
        return value  # another thread may have put its own in the place by now

    def clear(self) -> None:
        self._inputs, self.value = (), None

    def _fits(self, inputs: tuple[Tensor, ...]) -> bool:
        return len(inputs) == len(self._inputs) and all(
            a.device == b.device and a.shape == b.shape and torch.equal(a.to(b.dtype), b)
            for a, b in zip(self._inputs, inputs, strict=True)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Cache":
        new = Cache()
        new._inputs, new._key, new.value = self._inputs, self._key, self.value
        return new

    def __reduce__(self) -> tuple[type["Cache"], tuple[()]]:
        return Cache, ()
