"""A network: named stages in a chain, the shape of its input, and how it was built."""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from lipflow.blocks import Head
from lipflow.bound import Bound, Domain, Lipschitz, Shape, fold, fold_origin, in_order


class Network(Lipschitz):
    """Stages applied one after the other to pixels in [0, 1]  # (batch, *in_shape) → (batch, classes)."""

    def __init__(self, stages: "OrderedDict[str, nn.Module]", in_shape: Shape) -> None:
        super().__init__()
        self.stages = nn.Sequential(stages)
        self.in_shape = in_shape
        self.name: str | None = None
        self.sizes: dict[str, Any] = {}
        self.see(in_shape)

    def see(self, in_shape: Shape) -> None:
        """Show every layer its input size, so that buffers exist before an optimiser or another rank asks for them."""
        training = self.training
        with torch.no_grad():
            self.eval()(torch.zeros(1, *in_shape))
        self.train(training)

    @property
    def head(self) -> Head:
        """The last stage."""
        head = self.stages[-1]
        assert isinstance(head, Head)
        return head

    @property
    def classes(self) -> int:
        return self.head.classes

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or tuple(x.shape[1:]) != self.in_shape:
            raise ValueError(f"this network takes (batch, {', '.join(map(str, self.in_shape))}), not {tuple(x.shape)}")
        return self.stages(x)

    def bound(self, domain: Domain) -> Bound:
        return fold(in_order(self.stages), domain._replace(shape=self.in_shape))

    def origin(self, domain: Domain) -> float:
        return fold_origin(in_order(self.stages), domain._replace(shape=self.in_shape))

    def extra_repr(self) -> str:
        return f"name={self.name!r}, in_shape={self.in_shape}"
