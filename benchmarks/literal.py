"""The reference: the paper's Algorithm 1 written literally in PyTorch, for other benchmarks to be measured against.

Convolution, ReLU, transposed convolution, scale and subtract are separate operations in NCHW; every layer runs one
power iteration through autograd at each training step (100 once in evaluation), and takes h = 2/(σ̂² + 1e-4) as the
authors do.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lipflow.models.cpl import SIZES


class LiteralConv(nn.Module):
    """x - h·Wᵀ relu(Wx + b) with a 3×3 convolution W."""

    u: Tensor

    def __init__(self, channels: int, inner: int, size: int) -> None:
        super().__init__()
        conv = nn.Conv2d(channels, inner, 3, padding=1)
        self.kernel, self.bias = conv.weight, nn.Parameter(torch.zeros(inner).uniform_(-0.05, 0.05))
        u = torch.randn(1, channels, size, size)
        self.register_buffer("u", u / u.norm())
        self.step: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self._step(1) if self.training else (self.step if self.step is not None else self._step(100))
        y = F.conv2d(x, self.kernel, padding=1) + self.bias.view(1, -1, 1, 1)
        return x - h * F.conv_transpose2d(F.relu(y), self.kernel, padding=1)

    def _step(self, iterations: int) -> Tensor:
        u = v = self.u
        for _ in range(iterations):
            v = F.conv2d(u, self.kernel, padding=1)
            v = v / v.norm()
            u = F.conv_transpose2d(v, self.kernel, padding=1)
            u = u / u.norm()
        sigma = (F.conv2d(u, self.kernel, padding=1) * v).sum()
        self.u = u.detach()
        h = 2 / (sigma**2 + 1e-4)
        self.step = None if self.training else h.detach()
        return h


class LiteralDense(nn.Module):
    """x - h·Wᵀ relu(Wx + b) with a matrix W."""

    u: Tensor

    def __init__(self, features: int, inner: int) -> None:
        super().__init__()
        linear = nn.Linear(features, inner)
        self.weight, self.bias = linear.weight, linear.bias
        self.register_buffer("u", F.normalize(torch.randn(features), dim=0))
        self.step: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self._step(1) if self.training else (self.step if self.step is not None else self._step(100))
        return x - h * (F.relu(x @ self.weight.T + self.bias) @ self.weight)

    def _step(self, iterations: int) -> Tensor:
        u = v = self.u
        for _ in range(iterations):
            v = self.weight @ u
            v = v / v.norm()
            u = self.weight.T @ v
            u = u / u.norm()
        sigma = ((self.weight @ u) * v).sum()
        self.u = u.detach()
        h = 2 / (sigma**2 + 1e-4)
        self.step = None if self.training else h.detach()
        return h


class LiteralNetwork(nn.Module):
    """A CPL network of the paper on 32×32 colour images: `LiteralNetwork(**SIZES["cpl-s"])`."""

    def __init__(
        self, depth: int, channels: int, depth_linear: int, features: int, inner: int, classes: int = 10
    ) -> None:
        super().__init__()
        self.channels, self.classes = channels, classes
        self.convolutions = nn.Sequential(*(LiteralConv(channels, inner, 32) for _ in range(depth)))
        self.linear = nn.Sequential(*(LiteralDense(64 * channels, features) for _ in range(depth_linear)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x - 0.5, (0, 0, 0, 0, 0, self.channels - x.shape[1]))
        x = F.avg_pool2d(self.convolutions(x), 4) * 4
        return self.linear(x.flatten(1))[:, : self.classes]


def literal(name: str) -> LiteralNetwork:
    """The literal form of cpl-s, cpl-m, cpl-l or cpl-xl."""
    return LiteralNetwork(**SIZES[name])
