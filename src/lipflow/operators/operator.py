"""A linear map between tensors, and its adjoint."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor


class LinearOperator(ABC):
    """A linear map W: `op(x)` = Wx and `op.adjoint(y)` = Wᵀy, on batches `(batch, *in_shape)`, `(batch, *out_shape)`.

    Functions such as `norm_estimate` and `norm_bound` take an operator as their argument.
    """

    weight: Tensor  # the numbers that define W; inputs have its dtype and device
    in_shape: tuple[int, ...]  # of one input
    out_shape: tuple[int, ...]  # of one output

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Wx for every x of the batch."""

    @abstractmethod
    def adjoint(self, y: Tensor) -> Tensor:
        """Wᵀy for every y of the batch."""

    @abstractmethod
    def with_weight(self, weight: Tensor) -> "LinearOperator":
        """The same map with another weight of the same shape."""

    @property
    def geometry(self) -> dict[str, Any]:
        """The parameters of W other than its weight, as plain data."""
        return {}


class Adjoint(LinearOperator):
    """Wᵀ of an operator W, such as a transposed convolution."""

    def __init__(self, op: LinearOperator) -> None:
        self.op, self.weight, self.in_shape, self.out_shape = op, op.weight, op.out_shape, op.in_shape

    def __call__(self, x: Tensor) -> Tensor:
        return self.op.adjoint(x)

    def adjoint(self, y: Tensor) -> Tensor:
        return self.op(y)

    def with_weight(self, weight: Tensor) -> "Adjoint":
        return Adjoint(self.op.with_weight(weight))

    @property
    def geometry(self) -> dict[str, Any]:
        return dict(self.op.geometry, adjoint=True)

    def __repr__(self) -> str:
        return f"Adjoint({self.op})"


def add_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """y + b, with b along the first axis of each member of the batch."""
    return y if bias is None else y + bias.to(y.dtype).reshape(-1, *[1] * (y.ndim - 2))


def require_real(weight: Tensor, name: str) -> None:
    """Raise unless a weight is a tensor of real floating-point numbers."""
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        given = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(f"{name} takes a tensor of real floating-point numbers, not {given}")
