"""1-Lipschitz maps that change the shape of the input."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lipflow.shapes import require_positive


class _Channels(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        require_positive(channels=channels)
        self.channels = channels

    def extra_repr(self) -> str:
        return str(self.channels)


class PadChannels(_Channels):
    """Append zero channels up to `channels`, as in the paper: an isometry."""

    def forward(self, x: Tensor) -> Tensor:
        missing = self.channels - x.shape[1]
        if missing < 0:
            raise ValueError(f"PadChannels({self.channels}) cannot narrow an input of {x.shape[1]} channels")
        return torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], 1) if missing else x


class TakeChannels(_Channels):
    """The first `channels` channels or features, as in SOC: an orthogonal projection."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] < self.channels:
            raise ValueError(f"TakeChannels({self.channels}) cannot widen an input of {x.shape[1]} channels")
        return x[:, : self.channels]


class _Pool(nn.Module):
    """Disjoint windows of size × size. Rows and columns after the last whole window are dropped."""

    def __init__(self, size: int) -> None:
        super().__init__()
        require_positive(size=size)
        self.size = size

    def _require(self, x: Tensor) -> None:
        if x.ndim != 4 or min(x.shape[2:]) < self.size:
            raise ValueError(f"pooling {self.size}×{self.size} takes images at least as large, not {tuple(x.shape)}")

    def extra_repr(self) -> str:
        return str(self.size)


class AvgPool(_Pool):
    """The sum over each k × k window, divided by k: its rows are orthonormal, so L = 1."""

    def forward(self, x: Tensor) -> Tensor:
        self._require(x)
        return F.avg_pool2d(x, self.size) * self.size


class MaxPool(_Pool):
    """The maximum of each window: 1-Lipschitz, because windows are disjoint."""

    def forward(self, x: Tensor) -> Tensor:
        self._require(x)
        return F.max_pool2d(x, self.size)


class SpaceToDepth(nn.Module):
    """Each block × block square of pixels becomes block² channels: a permutation, so an isometry."""

    def __init__(self, block: int = 2) -> None:
        super().__init__()
        require_positive(block=block)
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[2] % self.block or x.shape[3] % self.block:
            given = tuple(x.shape)
            raise ValueError(
                f"SpaceToDepth({self.block}) takes images with sides that {self.block} divides, not {given}"
            )
        blocks = x.unflatten(3, (-1, self.block)).unflatten(2, (-1, self.block))  # (batch, C, H', block, W', block)
        if x.stride(1) == 1 < x.shape[1]:  # keep channels last in memory
            return blocks.permute(0, 2, 4, 1, 3, 5).flatten(3).permute(0, 3, 1, 2)
        return blocks.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)

    def extra_repr(self) -> str:
        return str(self.block)
