"""Vertices of a graph of primitives, and nodes: tensors without numbers that stand for them.

While a network is lowered it runs on a `Node` in the place of a batch. Functions of torch that meet a node are looked
up in `lipflow.graph.rules` and return a node; nothing else can compute with one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lipflow.shapes import Shape

IMAGES = 2  # a node stands for a batch of so many: with one image, `squeeze()` would drop the batch


class LoweringError(ValueError):
    """A network cannot be lowered. It is no TypeError, as Python's operators take that for "try the other operand"."""


@dataclass(frozen=True, eq=False)
class Vertex:
    """One primitive applied to the values of other vertices: immutable, so consumers can hold it."""

    primitive: Any  # a lipflow.primitives.Primitive
    inputs: tuple[Vertex, ...]
    shape: Shape  # of one image
    name: str  # the module that it comes from

    def __str__(self) -> str:
        return f"{self.primitive.kind} ({self.primitive.size})" + (f" at {self.name}" if self.name else "")


class Maker(Protocol):
    """What makes the vertices of a graph: `lipflow.graph.Builder`."""

    dtype: torch.dtype

    def vertex(self, primitive: Any, *inputs: Vertex) -> Vertex: ...

    def constant(self, value: Tensor) -> Vertex: ...

    def gather(self, index: Tensor, inputs: Sequence[Vertex]) -> Vertex: ...

    def scatter(self, target: Vertex, places: Tensor, value: Vertex) -> Vertex: ...


class Node(Tensor):
    """A tensor (2, *shape) of NaN whose every computation is refused: a handle to a vertex.

    A node is the value of a vertex, or a view: some places of another node, its base. In-place functions change the
    base, so that all its views see it, as memory does.
    """

    builder: Maker
    base: Node | None
    places: Tensor | None  # of a view: where its entries are in the base
    _value: Vertex  # of a view: its value when the base was `_base_value`
    _base_value: Vertex | None

    @staticmethod
    def of(vertex: Vertex, builder: Maker) -> Node:
        node = Node._blank(vertex.shape, builder)
        node._value = vertex
        return node

    @staticmethod
    def _blank(shape: Shape, builder: Maker) -> Node:
        node = torch.full((), torch.nan, dtype=builder.dtype).expand(IMAGES, *shape).as_subclass(Node)
        node.builder, node.base, node.places, node._base_value = builder, None, None, None
        return node

    def view_of(self, places: Tensor) -> Node:
        """The view of some of its entries  # places: of the view's shape, int64."""
        node = Node._blank(tuple(places.shape), self.builder)
        node.base, node.places = self, places
        return node

    @property
    def vertex(self) -> Vertex:
        """Its value now."""
        if self.base is not None and self.places is not None and self._base_value is not self.base.vertex:
            self._base_value = self.base.vertex
            self._value = self.builder.gather(self.places, [self._base_value])
        return self._value

    def overwrite(self, vertex: Vertex) -> None:
        """What an in-place function does."""
        if self.base is None or self.places is None:
            self._value = vertex
        else:
            self.base.overwrite(self.builder.scatter(self.base.vertex, self.places, vertex))

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
    return Node.of(builder.vertex(primitive, *(node.vertex for node in nodes)), builder)
