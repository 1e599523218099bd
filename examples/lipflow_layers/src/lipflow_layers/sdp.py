"""The SDP-based Lipschitz layer (Araujo et al. 2023), with only `forward`, and with `lower`.

x - 2Wᵀ T⁻¹ relu(Wx + b) with T diagonal, T_ii = Σ_j |WWᵀ|_ij. As T - WWᵀ is diagonally dominant, WWᵀ ⪯ T, so
‖T^{-1/2}W‖ ≤ 1. With W' = T^{-1/2}W and b' = T^{-1/2}b the layer is x - 2W'ᵀ relu(W'x + b'), a step of size 2 down a
convex potential that is ‖W'‖²-smooth: it is 1-Lipschitz.
"""

import torch
from torch import Tensor, nn

from lipflow import Node
from lipflow.operators import DenseOperator
from lipflow.primitives import NONLINEARITIES, Descent


class SDPLayer(nn.Module):
    """x - 2Wᵀ T⁻¹ relu(Wx + b) on vectors, in plain PyTorch."""

    def __init__(self, features: int, inner: int) -> None:
        super().__init__()
        linear = nn.Linear(features, inner)
        self.weight, self.bias = linear.weight, linear.bias

    def rescaling(self) -> Tensor:
        """The diagonal of T."""
        return (self.weight @ self.weight.T).abs().sum(1)

    def forward(self, x: Tensor) -> Tensor:  # (batch, features)
        inner = torch.relu(nn.functional.linear(x, self.weight, self.bias))
        return x - 2 * (inner / self.rescaling()) @ self.weight


class LoweredSDPLayer(SDPLayer):
    """The same layer with `lower`.

    lipflow recognises an `SDPLayer`, so `lower` gains nothing here. Write one for layers that it does not recognise.
    """

    def lower(self, x: Node) -> Node:
        root = self.rescaling().rsqrt()
        return Descent(DenseOperator(root[:, None] * self.weight), root * self.bias, NONLINEARITIES["relu"], 2.0)(x)
