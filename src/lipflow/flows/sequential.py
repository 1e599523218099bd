"""A chain of modules that runs Convex Potential Layers together."""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lipflow.fast import Layer, NormStep, descend, joint_power_iteration
from lipflow.flows.field import ConvexPotential
from lipflow.flows.flow import Flow
from lipflow.flows.step import ExplicitEuler
from lipflow.node import Node
from lipflow.operators import ConvOperator, LinearOperator
from lipflow.torch_state import may_store, transformed

M = TypeVar("M", bound=nn.Module)
Vectors = dict[int, Tensor]  # the unit vectors of this forward pass, by the id of their weight


class Sequential(nn.Sequential):
    """A faster `nn.Sequential`.

    Consecutive Convex Potential Layers run as one function that saves only their inner values (`lipflow.fast`), and
    layers of equal shapes share one power iteration. With `recompute_activations`, training saves the activations
    between segments of layers, and computes the others again in the backward pass: memory grows like the square root
    of the depth, at the cost of one more forward pass.
    """

    recompute_activations = False

    def forward(self, input: Tensor) -> Tensor:
        x = input
        if isinstance(x, Node) or torch.compiler.is_compiling() or transformed():
            return super().forward(x)
        layers = list(self)
        vectors = iterate(layers) if self.training and may_store() else {}
        if self.recompute_activations and self.training and len(layers) > 3:
            return recomputed(self, layers, x, vectors)
        return run(layers, x, vectors)


def fuse(model: M) -> M:
    """Turn every `nn.Sequential` in a model into a `Sequential`, in place. Parameters keep their names."""
    for module in model.modules():
        if type(module) is nn.Sequential:
            module.__class__ = Sequential
    return model


def run(layers: Iterable[nn.Module], x: Tensor, vectors: Vectors) -> Tensor:
    """x after all layers, with consecutive Convex Potential Layers as one function.

    Images are channels last between layers that oneDNN convolves, because oneDNN is fastest in this format.
    """
    chain: list[Layer] = []
    converted = False  # whether this function made x channels last
    for module in layers:
        layer = as_layer(module, x, vectors)
        if chain and (layer is None or not chain[-1].joins(layer, x)):
            x, chain = descend(x, *chain), []
        if layer is None:
            x, converted = module(x.contiguous() if converted else x), False
            continue
        if faster_channels_last(layer.op, x) and x.is_contiguous() and not layer.by_columns(x):
            x, converted = x.contiguous(memory_format=torch.channels_last), True
        chain.append(layer)
    x = descend(x, *chain) if chain else x
    return x.contiguous() if converted else x


def faster_channels_last(op: LinearOperator, x: Tensor) -> bool:
    """Whether W is faster on images stored channels last: oneDNN would otherwise reorder them at every product."""
    return isinstance(op, ConvOperator) and x.ndim == 4 and x.device.type == "cpu" and x.dtype != torch.float64


def as_layer(module: nn.Module, x: Tensor, vectors: Vectors) -> Layer | None:
    """A module as a `Layer` on inputs of x's shape; None unless it is a Convex Potential Layer without hooks."""
    parts = convex_potential_layer(module)
    if parts is None:
        return None
    field, step = parts
    op, h = field.weight(x), step.h
    if h is None:
        u = vectors.get(id(field.weight))
        u = field.weight.top_vector(op) if u is None or tuple(u.shape) != op.in_shape else u
        h = NormStep(u, field.sigma.high)
    return Layer(op, field.bias, h, field.sigma.function)


def convex_potential_layer(module: nn.Module) -> tuple[ConvexPotential, ExplicitEuler] | None:
    """The field and the step of a Convex Potential Layer without hooks. None for subclasses, which may differ."""
    if type(module) is not Flow or any(has_hooks(m) for m in module.modules()):
        return None
    field, step = module.field, module.step
    return (field, step) if type(field) is ConvexPotential and type(step) is ExplicitEuler else None


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks or a replaced forward, so that it must be called."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in vars(module)


def iterate(layers: Sequence[nn.Module]) -> Vectors:
    """Make one power iteration for each Convex Potential Layer in training with h = 2/‖W‖², and store the vectors."""
    parts = [p for p in map(convex_potential_layer, layers) if p is not None]
    weights = [field.weight for field, step in parts if step.h is None]
    weights = [w for w in weights if w.training and w.u.numel()]
    found = joint_power_iteration([w.operator(None) for w in weights], [w.u for w in weights])
    return {id(w): w.store(u) for w, u in zip(weights, found, strict=True)}


def recomputed(chain: nn.Module, layers: Sequence[nn.Module], x: Tensor, vectors: Vectors) -> Tensor:
    """x after all n layers, saving only the activations between segments of about √n layers."""
    again = _Recomputation(chain)
    length = math.isqrt(len(layers) - 1) + 1
    for first in range(0, len(layers), length):
        segment = layers[first : first + length]
        done = checkpoint(run, segment, x, vectors, use_reentrant=False, context_fn=lambda: (nullcontext(), again))
        x = cast(Tensor, done)
    again.buffers = again.versions()
    return x


class _Recomputation(AbstractContextManager[None]):
    """Raises if buffers changed between the computation of activations and their recomputation."""

    def __init__(self, chain: nn.Module) -> None:
        self.chain = chain
        self.buffers: list[tuple[int, int]] = []

    def versions(self) -> list[tuple[int, int]]:
        return [(id(buffer), buffer._version) for buffer in self.chain.buffers()]

    def __enter__(self) -> None:
        if self.buffers != self.versions():
            raise RuntimeError(
                "with recompute_activations, each forward pass in training must be followed by its backward pass: "
                "another forward pass has changed the step sizes in between"
            )

    def __exit__(self, *_: object) -> None: ...
