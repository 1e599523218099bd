"""Learned linear operators: a parameter, a geometry, and the vector of a power iteration that estimates the norm."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lipflow.flows.cache import Cache
from lipflow.operators import ConvOperator, DenseOperator, LinearOperator, norm_estimate
from lipflow.operators.conv import Padding
from lipflow.operators.norm import norm, power_iteration, start_vector, top_singular_vector
from lipflow.shapes import Shape, require_flat, require_images, require_positive
from lipflow.torch_state import may_store, storing

WARM_UP_ITERATIONS = 10  # for a new vector, so that training starts near the norm


class Weight(nn.Module, ABC):
    """A learned W, and the vector u of its power iteration, which is in the state dict.

    u depends on the weights only, so it is equal on every rank of a distributed run.
    """

    weight: nn.Parameter
    u: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()

    @abstractmethod
    def operator(self, shape: Shape | None) -> LinearOperator:
        """W as an operator on inputs of a shape; None is the shape of u."""

    def forward(self, x: Tensor) -> LinearOperator:
        """W as an operator on the inputs x. If x has another shape, makes a new u: in training, or if there is none."""
        op = self.operator(tuple(x.shape[1:]))
        if not self._has_vector_for(op) and (self.training or not self.u.numel()) and may_store():
            with storing():
                self.u = self._vector(op)
        return op

    @property
    @abstractmethod
    def channels(self) -> tuple[int, int]:
        """The sizes of the input's and the output's first axis."""

    def estimate(self, op: LinearOperator, iterations: int = 1) -> Tensor:
        """‖Wu‖ ≤ ‖W‖ for the `top_vector` u: from below, differentiable."""
        u = self.top_vector(op, iterations)
        return norm_estimate(op, u, iterations=0)  # no more iterations: ‖Wu‖

    def top_vector(self, op: LinearOperator, iterations: int = 1) -> Tensor:
        """A unit vector u with ‖Wu‖ close to ‖W‖. Training stores it for the next step."""
        return track_top_vector(op, self._vector(op), self.cache, self.store if self.training else None, iterations)

    def store(self, u: Tensor) -> Tensor:
        """Store u, and return it."""
        with storing():
            if self.u.shape == u.shape:
                self.u.copy_(u)
            else:
                self.u = u.clone()
        return u

    def train(self, mode: bool = True) -> "Weight":
        super().train(mode)
        if mode:
            self.cache.clear()  # it holds a copy of W
        else:
            self._prepare_evaluation()
        return self

    def _prepare_evaluation(self) -> None:
        """Compute and cache the vector for evaluation now, as a compiled graph cannot."""
        if self.u.numel() and not self.u.is_meta:
            self.top_vector(self.operator(None))

    @torch.no_grad()
    def reset_estimate(self) -> None:
        """Restart the power iteration. Call it after setting the weight."""
        if self.u.numel():
            self.u.copy_(self._new_vector(self.operator(tuple(self.u.shape))))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Compute u if the state dict has a weight without one, as another program may write it."""
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if prefix + "weight" in state_dict and prefix + "u" not in state_dict:
            self.reset_estimate()
        if not self.training:
            self._prepare_evaluation()

    def _has_vector_for(self, op: LinearOperator) -> bool:
        return tuple(self.u.shape) == op.in_shape

    def _vector(self, op: LinearOperator) -> Tensor:
        """A copy of u, which autograd can save while u changes; or a new vector, for another shape."""
        return self.u.clone() if self._has_vector_for(op) else self._new_vector(op)

    def _new_vector(self, op: LinearOperator) -> Tensor:
        return power_iteration(op, start_vector(op.in_shape, self.weight), WARM_UP_ITERATIONS)


def track_top_vector(
    op: LinearOperator, u: Tensor, cache: Cache, store: Callable[[Tensor], Tensor] | None, iterations: int = 1
) -> Tensor:
    """A unit vector u with ‖Wu‖ close to ‖W‖: the paper's Algorithm 1.

    Training makes some power iterations from the last u and passes the result to `store`. In evaluation, where `store`
    is None, the paper makes 100. Lanczos' method is more accurate with as many products; its result is cached until W
    changes.
    """
    if store is not None:
        return store(power_iteration(op, u, iterations)) if may_store() else u
    if torch.compiler.is_compiling():  # a compiled graph cannot compare weights: use the last vector
        return u if cache.value is None else cache.value
    found = cache.constant(lambda: top_singular_vector(op, u), op.weight, key=op.in_shape)
    if found.dtype != u.dtype:
        found = found.to(u.dtype)
        found = found / norm(found)
    return found


class DenseWeight(Weight):
    """W of shape (out, in), initialised as nn.Linear: uniform in ±1/√in."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        require_positive(in_features=in_features, out_features=out_features)
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.register_buffer("u", self._new_vector(DenseOperator(self.weight)))

    def operator(self, shape: Shape | None) -> DenseOperator:
        require_flat(shape, self.weight.shape[1])
        return DenseOperator(self.weight)

    @property
    def channels(self) -> tuple[int, int]:
        return self.weight.shape[1], self.weight.shape[0]

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} → {self.weight.shape[0]}"


class ConvWeight(Weight):
    """A kernel of shape (out, in / groups, height, width), initialised as nn.Conv2d.

    The norm of a convolution depends on the input size. That size comes from `in_size`, the first batch or a loaded
    state dict, and may change later.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int] = 3,
        padding: Padding = "same",
        padding_mode: str = "zeros",
        stride: int | tuple[int, int] = 1,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        in_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        height, width = _pair(
            "kernel_size", (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        )
        require_positive(in_channels=in_channels, out_channels=out_channels, groups=groups)
        if in_channels % groups or out_channels % groups:
            raise ValueError(f"groups={groups} must divide both {in_channels} and {out_channels} channels")
        self.geometry: dict[str, Any] = dict(
            padding=padding, padding_mode=padding_mode, stride=stride, dilation=dilation, groups=groups
        )
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, height, width))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.register_buffer("u", torch.empty(in_channels, 0, 0))
        if padding_mode not in ("zeros", "circular"):
            raise ValueError(f"padding_mode is 'zeros' or 'circular', not {padding_mode!r}")
        if in_size is not None:
            self(self.weight.new_empty(0, in_channels, *_pair("in_size", in_size)))

    @property
    def in_size(self) -> tuple[int, int] | None:
        """The last input size, or None before the first batch."""
        return (self.u.shape[1], self.u.shape[2]) if self.u.numel() else None

    @property
    def channels(self) -> tuple[int, int]:
        return self.u.shape[0], self.weight.shape[0]

    def operator(self, shape: Shape | None) -> ConvOperator:
        if shape is None and self.in_size is None:
            raise ValueError(
                "the norm of a convolution depends on its input size, which this layer has not seen yet; "
                "give in_shape=(channels, height, width), or run one batch first"
            )
        shape = tuple(self.u.shape) if shape is None else shape
        require_images(shape, self.channels[0])
        return ConvOperator(self.weight, (shape[1], shape[2]), **self.geometry)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Give u the shape of the loaded one, which is the input size."""
        u = state_dict.get(prefix + "u")
        if u is not None and u.ndim == 3 and u.shape[0] == self.u.shape[0] and u.shape != self.u.shape:
            with storing():
                self.u = self.u.new_empty(u.shape)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        size = "unknown until the first batch" if self.in_size is None else "×".join(map(str, self.in_size))
        height, width = self.weight.shape[2:]
        options = [f", {k}={v!r}" for k, v in self.geometry.items() if v != _DEFAULTS[k]]
        return f"{self.channels[0]} → {self.channels[1]}, kernel {height}×{width}, input {size}" + "".join(options)


_DEFAULTS = dict(padding="same", padding_mode="zeros", stride=1, dilation=1, groups=1)


def _pair(name: str, size: tuple[int, int]) -> tuple[int, int]:
    """(height, width). Raises if it is not a pair of integers of at least 1."""
    if not isinstance(size, tuple | list) or len(size) != 2:
        number = "a number or " if name == "kernel_size" else ""
        raise ValueError(f"{name} is {number}(height, width), not {size!r}")
    for side in size:
        require_positive(**{name: side})
    return size[0], size[1]


def new_bias(channels: int, fan_in: int) -> nn.Parameter:
    """A bias, uniform in ±1/√fan_in."""
    return nn.Parameter(torch.empty(channels).uniform_(-1, 1) / math.sqrt(fan_in))
