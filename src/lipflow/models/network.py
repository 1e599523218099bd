"""A network: named stages in a chain, the shape of its input, and how it was built."""

import math
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lipflow.blocks import Head, Mirrored
from lipflow.flows.together import Hold, followed, in_chains, iterate, through
from lipflow.shapes import Shape, require_batch, shape_of


class _Again:
    """Around a second computation of the same: nothing moves the vectors of norms, and nothing has moved them since."""

    def __init__(self, network: nn.Module) -> None:
        self.hold, self.network = Hold(network.modules()), network
        self.left: list[tuple[int, int]] = []

    def remember(self) -> None:
        """After the first computation: how it left the buffers."""
        self.left = self._buffers()

    def _buffers(self) -> list[tuple[int, int]]:
        return [(id(buffer), buffer._version) for buffer in self.network.buffers()]

    def __enter__(self) -> None:
        if self.left != self._buffers():
            raise RuntimeError(
                "with checkpoint_activations, a forward pass in training must be followed by its backward pass: "
                "another one has moved the step sizes since"
            )
        self.hold.__enter__()

    def __exit__(self, *_: object) -> None:
        self.hold.__exit__()


class Network(nn.Module):
    """Stages applied one after the other to pixels in [0, 1]  # (batch, *in_shape) → (batch, classes).

    Bytes k are read as k/255, live as frozen.

    With `checkpoint_activations`, training keeps the activations between segments of layers only, and computes the
    others again in the backward pass: memory grows like the square root of the depth, for one more forward pass. Under
    torch.compile it has no effect.
    """

    def __init__(self, stages: "OrderedDict[str, nn.Module]", in_shape: Shape) -> None:
        super().__init__()
        self.stages = nn.Sequential(stages)
        self.in_shape = shape_of(in_shape)
        self.name: str | None = None
        self.sizes: dict[str, Any] = {}
        self.checkpoint_activations = False
        self.see(self.in_shape)

    def see(self, in_shape: Shape) -> None:
        """Show every layer its input size, so that buffers exist before an optimiser or another rank asks for them."""
        tensors = (t for t in chain(self.parameters(), self.buffers()) if t.is_floating_point())
        tensor = next(tensors, torch.empty(0))
        modes = [(module, module.training) for module in self.modules()]
        with torch.no_grad():
            self.eval()(torch.zeros(1, *in_shape, dtype=tensor.dtype, device=tensor.device))
        for module, training in modes:
            module.training = training

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
        require_batch(x, self.in_shape)
        x = self._unit(x)
        if torch.compiler.is_compiling():
            return self.stages(x)
        layers = in_chains(self.stages)
        if not self.training:
            return through(layers, x)
        weights = followed(self)
        iterate(weights)
        with Hold(weights):
            return self._sparing(layers, x) if self.checkpoint_activations else through(layers, x)

    def mirrored(self) -> "Network":
        """The network whose scores are the mean over an image and its mirror image, made of the same modules.

        Train with mirrored images, as most recipes do (`flip`), or it means little to the network.
        """
        *body, (name, head) = self.stages.named_children()
        if [type(module) for _, module in body] == [Mirrored]:
            return self
        mirrored = Mirrored(OrderedDict(body))
        network = Network(OrderedDict([("mirrored", mirrored), (name, head)]), self.in_shape)
        network.name, network.sizes = self.name, {**self.sizes, "mirror": True}
        network.checkpoint_activations = self.checkpoint_activations
        for module in (network, network.stages, mirrored, mirrored.inner):
            module.training = self.training
        return network

    def _unit(self, x: Tensor) -> Tensor:
        """Pixels as floats: bytes k as k/255, in the type of the weights."""
        tensors = chain(self.parameters(), self.buffers())
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.get_default_dtype())
        if x.dtype == torch.uint8:
            return x.to(dtype) / torch.full((), 255, dtype=dtype, device=x.device)
        if not x.is_floating_point():
            raise TypeError(f"images are uint8, or floats in [0, 1], not {x.dtype}")
        if torch.finfo(x.dtype).bits > torch.finfo(dtype).bits == 32:
            raise TypeError(f"images are {x.dtype} and the weights {dtype}; give x.float(), or network.double()")
        return x

    def _sparing(self, layers: list[nn.Module], x: Tensor) -> Tensor:
        """Through all layers, keeping what passes between segments of about √n of n layers only."""
        again = _Again(self)

        def contexts() -> tuple[AbstractContextManager[None], _Again]:
            return nullcontext(), again

        length = math.isqrt(len(layers) - 1) + 1
        for first in range(0, len(layers), length):
            segment = layers[first : first + length]
            x = cast(Tensor, checkpoint(through, segment, x, use_reentrant=False, context_fn=contexts))
        again.remember()
        return x

    def extra_repr(self) -> str:
        return f"name={self.name!r}, in_shape={self.in_shape}"
