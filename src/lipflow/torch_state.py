"""The state of torch during a computation: autocast, transforms, recomputation, inference mode, device, compiler.

Private functions of torch that report its state are used here only.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products of x. Autocast does not change float64."""
    return torch.get_autocast_dtype(x.device.type) if autocasts(x) else x.dtype


def autocasts(x: Tensor) -> bool:
    """Whether autocast rounds products of x."""
    return not x.is_meta and x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Disable autocast on x's device, so that norms and step sizes have at least the precision of float32."""
    kind = x.device.type
    autocast = not x.is_meta and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if autocast else nullcontext()


def transformed() -> bool:
    """Whether torch.func or forward-mode AD is active, so that a backward pass is not the only derivative."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def may_store() -> bool:
    """Whether a forward pass may store tensors.

    Not in a recomputation, and not under torch.func, whose tensors are invalid after the transform.
    """
    if torch.compiler.is_compiling():
        return True
    recomputing = torch._C._current_graph_task_id() != -1  # a backward pass is running (`torch.utils.checkpoint`)
    return not recomputing and not torch._C._are_functorch_transforms_active()


def is_batch_of_gradients(g: Tensor) -> bool:
    """Whether g is a batch of gradients, from `is_grads_batched` or `jacobian(…, vectorize=True)`."""
    return torch._C._functorch.is_legacy_batchedtensor(g)  # pyright: ignore[reportAttributeAccessIssue]


def in_memory(t: Tensor) -> bool:
    """Whether a tensor has data: meta tensors and tensors traced by a compiler have none."""
    try:
        return bool(t.data_ptr()) or not t.numel()
    except RuntimeError:
        return False


def storing() -> AbstractContextManager[object]:
    """A context without gradients and without inference mode, for tensors that a later backward pass can use."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return torch.no_grad()
    return _outside_of_inference()


@contextmanager
def _outside_of_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def without_inference(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that it creates ordinary tensors in inference mode, too: they can have gradients later."""

    @wraps(function)
    def wrapper(*arguments: P.args, **named: P.kwargs) -> T:
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            return function(*arguments, **named)

    return wrapper


def as_written(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that no compiler changes it, and it creates its tensors on the CPU.

    Certificates hold for the Python program. A compiled function that calls `function` leaves its graph there, and
    with fullgraph=True it raises an error. The default device does not matter.
    """

    @wraps(function)
    def on_cpu(*arguments: P.args, **named: P.kwargs) -> T:
        if torch.get_default_device().type == "cpu":  # the context below slows down every function of torch
            return function(*arguments, **named)
        with torch.device("cpu"):
            return function(*arguments, **named)

    @wraps(function)
    def wrapper(*arguments: P.args, **named: P.kwargs) -> T:
        # `disable` imports the compiler, which is slow. Nothing is compiled before it is imported.
        run: Any = torch.compiler.disable(on_cpu) if "torch._dynamo" in sys.modules else on_cpu
        return run(*arguments, **named)

    return wrapper
