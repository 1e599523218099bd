"""The mean over an image and its mirror image."""

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from lipflow.flows import Sequential


class FlipAverage(nn.Module):
    """(φ(x) + φ(Rx))/2, where R swaps left and right and φ is a chain of modules, given as to `nn.Sequential`.

    R is an isometry, so the mean of φ and φ∘R has the Lipschitz constant of φ. In training it is φ: flip images at
    random, so that φ learns them. Put it around all modules before the head: scores that are affine in φ are then means
    too.
    """

    def __init__(self, *modules: nn.Module | OrderedDict[str, nn.Module]) -> None:
        super().__init__()
        layers: tuple[Any, ...] = modules
        self.inner = Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4:
            raise ValueError(f"FlipAverage takes images (batch, channels, height, width), not {tuple(x.shape)}")
        return self.inner(x) if self.training else (self.inner(x) + self.inner(x.flip(3))) / 2
