"""Learned linear operators: a parameter, a geometry, and the power-iteration vector that follows the norm."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lipflow.fast.torch_state import may_keep, to_keep
from lipflow.flows.cache import Cache
from lipflow.operators import ConvOperator, DenseOperator, LinearOperator, norm_estimate
from lipflow.operators.conv import Padding
from lipflow.operators.norm import norm, power_iteration, start_vector, top_singular_vector
from lipflow.shapes import Shape

WARM_UP = 10  # power iterations when an input size is first seen, so that training starts near the norm


class Weight(nn.Module, ABC):
    """A learned W, and the vector u that power iteration carries from step to step (in the state dict).

    u depends on the weights alone, so it stays equal on every rank of a distributed run.
    """

    weight: nn.Parameter
    u: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()

    @abstractmethod
    def operator(self, shape: Shape | None) -> LinearOperator:
        """W as an operator on inputs of a shape, or of the shape last seen."""

    def forward(self, x: Tensor) -> LinearOperator:
        """W as an operator on the inputs x; their shape is taken up when it is the first, or in training."""
        op = self.operator(tuple(x.shape[1:]))
        if not self._knows(op) and (self.training or not self.u.numel()) and may_keep():
            with to_keep():
                self.u = self._vector(op)
        return op

    @property
    @abstractmethod
    def channels(self) -> tuple[int, int]:
        """The sizes of the input's and the output's first axis."""

    @property
    @abstractmethod
    def solvable(self) -> bool:
        """Whether (I - αA)z = x has a direct solution for a square A of this kind."""

    def estimate(self, op: LinearOperator, iterations: int = 1) -> Tensor:
        """‖Wu‖ ≤ ‖W‖ with the `top_vector` u: from below, differentiable."""
        return norm_estimate(op, self.top_vector(op, iterations), 0)

    def top_vector(self, op: LinearOperator, iterations: int = 1) -> Tensor:
        """A unit vector u with ‖Wu‖ close to ‖W‖; training keeps it for the next step."""
        return follow(op, self._vector(op), self.cache, self.keep if self.training else None, iterations)

    def keep(self, u: Tensor) -> Tensor:
        """Store u, and return it."""
        with to_keep():
            if self.u.shape == u.shape:
                self.u.copy_(u)
            else:
                self.u = u.clone()
        return u

    def train(self, mode: bool = True) -> "Weight":
        super().train(mode)
        if mode:
            self.cache.clear()
        else:
            self._settle()
        return self

    def _settle(self) -> None:
        """Find the vector that evaluation uses, for compiled graphs too."""
        if self.u.numel() and not self.u.is_meta:
            self.top_vector(self.operator(None))

    @torch.no_grad()
    def reset_estimate(self) -> None:
        """After the weight was set to something else: begin the power iteration anew."""
        if self.u.numel():
            op = self.operator(tuple(self.u.shape))
            self.u.copy_(power_iteration(op, start_vector(op.in_shape, self.weight), WARM_UP))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """A weight that comes without its u, as that of another program does, gets one."""
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if prefix + "weight" in state_dict and prefix + "u" not in state_dict:
            self.reset_estimate()
        if not self.training:
            self._settle()

    def _knows(self, op: LinearOperator) -> bool:
        return tuple(self.u.shape) == op.in_shape

    def _vector(self, op: LinearOperator) -> Tensor:
        """A copy of u (autograd keeps it, and u itself moves on), or a fresh one for a shape not seen yet."""
        if self._knows(op):
            return self.u.clone()
        return power_iteration(op, start_vector(op.in_shape, self.weight), WARM_UP)


def follow(
    op: LinearOperator, u: Tensor, cache: Cache, keep: Callable[[Tensor], Tensor] | None, iterations: int = 1
) -> Tensor:
    """A unit vector along which W stretches most, as far as known: the paper's Algorithm 1.

    Training takes some power iterations from the u of the step before, and gives the result to `keep`. For evaluation,
    where `keep` is None, the paper takes 100; Lanczos' method comes closer with as many products, and what it finds is
    held in a cache until a number of W changes.
    """
    if keep is not None:
        return keep(power_iteration(op, u, iterations)) if may_keep() else u
    if torch.compiler.is_compiling():  # a compiler looks at no numbers: take what evaluation found last
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
        self.register_buffer(
            "u", power_iteration(DenseOperator(self.weight), start_vector((in_features,), self.weight), WARM_UP)
        )

    def operator(self, shape: Shape | None) -> DenseOperator:
        require_flat(shape, self.weight.shape[1])
        return DenseOperator(self.weight)

    @property
    def solvable(self) -> bool:
        return True

    @property
    def channels(self) -> tuple[int, int]:
        return self.weight.shape[1], self.weight.shape[0]

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} → {self.weight.shape[0]}"


class ConvWeight(Weight):
    """A kernel of shape (out, in / groups, height, width), initialised as nn.Conv2d.

    The norm of a convolution depends on the input size. It is learned from the first batch or a loaded state dict,
    or given as `in_size`; another size is accepted later.
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
        height, width = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        require_positive(
            in_channels=in_channels, out_channels=out_channels, kernel_size=min(height, width), groups=groups
        )
        if in_channels % groups or out_channels % groups:
            raise ValueError(f"groups={groups} must divide both {in_channels} and {out_channels} channels")
        self.geometry: dict[str, Any] = dict(
            padding=padding, padding_mode=padding_mode, stride=stride, dilation=dilation, groups=groups
        )
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, height, width))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.register_buffer("u", torch.empty(in_channels, 0, 0))
        self.register_load_state_dict_pre_hook(self._take_size)
        if padding_mode not in ("zeros", "circular"):
            raise ValueError(f"padding_mode is 'zeros' or 'circular', not {padding_mode!r}")
        if in_size is not None:
            self(self.weight.new_empty(0, in_channels, *in_size))

    @property
    def in_size(self) -> tuple[int, int] | None:
        """The input size last seen, or None before the first batch."""
        return (self.u.shape[1], self.u.shape[2]) if self.u.numel() else None

    @property
    def channels(self) -> tuple[int, int]:
        return self.u.shape[0], self.weight.shape[0]

    @property
    def solvable(self) -> bool:
        return self.geometry["padding_mode"] == "circular"

    def operator(self, shape: Shape | None) -> ConvOperator:
        if shape is None and self.in_size is None:
            raise ValueError(
                "the norm of a convolution depends on its input size, which this layer has not seen yet; "
                "give in_shape=(channels, height, width), or run one batch first"
            )
        shape = tuple(self.u.shape) if shape is None else shape
        if len(shape) != 3 or shape[0] != self.channels[0]:
            raise ValueError(
                f"this layer takes images (batch, {self.channels[0]}, height, width), not (batch, {str(shape)[1:]}"
            )
        return ConvOperator(self.weight, (shape[1], shape[2]), **self.geometry)

    def _take_size(self, module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
        """Before a state dict is loaded: the size learned from data is the shape of u, so make room for it."""
        u = state_dict.get(prefix + "u")
        if u is not None and u.ndim == 3 and u.shape[0] == self.u.shape[0] and u.shape != self.u.shape:
            with to_keep():
                self.u = self.u.new_empty(u.shape)

    def extra_repr(self) -> str:
        size = "unknown until the first batch" if self.in_size is None else "×".join(map(str, self.in_size))
        height, width = self.weight.shape[2:]
        options = ", ".join(f"{k}={v!r}" for k, v in self.geometry.items() if v != _DEFAULTS[k])
        return f"{self.channels[0]} → {self.channels[1]}, kernel {height}×{width}, input {size}" + (
            options and f", {options}"
        )


_DEFAULTS = dict(padding="same", padding_mode="zeros", stride=1, dilation=1, groups=1)


def require_flat(shape: Shape | None, features: int) -> None:
    """A dense layer would act on many vectors at once, and its bias count as often."""
    if shape is not None and len(shape) != 1:
        raise ValueError(f"a dense layer takes (batch, {features}), not (batch, {str(tuple(shape))[1:]}; flatten")


def require_positive(**sizes: int) -> None:
    """Refuse sizes that are not integers of at least 1, by name."""
    require_at_least(1, **sizes)


def require_at_least(least: int, **sizes: int) -> None:
    """Refuse sizes that are not integers of at least `least`, by name."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise ValueError(f"{name} must be an integer of at least {least}, not {size!r}")
