"""The reference: the paper's Algorithm 1 written literally in PyTorch, with which other benchmarks compare lipflow.

Convolution, ReLU, transposed convolution, scaling and subtraction are separate operations in NCHW. At each training
step, every layer runs one power iteration, differentiated by autograd (in evaluation 100, once). The step size is
h = 2/(σ̂² + 1e-4), as in the authors' code.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lipflow.models.cpl import SIZES


class LiteralLayer(nn.Module, ABC):
    """x - h·Wᵀ relu(Wx + b)."""

    u: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, u: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
        self.register_buffer("u", u / u.norm())
        self.step: Tensor | None = None

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """Wx."""

    @abstractmethod
    def adjoint(self, y: Tensor) -> Tensor:
        """Wᵀy."""

    def forward(self, x: Tensor) -> Tensor:
        h = self._step(1) if self.training else (self.step if self.step is not None else self._step(100))
        return x - h * self.adjoint(F.relu(self.product(x) + self.bias))

    def _step(self, iterations: int) -> Tensor:
        u = v = self.u
        for _ in range(iterations):
            v = self.product(u)
            v = v / v.norm()
            u = self.adjoint(v)
            u = u / u.norm()
        sigma = (self.product(u) * v).sum()
        self.u = u.detach()
        h = 2 / (sigma**2 + 1e-4)
        self.step = None if self.training else h.detach()
        return h


class LiteralConv(LiteralLayer):
    """A layer with a 3×3 convolution W."""

    def __init__(self, channels: int, inner: int, size: int) -> None:
        bias = torch.zeros(inner, 1, 1).uniform_(-0.05, 0.05)
        super().__init__(nn.Conv2d(channels, inner, 3).weight, bias, torch.randn(1, channels, size, size))

    def product(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, padding=1)

    def adjoint(self, y: Tensor) -> Tensor:
        return F.conv_transpose2d(y, self.weight, padding=1)


class LiteralDense(LiteralLayer):
    """A layer with a matrix W."""

    def __init__(self, features: int, inner: int) -> None:
        linear = nn.Linear(features, inner)
        super().__init__(linear.weight, linear.bias, torch.randn(features))

    def product(self, x: Tensor) -> Tensor:
        return x @ self.weight.T

    def adjoint(self, y: Tensor) -> Tensor:
        return y @ self.weight


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
