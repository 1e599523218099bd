"""A transformed weight, computed once in evaluation and never stale.

A weight can change in ways that leave no trace on its tensor: `p.data.mul_(2)` keeps both its address and its version,
and a tensor that was freed may leave its address to another. So what is compared is what matters: the numbers. That
reads a weight once, where a Cayley transform or a Björck iteration multiplies it by itself.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Held(NamedTuple):
    inputs: tuple[Tensor, ...]
    circumstances: tuple[Hashable, ...]
    value: Tensor


class Memo:
    """The last value of a function of some tensors, held until one of them differs.

    It is no part of a state dict; a copy of it, or a pickle, starts empty. Where derivatives could flow to the tensors
    (and under torch.compile and torch.func, which see no numbers), nothing is held and every call computes.
    """

    def __init__(self) -> None:
        self._held: _Held | None = None

    def __call__(
        self, compute: Callable[[], Tensor], inputs: Sequence[Tensor], *what: Hashable, keep: bool = True
    ) -> Tensor:
        """compute(), a function of `inputs` and of `what` alone; `keep=False` computes, and forgets."""
        if torch.compiler.is_compiling():
            return compute()
        if not (keep and _settled(inputs)):
            self._held = None
            return compute()
        circumstances = (*what, torch.is_autocast_enabled(inputs[0].device.type))
        held = self._held
        if held is not None and held.circumstances == circumstances and _same(held.inputs, inputs):
            return held.value
        with lasting():
            snapshot = tuple(t.detach().clone() for t in inputs)
            held = self._held = _Held(snapshot, circumstances, compute())
        return held.value  # another thread may have put its own in the place by now

    def __deepcopy__(self, memo: dict[int, Any]) -> "Memo":
        return Memo()

    def __reduce__(self) -> tuple[type["Memo"], tuple[()]]:
        return Memo, ()


def transformed() -> bool:
    """Whether derivatives may be taken in other ways than backward: by torch.func, or by forward-mode AD."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def many(g: Tensor) -> bool:
    """Whether g stands for many gradients, as `is_grads_batched` and `jacobian(…, vectorize=True)` send them."""
    return torch._C._functorch.is_legacy_batchedtensor(g)  # pyright: ignore[reportAttributeAccessIssue]


def lasting() -> AbstractContextManager[object]:
    """For what outlives a call: made in inference mode, it could take no part in a later backward pass, nor change."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return torch.no_grad()
    return _outside_of_inference()


@contextmanager
def _outside_of_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def _settled(inputs: Sequence[Tensor]) -> bool:
    """Whether the inputs are numbers in memory that no derivative asks for."""
    if transformed() or (torch.is_grad_enabled() and any(t.requires_grad for t in inputs)):
        return False
    try:
        return all(t.data_ptr() or not t.numel() for t in inputs)  # a meta tensor is nowhere
    except RuntimeError:
        return False  # nor is one that only pretends to be


def _same(held: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    return len(held) == len(inputs) and all(
        (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b) for a, b in zip(held, inputs, strict=True)
    )
