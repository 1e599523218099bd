"""A graph of primitives: how it is built, without duplicates, and how it runs."""

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lipflow.node import LoweringError, Vertex
from lipflow.operators import LinearOperator
from lipflow.operators.certified import CertifiedOperator, certified_operator
from lipflow.primitives import Constant, Gather, Input, Primitive, Sum
from lipflow.shapes import Shape

SAMPLE_ENTRIES = 64  # of a tensor, in the key that is used to find equal tensors


@dataclass(frozen=True)
class Graph:
    """Vertices in an order in which each comes after its inputs: the input first, the output last."""

    vertices: tuple[Vertex, ...]
    note: str = ""  # how it was lowered, if not from a float64 copy

    @property
    def in_shape(self) -> Shape:
        return self.vertices[0].shape

    @property
    def output(self) -> Vertex:
        return self.vertices[-1]

    def run(self, x: Tensor) -> Tensor:
        """The output for a batch of inputs."""
        return last_value(self.vertices, {id(self.vertices[0]): x})

    def values(self, x: Tensor) -> Iterator[Tensor]:
        """The value of every vertex for a batch of inputs, in order."""
        return values(self.vertices, {id(self.vertices[0]): x})


def values(vertices: Sequence[Vertex], known: dict[int, Tensor]) -> Iterator[Tensor]:
    """The values of vertices, each after its inputs or `known` by id. A value is freed after its last use."""
    results, last_use = dict(known), {id(v): i for i, vertex in enumerate(vertices) for v in (*vertex.inputs, vertex)}
    for i, vertex in enumerate(vertices):
        if id(vertex) not in results:
            results[id(vertex)] = vertex.primitive.run(*(results[id(v)] for v in vertex.inputs))
        yield results[id(vertex)]
        for v in (*vertex.inputs, vertex):
            if last_use[id(v)] == i:
                results.pop(id(v), None)


def last_value(vertices: Sequence[Vertex], known: dict[int, Tensor]) -> Tensor:
    """The value of the last of some vertices."""
    return deque(values(vertices, known), maxlen=1)[0]


def in_order(start: Vertex, outputs: Iterable[Vertex]) -> tuple[Vertex, ...]:
    """The vertices that `outputs` depend on, inputs before outputs: `start` first, the last output last."""
    order: dict[int, Vertex] = {id(start): start}
    for output in outputs:
        waiting = [output]
        while waiting:
            vertex = waiting[-1]
            missing = [v for v in vertex.inputs if id(v) not in order]
            if missing:
                waiting.extend(missing)
            else:
                order.setdefault(id(vertex), vertex)
                waiting.pop()
    return tuple(order.values())


class Builder:
    """Creates vertices. Equal tensors, operators, primitives and vertices become the same object.

    All numbers are stored in float64. `dtype` is that of the network that is lowered.
    """

    start: Vertex

    def __init__(self, dtype: torch.dtype, name: Callable[[], str] = str) -> None:
        self.dtype, self.name = dtype, name
        self._tensors: dict[Hashable, list[Tensor]] = {}
        self._objects: dict[Hashable, Any] = {}
        self._vertices: dict[Hashable, Vertex] = {}

    def input(self, shape: Shape) -> Vertex:
        self.start = self.vertex(Input(shape))
        return self.start

    def constant(self, value: Tensor) -> Vertex:
        return self.vertex(Constant(value))

    def vertex(self, primitive: Primitive, *inputs: Vertex, name: str | None = None) -> Vertex:
        """A primitive applied to vertices. Gathers and sums are simplified."""
        if isinstance(primitive, Gather):
            return self.gather(primitive.index, inputs, name)
        if isinstance(primitive, Sum):
            return self.sum(zip(primitive.coefficients, inputs, strict=True), name)
        return self._vertex(primitive, inputs, name)

    def _vertex(self, primitive: Primitive, inputs: tuple[Vertex, ...], name: str | None) -> Vertex:
        primitive = self._shared_primitive(primitive)
        key = (id(primitive), *map(id, inputs))
        if key not in self._vertices:
            shape = primitive.out_shape(*(v.shape for v in inputs))
            self._vertices[key] = Vertex(primitive, inputs, shape, self.name() if name is None else name)
        return self._vertices[key]

    def gather(self, index: Tensor, inputs: Sequence[Vertex], name: str | None = None) -> Vertex:
        """A Gather of some vertices, or its only input if it changes nothing.

        Inputs that are gathers are replaced by their own inputs. Each input is listed once, and only if it is used.
        """
        inner = [v.inputs if isinstance(v.primitive, Gather) else (v,) for v in inputs]
        sources = list(dict.fromkeys(v for vertices in inner for v in vertices))
        places, parts = _places(sources), []
        for vertex, vertices in zip(inputs, inner, strict=True):
            part, p = torch.cat([places[v] for v in vertices]), vertex.primitive
            parts.append(_take(part, p.index.flatten()) if isinstance(p, Gather) else part)
        index = _take(torch.cat(parts), index)
        counts = index[index >= 0].bincount(minlength=sum(map(numel, sources)))
        needed = [v for v in sources if bool(counts[places[v]].any())] or sources[:1]
        new = _places(needed)
        primitive = Gather(_take(torch.cat([new.get(v, places[v]) for v in sources]), index), list(map(numel, needed)))
        if primitive.is_reshape and tuple(index.shape) == needed[0].shape:
            return needed[0]
        return self._vertex(primitive, tuple(needed), name)

    def scatter(self, target: Vertex, places: Tensor, value: Vertex) -> Vertex:
        """The target with a value written to some of its places."""
        index = torch.arange(numel(target))
        index[places.flatten()] = numel(target) + torch.arange(numel(value))
        return self.gather(index.reshape(target.shape), [target, value])

    def sum(self, terms: Iterable[tuple[float, Vertex]], name: str | None = None) -> Vertex:
        """A Sum in which each vertex is one term, or the vertex of the only term if its coefficient is 1."""
        coefficients: dict[int, float] = {}
        vertices: dict[int, Vertex] = {}
        for c, vertex in terms:
            if isinstance(vertex.primitive, Sum) and len(vertex.inputs) == 1:
                c, vertex = c * vertex.primitive.coefficients[0], vertex.inputs[0]
            coefficients[id(vertex)] = coefficients.get(id(vertex), 0.0) + c
            vertices[id(vertex)] = vertex
        if list(coefficients.values()) == [1.0]:
            return next(iter(vertices.values()))
        if len(vertices) == 1:
            (vertex,) = vertices.values()
            (c,) = coefficients.values()
            if isinstance(vertex.primitive, Sum):  # c·(a·x + b·y) is ca·x + cb·y
                inner = zip(vertex.primitive.coefficients, vertex.inputs, strict=True)
                return self.sum([(c * a, v) for a, v in inner], name)
        return self._vertex(Sum(list(coefficients.values())), tuple(vertices.values()), name)

    def _shared_primitive(self, primitive: Primitive) -> Primitive:
        """The first primitive with the same content."""
        values = {f.name: self._shared_value(getattr(primitive, f.name)) for f in dataclasses.fields(primitive)}
        key = (type(primitive), *(_key(value) for value in values.values()))
        if key not in self._objects:
            same = all(getattr(primitive, name) is value for name, value in values.items())
            self._objects[key] = primitive if same else dataclasses.replace(primitive, **values)
        return self._objects[key]

    def _shared_value(self, value: Any) -> Any:
        """The first tensor or operator with the same content; other values unchanged."""
        if isinstance(value, Tensor):
            return self._shared_tensor(value)
        if not isinstance(value, LinearOperator) or isinstance(value, CertifiedOperator):
            return value
        weight = self._shared_tensor(value.weight)
        key = (type(value), repr(value.geometry), id(weight))
        if key not in self._objects:
            self._objects[key] = value if weight is value.weight else value.with_weight(weight)
        return self._objects[key]

    def _shared_tensor(self, tensor: Tensor) -> Tensor:
        dtype = tensor.dtype
        if tensor.is_complex() or tensor.is_floating_point():
            dtype = torch.complex128 if tensor.is_complex() else torch.float64
        tensor = tensor.detach().to("cpu", dtype).resolve_conj()
        flat = tensor.reshape(-1)
        sample = flat[:: max(1, len(flat) // SAMPLE_ENTRIES)]
        key = (tuple(tensor.shape), tensor.dtype, sample.numpy().tobytes())
        alike = self._tensors.setdefault(key, [])
        for other in alike:
            if torch.equal(other, tensor):
                return other
        alike.append(tensor)
        return tensor


def _key(value: Any) -> Hashable:
    if isinstance(value, list):
        return tuple(value)
    return id(value) if isinstance(value, Tensor | LinearOperator) else value


def numel(vertex: Vertex) -> int:
    """The number of entries of a value."""
    return torch.Size(vertex.shape).numel()


def _places(vertices: Sequence[Vertex]) -> dict[Vertex, Tensor]:
    """The positions of the entries of each vertex, one vertex after the other."""
    sizes = [numel(v) for v in vertices]
    return dict(zip(vertices, torch.arange(sum(sizes)).split(sizes), strict=True))


def _take(values: Tensor, index: Tensor) -> Tensor:
    """values[index], and -1 where the index is -1."""
    return torch.where(index < 0, index, values[index.clamp_min(0)])


def certified(graph: Graph) -> Graph:
    """The same graph in certified arithmetic: float64, every operator's norm bounded once."""
    builder, certify = Builder(torch.float64), cache(certified_operator)
    new: dict[Vertex, Vertex] = {}
    for vertex in graph.vertices:
        try:
            primitive = vertex.primitive.certified(certify)
        except (TypeError, ValueError) as error:
            raise LoweringError(f"{vertex.name or 'the network'}: {error}") from error
        new[vertex] = builder.vertex(primitive, *(new[v] for v in vertex.inputs), name=vertex.name)
    return Graph(in_order(new[graph.vertices[0]], [new[graph.output]]), graph.note)
