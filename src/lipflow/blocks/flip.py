"""The mean over an image and its mirror image, which is as Lipschitz as what it is a mean of."""

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from lipflow.flows import Sequential


class FlipAverage(nn.Module):
    """(φ(x) + φ(Rx))/2 with R the mirror image, left for right, and φ a chain of modules, given as to `nn.Sequential`.

    R is an isometry, so a mean of φ and φ∘R has φ's constant. In training it only runs φ, at φ's cost: flip images at
    random there, or φ will not know them. Put it around all that comes before the head: of scores that are affine in φ
    it is the mean too.
    """

    def __init__(self, *modules: nn.Module | OrderedDict[str, nn.Module]) -> None:
        super().__init__()
        layers: tuple[Any, ...] = modules
        self.inner = Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4:
            raise ValueError(f"FlipAverage takes images (batch, channels, height, width), not {tuple(x.shape)}")
        return self.inner(x) if self.training else (self.inner(x) + self.inner(x.flip(3))) / 2
