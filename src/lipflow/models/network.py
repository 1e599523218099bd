"""A network: a chain of named stages, its input shape, and the arguments that built it."""

import math
from collections import OrderedDict
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lipflow.blocks import FlipAverage, Head, Normalize
from lipflow.flows import Sequential, Weight
from lipflow.pixels import to_unit
from lipflow.shapes import Shape, require_batch, shape_of


class Network(nn.Module):
    """Stages applied in order to pixels in [0, 1]  # (batch, *in_shape) → (batch, classes).

    A uint8 value k is the pixel k/255, as in a frozen network.
    """

    def __init__(self, stages: "OrderedDict[str, nn.Module]", in_shape: Shape) -> None:
        super().__init__()
        self.stages = Sequential(stages)
        self.in_shape = shape_of(in_shape)
        self.name: str | None = None
        self.model_args: dict[str, Any] = {}
        self.set_input_size(self.in_shape)

    @torch.no_grad()
    def set_input_size(self, in_shape: Shape) -> None:
        """Set the input size of every layer, so that all buffers exist before an optimiser or a rank needs them."""
        tensors = (t for t in chain(self.parameters(), self.buffers()) if t.is_floating_point())
        tensor = next(tensors, torch.empty(0))
        modes = [(module, module.training) for module in self.modules()]
        before = {m: m.u.clone() for m, _ in modes if isinstance(m, Weight)}
        for module, _ in modes:  # in training mode, weights store the size without the long estimate of evaluation
            module.training = isinstance(module, Weight)
        self(torch.zeros(1, *in_shape, dtype=tensor.dtype, device=tensor.device))
        for module, training in modes:
            module.training = training
        for weight, u in before.items():  # undo the power iteration of training
            if weight.u.shape == u.shape:
                weight.u.copy_(u)
            else:
                weight.reset_estimate()

    def recompute_activations(self, wanted: bool = True) -> "Network":
        """Use less memory in training, at the cost of one more forward pass; see `Sequential`."""
        for module in self.modules():
            if isinstance(module, Sequential):
                module.recompute_activations = wanted
        return self

    @property
    def head(self) -> Head:
        """The last stage."""
        head = self.stages[-1]
        if not isinstance(head, Head):
            raise TypeError(
                "the last stage of a Network is a Head, such as blocks.LastLayerNormalization or blocks.Truncate, not "
                f"{type(head).__name__}"
            )
        return head

    @property
    def classes(self) -> int:
        return self.head.classes

    def pair_constants(self) -> Tensor:
        """The Lipschitz constants of fᵢ - fⱼ in the input, differentiable  # (classes, classes).

        The layers between `Normalize` and the head are taken to be 1-Lipschitz.
        """
        deviations = (m.std for m in self.modules() if isinstance(m, Normalize) and m.std is not None)
        return math.prod(1 / float(std.min()) for std in deviations) * self.head.pair_constants()

    def forward(self, x: Tensor) -> Tensor:
        require_batch(x, self.in_shape)
        return self.stages(self._unit(x))

    def with_flips(self) -> "Network":
        """A network of the same modules, whose scores are the mean over an image and its mirror image.

        Train it with random flips, as most recipes do (`flip`).
        """
        *body, (name, head) = self.stages.named_children()
        if [type(module) for _, module in body] == [FlipAverage]:
            return self
        averaged = FlipAverage(OrderedDict(body))
        network = Network(OrderedDict([("mirrored", averaged), (name, head)]), self.in_shape)
        network.name, network.model_args = self.name, {**self.model_args, "mirror": True}
        for module in (network, network.stages, averaged, averaged.inner):
            module.training = self.training
        return network

    def _unit(self, x: Tensor) -> Tensor:
        """Pixels as floats; uint8 is converted to the dtype of the weights."""
        tensors = chain(self.parameters(), self.buffers())
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.get_default_dtype())
        if x.dtype == torch.uint8:
            return to_unit(x, dtype)
        if not x.is_floating_point():
            raise TypeError(f"images are uint8, or floats in [0, 1], not {x.dtype}")
        if torch.finfo(x.dtype).bits > torch.finfo(dtype).bits == 32:
            raise TypeError(f"images are {x.dtype} and the weights {dtype}; give x.float(), or network.double()")
        return x

    def extra_repr(self) -> str:
        return f"name={self.name!r}, in_shape={self.in_shape}"
