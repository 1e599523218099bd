"""A layer whose `lower` disagrees with its `forward`."""

from torch import Tensor

from lipflow_layers.sdp import LoweredSDPLayer


class WrongLayer(LoweredSDPLayer):
    """x - 4Wᵀ T⁻¹ relu(Wx + b), which may stretch by 3, with a `lower` for the step size 2.

    `lipflow.freeze` runs both on random images, finds that they differ, and refuses the layer.
    """

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x) - x

    lower = LoweredSDPLayer.lower  # an inherited `lower` would not apply to another `forward`
