"""A linear map between tensors, and its adjoint."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor


class LinearOperator(ABC):
    """A linear map W: `op(x)` = Wx and `op.adjoint(y)` = Wᵀy, on batches `(batch, *in_shape)`, `(batch, *out_shape)`.

    What holds for every operator is a function over it: `norm_estimate`, `norm_bound`.
    """

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Wx for every x of the batch."""

    @abstractmethod
    def adjoint(self, y: Tensor) -> Tensor:
        """Wᵀy for every y of the batch."""

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """The numbers that define W; dtype and device follow them."""

    @abstractmethod
    def with_weight(self, weight: Tensor) -> "LinearOperator":
        """The same map with another weight of the same shape."""

    @property
    @abstractmethod
    def in_shape(self) -> tuple[int, ...]:
        """The shape of one input."""

    @property
    @abstractmethod
    def out_shape(self) -> tuple[int, ...]:
        """The shape of one output."""

    @property
    def geometry(self) -> dict[str, Any]:
        """What defines W beside its weight, as plain data."""
        return {}


class Adjoint(LinearOperator):
    """Wᵀ of an operator W, such as a transposed convolution."""

    def __init__(self, op: LinearOperator) -> None:
        self.op = op

    def __call__(self, x: Tensor) -> Tensor:
        return self.op.adjoint(x)

    def adjoint(self, y: Tensor) -> Tensor:
        return self.op(y)

    @property
    def weight(self) -> Tensor:
        return self.op.weight

    def with_weight(self, weight: Tensor) -> "Adjoint":
        return Adjoint(self.op.with_weight(weight))

    @property
    def in_shape(self) -> tuple[int, ...]:
        return self.op.out_shape

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.op.in_shape

    @property
    def geometry(self) -> dict[str, Any]:
        return dict(self.op.geometry, adjoint=True)

    def __repr__(self) -> str:
        return f"Adjoint({self.op})"


def require_real(weight: Tensor, name: str) -> None:
    """Refuse a weight that is no tensor of real floating-point numbers."""
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        given = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(f"{name} takes a tensor of real floating-point numbers, not {given}")
