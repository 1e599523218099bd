"""The dense operator x ↦ Wx."""

from torch import Tensor
from torch.nn import functional as F

from lipflow.operators.operator import LinearOperator, require_real


class DenseOperator(LinearOperator):
    """x ↦ Wx for a matrix W `(out, in)`; inputs are `(..., in)`."""

    def __init__(self, weight: Tensor) -> None:
        require_real(weight, "DenseOperator")
        if weight.ndim != 2 or 0 in weight.shape:
            raise ValueError(
                f"DenseOperator takes a matrix (out, in) that is not empty, not a weight of shape {tuple(weight.shape)}"
            )
        self._weight = weight

    @property
    def weight(self) -> Tensor:
        return self._weight

    @property
    def in_shape(self) -> tuple[int]:
        return (self._weight.shape[1],)

    @property
    def out_shape(self) -> tuple[int]:
        return (self._weight.shape[0],)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Wx, or Wx + b."""
        if x.ndim < 1 or x.shape[-1] != self._weight.shape[1]:
            raise ValueError(f"DenseOperator takes inputs (..., {self._weight.shape[1]}), not {tuple(x.shape)}")
        return F.linear(x, self._weight, bias)

    def adjoint(self, y: Tensor) -> Tensor:
        if y.ndim < 1 or y.shape[-1] != self._weight.shape[0]:
            raise ValueError(f"the adjoint of DenseOperator takes (..., {self._weight.shape[0]}), not {tuple(y.shape)}")
        return y @ self._weight

    def with_weight(self, weight: Tensor) -> "DenseOperator":
        return DenseOperator(weight)

    def __repr__(self) -> str:
        return f"DenseOperator({self._weight.shape[1]} → {self._weight.shape[0]})"
