"""The mean over an image and its mirror image, which is as Lipschitz as what it is a mean of."""

from collections import OrderedDict
from typing import Any, final

import torch
from torch import Tensor, nn

from lipflow.flows.together import Around, in_chains, listened, through


@final
class Mirrored(Around):
    """(φ(x) + φ(Rx))/2 with R the mirror image, left for right, and φ a chain of modules, given as to `nn.Sequential`.

    R is an isometry, so a mean of φ and φ∘R has φ's constant. In training it is φ alone, at φ's cost: mirror images at
    random there, or φ will not know them. Put it around all that comes before the head: of scores that are affine in φ
    it is the mean too.
    """

    def __init__(self, *modules: nn.Module | OrderedDict[str, nn.Module]) -> None:
        super().__init__()
        layers: tuple[Any, ...] = modules
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4:
            raise ValueError(f"Mirrored takes images (batch, channels, height, width), not {tuple(x.shape)}")
        if self.training:
            return self._inside(x)
        return (self._inside(x) + self._inside(x.flip(3))) / 2

    def _inside(self, x: Tensor) -> Tensor:
        whole = torch.compiler.is_compiling() or listened(self.inner)
        return self.inner(x) if whole else through(in_chains(self.inner), x)

    def bare(self) -> nn.Sequential | None:
        return self.inner if self.training else None
