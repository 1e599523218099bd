"""The mean of a network over an image and its mirror image."""

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from lipflow.flows import Sequential


class FlipAverage(nn.Module):
    """(φ(x) + φ(Rx))/2, for R, which swaps left and right, and a chain φ of modules, given as for `nn.Sequential`.

    R is an isometry, so the mean of φ and φ∘R has the Lipschitz constant of φ. In training it computes φ(x) alone: flip
    training images at random, so that φ learns both. Put it around all modules before the head. If the head is affine,
    the scores are then means too.
    """

    def __init__(self, *modules: nn.Module | OrderedDict[str, nn.Module]) -> None:
        super().__init__()
        layers: tuple[Any, ...] = modules
        self.inner = Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4:
            raise ValueError(f"FlipAverage takes images (batch, channels, height, width), not {tuple(x.shape)}")
        return self.inner(x) if self.training else (self.inner(x) + self.inner(x.flip(3))) / 2
