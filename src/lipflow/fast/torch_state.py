"""What torch is doing around a computation: transforming it, running it once more, or refusing to differentiate it.

Whatever needs a private function of torch is here, one function each.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor


def transformed() -> bool:
    """Whether derivatives may be taken in other ways than backward: by torch.func, or by forward-mode AD."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def recomputing() -> bool:
    """Whether a backward pass is running, which computes activations again (`torch.utils.checkpoint`)."""
    return torch._C._current_graph_task_id() != -1


def may_keep() -> bool:
    """Whether a forward pass may store what it computed: not while it is computed again, nor under torch.func, whose
    tensors end with the transform."""
    if torch.compiler.is_compiling():
        return True
    return not recomputing() and not torch._C._are_functorch_transforms_active()


def is_batch_of_gradients(g: Tensor) -> bool:
    """Whether g stands for many gradients, as `is_grads_batched` and `jacobian(…, vectorize=True)` send them."""
    return torch._C._functorch.is_legacy_batchedtensor(g)  # pyright: ignore[reportAttributeAccessIssue]


def in_memory(t: Tensor) -> bool:
    """Whether a tensor has numbers: meta tensors and those that compilers trace have none."""
    try:
        return bool(t.data_ptr()) or not t.numel()
    except RuntimeError:
        return False


def to_keep() -> AbstractContextManager[object]:
    """For tensors that outlive a call: those made in inference mode could take no part in a later backward pass."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return torch.no_grad()
    return _outside_of_inference()


@contextmanager
def _outside_of_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield
