"""BCOP: orthogonal convolutions as products of two-tap ones (Li et al. 2019), by Björck's iteration.

For a symmetric projector P, y[i] = Px[i] + (I - P)x[i + 1] is a convolution with two taps. On a torus its symbol
P + (I - P)e^{iω} is unitary, so the convolution is orthogonal, and so are compositions of them along both axes. A layer
with a k × k kernel is a matrix H with orthonormal columns, which changes the number of channels to C, followed by
2(k - 1) two-tap convolutions with projectors of rank C/2.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lipflow.blocks.affine import Affine, Parametrization
from lipflow.operators import ConvOperator, DenseOperator
from lipflow.shapes import require_flat, require_images, require_positive
from lipflow.torch_state import without_autocast

ITERATIONS = 20  # of Björck's, as published


def bjorck(m: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """M ← M(3I - MᵀM)/2, repeated: to the polar factor of M, with orthonormal columns  # (..., rows ≥ columns).

    An iteration maps a singular value s to s(3 - s²)/2, and s converges to 1 from 0 < s < √3. So M is first divided by
    ‖G²‖_F^{1/4}, where G = MᵀM. That is between ‖M‖ and c^{1/8}‖M‖ for c columns, as ‖G‖² ≤ ‖G²‖_F ≤ √c·‖G‖².
    """
    if m.shape[-2] < m.shape[-1]:
        return bjorck(m.mT, iterations).mT
    with without_autocast(m):  # rounded products would not give orthonormal columns
        m = m / _length(m)
        gram = m.mT @ m
        m = m / _length(gram @ gram) ** 0.25
        for _ in range(iterations):
            m = 1.5 * m - 0.5 * m @ (m.mT @ m)
    return m


def _length(m: Tensor) -> Tensor:
    """‖M‖_F, or 1 where it is 0."""
    square = m.square().sum((-2, -1), keepdim=True)
    return torch.where(square > 0, square, torch.ones_like(square)).sqrt()


def compose_two_taps(kernel: Tensor, q: Tensor, axis: int) -> Tensor:
    """The kernel, followed by the two-tap convolution of the projector qqᵀ along an axis: it has one tap more."""
    with without_autocast(q):
        projected = torch.einsum("cr,dr,dmhw->cmhw", q, q, kernel)
    first, second = ((0, 0, 0, 1), (0, 0, 1, 0)) if axis == 0 else ((0, 1, 0, 0), (1, 0, 0, 0))
    return F.pad(projected, first) + F.pad(kernel - projected, second)


class BlockConvolution(Parametrization):
    """A circular convolution, orthogonal up to the error of Björck's iteration.

    Its norm is not assumed to be 1: `lipschitz_bound` and `freeze` bound it. With fewer outputs than inputs, the layer
    is the adjoint of a layer with exchanged channels.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int] = 3,
        iterations: int = ITERATIONS,
    ) -> None:
        height, width = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        require_positive(
            in_channels=in_channels, out_channels=out_channels, kernel_size=min(height, width), iterations=iterations
        )
        super().__init__((in_channels, out_channels), in_channels * height * width)
        self.iterations = iterations
        # Alternate rows and columns while both need more taps.
        taps = range(max(height, width) - 1)
        self.axes = [axis for tap in taps for axis, size in enumerate((height, width)) if tap < size - 1]
        most, least = max(self.channels), min(self.channels)
        self.mix = nn.Parameter(nn.init.orthogonal_(torch.empty(most, least)))
        halves = [nn.init.orthogonal_(torch.empty(most, most // 2)) for _ in self.axes]
        self.halves = nn.Parameter(torch.stack(halves) if halves else torch.empty(0, most, most // 2))

    def kernel(self) -> Tensor:
        """The kernel `(out, in, height, width)`."""
        kernel = bjorck(self.mix, self.iterations)[:, :, None, None]
        for axis, q in zip(self.axes, bjorck(self.halves, self.iterations), strict=True):
            kernel = compose_two_taps(kernel, q, axis)
        return kernel if kernel.shape[:2] == self.channels[::-1] else kernel.transpose(0, 1)

    def forward(self, x: Tensor) -> ConvOperator:
        require_images(x.shape[1:], self.channels[0])
        kernel = self.cache.transform(self.kernel, self.mix, self.halves, training=self.training)
        return ConvOperator(kernel, (x.shape[2], x.shape[3]), padding="same", padding_mode="circular")

    def extra_repr(self) -> str:
        height, width = self.axes.count(0) + 1, self.axes.count(1) + 1
        return f"{self.channels[0]} → {self.channels[1]}, kernel {height}×{width}, iterations={self.iterations}"


class Orthonormal(Parametrization):
    """A matrix with orthonormal rows or columns, up to the error of Björck's iteration."""

    def __init__(self, in_features: int, out_features: int, iterations: int = ITERATIONS) -> None:
        require_positive(in_features=in_features, out_features=out_features, iterations=iterations)
        super().__init__((in_features, out_features), in_features)
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(out_features, in_features)))
        self.iterations = iterations

    def forward(self, x: Tensor) -> DenseOperator:
        require_flat(x.shape[1:], self.channels[0])
        return DenseOperator(self.cache.transform(self.matrix, self.weight, training=self.training))

    def matrix(self) -> Tensor:
        """The matrix `(out, in)`."""
        return bjorck(self.weight, self.iterations)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} → {self.weight.shape[0]}, iterations={self.iterations}"


def bcop_conv(
    in_channels: int,
    out_channels: int,
    kernel_size: int | tuple[int, int] = 3,
    *,
    iterations: int = ITERATIONS,
    bias: bool = True,
) -> Affine:
    """The BCOP layer: an orthogonal circular convolution, and a bias."""
    return Affine(BlockConvolution(in_channels, out_channels, kernel_size, iterations), bias)


def bjorck_dense(in_features: int, out_features: int, *, iterations: int = ITERATIONS, bias: bool = True) -> Affine:
    """The dense layer of BCOP networks: a matrix orthonormalized by Björck's iteration, and a bias."""
    return Affine(Orthonormal(in_features, out_features, iterations), bias)
