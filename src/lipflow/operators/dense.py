"""The dense operator x ↦ Wx."""

from torch import Tensor
from torch.nn import functional as F

from lipflow.operators.operator import LinearOperator, require_real


class DenseOperator(LinearOperator):
    """x ↦ Wx for a matrix W `(out, in)`; inputs are `(..., in)`."""

    def __init__(self, weight: Tensor) -> None:
        require_real(weight, "DenseOperator")
        if weight.ndim != 2 or 0 in weight.shape:
            raise ValueError(f"DenseOperator takes a non-empty matrix (out, in), not shape {tuple(weight.shape)}")
        self.weight, self.in_shape, self.out_shape = weight, (weight.shape[1],), (weight.shape[0],)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Wx, or Wx + b."""
        if x.shape[-1:] != self.in_shape:
            raise ValueError(f"DenseOperator takes inputs (..., {self.in_shape[0]}), not {tuple(x.shape)}")
        return F.linear(x, self.weight, bias)

    def adjoint(self, y: Tensor) -> Tensor:
        if y.shape[-1:] != self.out_shape:
            raise ValueError(f"the adjoint of DenseOperator takes (..., {self.out_shape[0]}), not {tuple(y.shape)}")
        return y @ self.weight

    def with_weight(self, weight: Tensor) -> "DenseOperator":
        return DenseOperator(weight)

    def __repr__(self) -> str:
        return f"DenseOperator({self.in_shape[0]} → {self.out_shape[0]})"
