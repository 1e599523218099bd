"""Vertices of a graph of primitives, and nodes: tensors without numbers that stand for them.

While a network is lowered it runs on a `Node` in the place of a batch. Functions of torch that meet a node are looked
up in `lipflow.graph.rules` and return a node; nothing else can compute with one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lipflow.shapes import Shape

IMAGES = 2  # a node stands for a batch of so many: with one image, `squeeze()` would drop the batch


class LoweringError(ValueError):
    """A network cannot be lowered. It is no TypeError, as Python's operators take that for "try the other operand"."""

    placed = False  # whether the message says where


@dataclass(frozen=True, eq=False)
class Vertex:
    """One primitive applied to the values of other vertices: immutable, so consumers can hold it."""

    primitive: Any  # a lipflow.primitives.Primitive
    inputs: tuple[Vertex, ...]
    shape: Shape  # of one image
    name: str  # the module that it comes from


class Builder(Protocol):
    """What makes the vertices of a graph."""

    dtype: torch.dtype

    def vertex(self, primitive: Any, *inputs: Vertex) -> Vertex: ...

    def constant(self, value: Tensor) -> Vertex: ...


class Memory:
    """What handles of the same memory share: a number that an in-place function raises."""

    version = 0


class Node(Tensor):
    """A tensor (2, *shape) of NaN whose every computation is refused: a handle to a vertex.

    Handles that may share memory share a `Memory`. An in-place function gives its own handle a new vertex and the
    memory a new version; the other handles are out of date then, and refused.
    """

    vertex: Vertex
    builder: Builder
    memory: Memory
    version: int

    @staticmethod
    def of(vertex: Vertex, builder: Builder, memory: Memory | None = None) -> Node:
        nothing = torch.full((), torch.nan, dtype=builder.dtype).expand(IMAGES, *vertex.shape)
        node = nothing.as_subclass(Node)
        node.vertex, node.builder = vertex, builder
        node.memory = Memory() if memory is None else memory
        node.version = node.memory.version
        return node

    def overwrite(self, vertex: Vertex) -> None:
        """What an in-place function does to its own handle, and to all others of its memory."""
        self.memory.version += 1
        self.vertex, self.version = vertex, self.memory.version

    def require_current(self) -> None:
        """Refuse a handle whose memory was overwritten through another one."""
        if self.version != self.memory.version:
            raise LoweringError(
                "it reads a view of a tensor that was changed in place; use the changed tensor, or clone"
            )

    # Only what bypasses the lowering mode arrives here: threads, jit, vmap, `.data` and the like.

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise LoweringError(
            f"{func} computes outside of what lowering sees (another thread, jit, vmap, .data, a Tensor constructor); "
            "call plain functions of torch"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Node({tuple(self.vertex.shape)}, {self.vertex.primitive.kind})"


def apply(primitive: Any, *nodes: Node) -> Node:
    """The node of a primitive applied to nodes."""
    builder = nodes[0].builder
    for node in nodes:
        node.require_current()
    return Node.of(builder.vertex(primitive, *(node.vertex for node in nodes)), builder)
