"""A linear map between images that is one matrix at each frequency: Cayley convolutions."""

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from lipflow.operators.operator import LinearOperator


class FourierMultiplier(LinearOperator):
    """x ↦ the real inverse transform of M(ω)x̂(ω), with matrices M at the frequencies of rfft2.

    matrices: (height, width // 2 + 1, out, in), complex.
    """

    def __init__(self, matrices: Tensor, in_size: tuple[int, int]) -> None:
        height, width = in_size
        if matrices.ndim != 4 or 0 in matrices.shape or tuple(matrices.shape[:2]) != (height, width // 2 + 1):
            raise ValueError(
                f"a Fourier multiplier on {height}×{width} pixels takes matrices of shape "
                f"({height}, {width // 2 + 1}, out, in), not {tuple(matrices.shape)}"
            )
        self.weight, self.in_size = matrices, in_size
        self.in_shape, self.out_shape = (matrices.shape[3], *in_size), (matrices.shape[2], *in_size)

    def __call__(self, x: Tensor) -> Tensor:
        return multiply(self.weight[None], x)

    def adjoint(self, y: Tensor) -> Tensor:
        return multiply(self.weight.mH[None], y)

    def with_weight(self, weight: Tensor) -> "FourierMultiplier":
        return FourierMultiplier(weight, self.in_size)

    @property
    def geometry(self) -> dict[str, list[int]]:
        return dict(in_size=list(self.in_size))

    def __repr__(self) -> str:
        height, width = self.in_size
        return f"FourierMultiplier({self.in_shape[0]} → {self.out_shape[0]}, input {height}×{width})"


def multiply(matrices: Tensor, x: Tensor) -> Tensor:
    """Multiply the spectrum of x by a matrix at each frequency of rfft2  # (groups, h, w // 2 + 1, out, in)."""
    if has_torch_function_unary(x):  # a node: use the rule of this function, as torch does for its own functions
        return handle_torch_function(multiply, (x,), matrices, x)
    groups, out = matrices.shape[0], matrices.shape[-2]
    if not x.numel():
        # Some FFT libraries raise on an empty batch. Distributed training needs gradients on every process: zeros.
        return x.new_zeros(len(x), groups * out, *x.shape[2:]) + 0 * (x.sum() + matrices.real.sum())
    x = x.to(matrices.real.dtype)  # autocast may have rounded x; FFTs run in the precision of the matrices
    spectrum = torch.fft.rfft2(x).unflatten(1, (groups, -1))
    product = torch.einsum("ghwoi,bgihw->bgohw", matrices, spectrum)
    return torch.fft.irfft2(product.flatten(1, 2), s=x.shape[-2:])


def block_diagonal(matrices: Tensor) -> Tensor:
    """The block-diagonal matrices of all groups  # (groups, h, m, out, in) → (h, m, groups·out, groups·in)."""
    groups, h, m, out, into = matrices.shape
    joined = matrices.new_zeros(h, m, groups, out, groups, into)
    joined.diagonal(dim1=2, dim2=4).copy_(matrices.permute(1, 2, 3, 4, 0))
    return joined.reshape(h, m, groups * out, groups * into)
