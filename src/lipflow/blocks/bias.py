"""A learned bias, for layers without one."""

from torch import Tensor, nn

from lipflow.flows.weight import new_bias, require_positive


class Bias(nn.Module):
    """x + b, with b along the channels or features: an isometry. b is initialised uniformly in ±1/√channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        require_positive(channels=channels)
        self.bias = new_bias(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] != len(self.bias):
            raise ValueError(f"Bias takes (batch, {len(self.bias)}, …), not {tuple(x.shape)}")
        return x + self.bias.reshape(-1, *[1] * (x.ndim - 2))

    def extra_repr(self) -> str:
        return str(len(self.bias))
