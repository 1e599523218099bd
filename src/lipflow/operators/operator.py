"""A linear map between tensors, and its adjoint."""

from abc import ABC, abstractmethod

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


def require_real(weight: Tensor, name: str) -> None:
    """Refuse a weight that is no tensor of real floating-point numbers."""
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        given = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(f"{name} takes a tensor of real floating-point numbers, not {given}")
