"""A layer whose `lower` disagrees with its `forward`."""

import torch
from torch import Tensor

from lipflow import Node
from lipflow.operators import DenseOperator
from lipflow.primitives import NONLINEARITIES, Descent
from lipflow_layers.sdp import SDPLayer


class WrongLayer(SDPLayer):
    """x - 4Wᵀ T⁻¹ relu(Wx + b), which may stretch by 3, with a `lower` for the step size 2.

    `lipflow.freeze` runs both on random images, finds that they differ, and refuses the layer.
    """

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x) - x

    def lower(self, x: Node) -> Node:
        root = torch.rsqrt(self.rescaling())
        return Descent(DenseOperator(root[:, None] * self.weight), root * self.bias, NONLINEARITIES["relu"], 2.0)(x)
