"""A layer is a field and a step: `Flow`, and the layers by name."""

from torch import Tensor, nn

from lipflow.flows.field import Convex, ConvexPlusSkew, ConvexPotential, Field, Skew
from lipflow.flows.step import TERMS, TRAIN_TERMS, ExplicitEuler, Exponential, ImplicitEuler, Midpoint, Step
from lipflow.flows.weight import ConvWeight, DenseWeight, Weight
from lipflow.node import Node
from lipflow.operators.conv import Padding
from lipflow.primitives import Nonlinearity


class Flow(nn.Module):
    """One step of the flow dx/dt = F(x). The field and the step give the Lipschitz constant."""

    def __init__(self, field: Field, step: Step) -> None:
        super().__init__()
        if not isinstance(field, Convex | Skew | ConvexPlusSkew):
            raise TypeError(f"a field is Convex, Skew or ConvexPlusSkew, not {type(field).__name__}")
        if not isinstance(step, Step):
            raise TypeError(f"a step is ExplicitEuler, ImplicitEuler, Midpoint, Exponential or Split, not {step!r}")
        self.field, self.step = field, step
        step.require(field)

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.field, x)

    def lower(self, x: Node) -> Node:
        """The layer in evaluation mode as primitives."""
        return self.step.lower(self.field, x)

    def extra_repr(self) -> str:
        return f"step={self.step}"


def cpl_conv(
    channels: int,
    inner: int,
    kernel_size: int | tuple[int, int] = 3,
    *,
    padding: Padding = "same",
    padding_mode: str = "zeros",
    stride: int | tuple[int, int] = 1,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    in_size: tuple[int, int] | None = None,
    sigma: str | Nonlinearity = "relu",
    bias: bool = True,
    h: float | None = None,
) -> Flow:
    """The convolutional Convex Potential Layer x - (2/s‖W‖²)·Wᵀσ(Wx + b), W from `channels` to `inner` channels.

    `sigma` is a name, or a `Nonlinearity` with its slopes. A fixed `h` replaces 2/(s‖W‖²): the paper's relaxed layer,
    whose L may be above 1. The input size is `in_size`, or that of the first batch. The rest is as in nn.Conv2d.
    """
    weight = ConvWeight(channels, inner, kernel_size, padding, padding_mode, stride, dilation, groups, in_size)
    return Flow(ConvexPotential(weight, sigma, bias), ExplicitEuler(h))


def cpl_dense(
    features: int, inner: int, *, sigma: str | Nonlinearity = "relu", bias: bool = True, h: float | None = None
) -> Flow:
    """The dense Convex Potential Layer x - (2/s‖W‖²)·Wᵀσ(Wx + b), W with `inner` rows; see `cpl_conv`."""
    return Flow(ConvexPotential(DenseWeight(features, inner), sigma, bias), ExplicitEuler(h))


def proximal(
    features: int,
    inner: int,
    kernel_size: int | None = None,
    *,
    padding_mode: str = "zeros",
    in_size: tuple[int, int] | None = None,
    sigma: str | Nonlinearity = "relu",
    h: float = 1.0,
    iterations: int | None = None,
) -> Flow:
    """The implicit layer z = x - h·Wᵀσ(Wz + b): dense, or convolutional with a `kernel_size`."""
    weight = _weight(features, inner, kernel_size, padding_mode, in_size)
    return Flow(ConvexPotential(weight, sigma), ImplicitEuler(h, iterations))


def cayley(
    features: int, kernel_size: int | None = None, *, in_size: tuple[int, int] | None = None, h: float = 1.0
) -> Flow:
    """The Cayley layer (I - hA/2)⁻¹(I + hA/2)x: dense, or a circular convolution with a `kernel_size`."""
    return Flow(Skew(_weight(features, features, kernel_size, "circular", in_size)), Midpoint(h))


def soc(
    features: int,
    kernel_size: int | None = None,
    *,
    padding_mode: str = "zeros",
    in_size: tuple[int, int] | None = None,
    h: float = 1.0,
    terms: int = TERMS,
    train_terms: int | None = TRAIN_TERMS,
) -> Flow:
    """The skew orthogonal layer Σ_{j<k} (hA)ʲ/j! · x: dense, or convolutional with a `kernel_size`.

    The numbers of terms are the published ones. The published layer, with its scale, is `lipflow.soc_conv`.
    """
    weight = _weight(features, features, kernel_size, padding_mode, in_size)
    return Flow(Skew(weight), Exponential(h, terms, train_terms))


def _weight(
    features: int, inner: int, kernel_size: int | None, padding_mode: str, in_size: tuple[int, int] | None
) -> Weight:
    if kernel_size is None:
        return DenseWeight(features, inner)
    return ConvWeight(features, inner, kernel_size, padding_mode=padding_mode, in_size=in_size)
