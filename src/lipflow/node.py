"""Vertices of a graph of primitives, and nodes: tensors without numbers that represent them.

While a network is lowered it runs on a `Node` instead of a batch. Functions of torch that are given a node are looked
up in `lipflow.graph.table` and return a node; no other function can compute with one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipflow.shapes import Shape

IMAGES = 2  # the size of the batch that a node represents: with one image, `squeeze()` would drop the batch


# For errors of functions that users call to get one number.
NO_NUMBERS = "if it is for .item(), float() or a condition: numbers are unknown while a network is lowered"


class LoweringError(ValueError):
    """A network cannot be lowered. Not a TypeError, after which Python's operators would try the other operand."""

    located = False  # whether the message names the function, the module and the line


@dataclass(frozen=True, eq=False)
class Vertex:
    """One primitive applied to the values of other vertices; immutable."""

    primitive: Any  # a lipflow.primitives.Primitive
    inputs: tuple[Vertex, ...]
    shape: Shape  # of one image
    name: str  # of the module that it comes from

    def __str__(self) -> str:
        return f"{self.primitive.kind} ({self.primitive.size})" + (f" at {self.name}" if self.name else "")


class Node(Tensor):
    """A tensor (2, *shape) of NaN that stands for a vertex. Functions of torch have rules for it; the others raise.

    A node has its own vertex, or it is a view of another node, its base. An in-place function changes the base and so
    all its views, as for tensors that share memory.
    """

    builder: Any  # a lipflow.graph.Builder
    base: Node | None
    places: Tensor  # of a view: the positions of its entries in the base
    _value: Vertex  # of a view: up to date while the vertex of the base is `_base_value`
    _base_value: Vertex | None

    @staticmethod
    def of(vertex: Vertex, builder: Any) -> Node:
        node = Node._blank(vertex.shape, builder)
        node._value = vertex
        return node

    @staticmethod
    def _blank(shape: Shape, builder: Any) -> Node:
        node = torch.full((), torch.nan, dtype=builder.dtype).expand(IMAGES, *shape).as_subclass(Node)
        node.builder, node.base, node._base_value = builder, None, None
        return node

    def view_of(self, places: Tensor) -> Node:
        """The view of the entries at `places`, an int64 tensor of the shape of the view."""
        node = Node._blank(tuple(places.shape), self.builder)
        node.base, node.places = self, places
        return node

    @property
    def vertex(self) -> Vertex:
        """The vertex of its current value."""
        if self.base is not None and self._base_value is not self.base.vertex:
            self._base_value = self.base.vertex
            self._value = self.builder.gather(self.places, [self._base_value])
        return self._value

    def overwrite(self, vertex: Vertex) -> None:
        """Replace the value, as an in-place function does."""
        if self.base is None:
            self._value = vertex
        else:
            self.base.overwrite(self.builder.scatter(self.base.vertex, self.places, vertex))

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    # Called only by functions that bypass the lowering mode: threads, jit, vmap, `.data` and others.
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise LoweringError(
            f"{func} computes outside of the lowering mode (another thread, jit, vmap, .data, a Tensor constructor); "
            "call plain functions of torch"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Node({tuple(self.vertex.shape)}, {self.vertex.primitive.kind})"


def apply(primitive: Any, *nodes: Node) -> Node:
    """The node of a primitive applied to nodes."""
    builder = nodes[0].builder
    return Node.of(builder.vertex(primitive, *(node.vertex for node in nodes)), builder)
