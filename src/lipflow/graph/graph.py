"""A graph of primitives: how it is built, each content once, and how it runs."""

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lipflow.node import LoweringError, Vertex
from lipflow.operators import LinearOperator
from lipflow.operators.certified import CertifiedOperator, certify
from lipflow.primitives import Constant, Gather, Input, Primitive, Sum
from lipflow.shapes import Shape

T = TypeVar("T")
SAMPLE = 64  # entries that tell most tensors apart


@dataclass(frozen=True)
class Graph:
    """Vertices in an order in which each comes after its inputs: the input first, the output last."""

    vertices: tuple[Vertex, ...]
    note: str = ""  # how it was obtained, where that is worth saying

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
    """The values of vertices, each after its inputs or `known` by id; a value is dropped after its last use."""
    held, last_use = dict(known), {id(v): i for i, vertex in enumerate(vertices) for v in (*vertex.inputs, vertex)}
    for i, vertex in enumerate(vertices):
        if id(vertex) not in held:
            held[id(vertex)] = vertex.primitive.run(*(held[id(v)] for v in vertex.inputs))
        yield held[id(vertex)]
        for v in (*vertex.inputs, vertex):
            if last_use[id(v)] == i:
                held.pop(id(v), None)


def last_value(vertices: Sequence[Vertex], known: dict[int, Tensor]) -> Tensor:
    """The value of the last of some vertices."""
    return deque(values(vertices, known), maxlen=1)[0]


def in_order(start: Vertex, outputs: Iterable[Vertex]) -> tuple[Vertex, ...]:
    """All vertices that some others need, inputs before their consumers: `start` first, the last output last."""
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
    """Makes vertices, each content once: equal tensors, operators, primitives and vertices are the same object.

    All numbers are held in float64. `dtype` is that of the network that is lowered.
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
        """A primitive applied to vertices; what only moves numbers, and sums, is brought into a normal form."""
        if isinstance(primitive, Gather):
            return self.gather(primitive.index, inputs, name)
        if isinstance(primitive, Sum):
            return self.sum(zip(primitive.coefficients, inputs, strict=True), name)
        return self._vertex(primitive, inputs, name)

    def _vertex(self, primitive: Primitive, inputs: tuple[Vertex, ...], name: str | None) -> Vertex:
        primitive = self._intern(primitive)
        key = (id(primitive), *map(id, inputs))
        if key not in self._vertices:
            shape = primitive.out_shape(*(v.shape for v in inputs))
            self._vertices[key] = Vertex(primitive, inputs, shape, self.name() if name is None else name)
        return self._vertices[key]

    def gather(self, index: Tensor, inputs: Sequence[Vertex], name: str | None = None) -> Vertex:
        """A Gather, of vertices that are none themselves, each once and each needed; or its only input, as it is."""
        sources: dict[int, tuple[Vertex, int]] = {}  # by id, where its entries begin
        total = 0

        def begin(vertex: Vertex) -> int:
            nonlocal total
            if id(vertex) not in sources:
                sources[id(vertex)] = vertex, total
                total += size(vertex)
            return sources[id(vertex)][1]

        parts = []
        for vertex in inputs:
            if isinstance(vertex.primitive, Gather):
                starts = torch.tensor([begin(v) for v in vertex.inputs])
                inner, firsts = vertex.primitive.index.flatten(), _firsts(vertex.primitive.sizes)
                source = torch.bucketize(inner.clamp_min(0), firsts, right=True) - 1
                parts.append(torch.where(inner < 0, inner, inner - firsts[source] + starts[source]))
            else:
                parts.append(torch.arange(size(vertex)) + begin(vertex))
        address = torch.cat(parts)
        index = torch.where(index < 0, index, address[index.clamp_min(0)])
        # Leave out what no entry is taken from.
        used = index[index >= 0].bincount(minlength=total)
        kept = [(v, first) for v, first in sources.values() if bool(used[first : first + size(v)].any())]
        kept = kept or [next(iter(sources.values()))]
        firsts, moved = torch.tensor([first for _, first in kept]), _firsts([size(v) for v, _ in kept])
        source = torch.bucketize(index.clamp_min(0), firsts, right=True) - 1
        index = torch.where(index < 0, index, index - firsts[source.clamp_min(0)] + moved[source.clamp_min(0)])
        primitive = Gather(index, [size(v) for v, _ in kept])
        if primitive.in_order and tuple(index.shape) == kept[0][0].shape:
            return kept[0][0]
        return self._vertex(primitive, tuple(v for v, _ in kept), name)

    def scatter(self, target: Vertex, places: Tensor, value: Vertex) -> Vertex:
        """A vertex with another one written to some of its places."""
        index = torch.arange(size(target))
        index[places.flatten()] = size(target) + torch.arange(size(value))
        return self.gather(index.reshape(target.shape), [target, value])

    def sum(self, terms: Iterable[tuple[float, Vertex]], name: str | None = None) -> Vertex:
        """A Sum, in which a vertex comes once and a multiple is a coefficient; or its only term, as it is."""
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

    def _intern(self, primitive: Primitive) -> Primitive:
        values = {f.name: self._interned(getattr(primitive, f.name)) for f in dataclasses.fields(primitive)}
        key = (type(primitive), *(_key(value) for value in values.values()))
        if key not in self._objects:
            same = all(getattr(primitive, name) is value for name, value in values.items())
            self._objects[key] = primitive if same else dataclasses.replace(primitive, **values)
        return self._objects[key]

    def _interned(self, value: T) -> T:
        """The first tensor or operator of the same content."""
        found: Any = value
        if isinstance(value, Tensor):
            found = self._tensor(value)
        elif isinstance(value, LinearOperator) and not isinstance(value, CertifiedOperator):
            weight = self._tensor(value.weight)
            key = (type(value), repr(value.geometry), id(weight))
            if key not in self._objects:
                self._objects[key] = value if weight is value.weight else value.with_weight(weight)
            found = self._objects[key]
        return found

    def _tensor(self, tensor: Tensor) -> Tensor:
        tensor = _held(tensor)
        flat = tensor.reshape(-1)
        sample = flat[:: max(1, len(flat) // SAMPLE)]
        key = (tuple(tensor.shape), tensor.dtype, sample.numpy().tobytes())
        alike = self._tensors.setdefault(key, [])
        for other in alike:
            if torch.equal(other, tensor):
                return other
        alike.append(tensor)
        return tensor


def _held(t: Tensor) -> Tensor:
    """A tensor on the CPU, and its numbers in float64."""
    dtype = torch.complex128 if t.is_complex() else torch.float64 if t.is_floating_point() else t.dtype
    return t.detach().to("cpu", dtype).resolve_conj()


def _key(value: Any) -> Hashable:
    if isinstance(value, list):
        return tuple(value)
    return id(value) if isinstance(value, Tensor | LinearOperator) else value


def size(vertex: Vertex) -> int:
    """How many entries a value has."""
    return torch.Size(vertex.shape).numel()


def _firsts(sizes: Sequence[int]) -> Tensor:
    """Where each of some parts begins, one after the other."""
    return torch.tensor([0, *sizes[:-1]]).cumsum(0)


def certified(graph: Graph) -> Graph:
    """The same graph in certified arithmetic: float64, every operator's norm bounded once."""
    builder, cache = Builder(torch.float64), {}

    def once(op: LinearOperator) -> CertifiedOperator:
        if id(op) not in cache:
            cache[id(op)] = certify(op)
        return cache[id(op)]

    new: dict[int, Vertex] = {}
    for vertex in graph.vertices:
        try:
            primitive = vertex.primitive.certified(once)
        except (TypeError, ValueError) as error:
            raise LoweringError(f"{vertex.name or 'the network'}: {error}") from error
        new[id(vertex)] = builder.vertex(primitive, *(new[id(v)] for v in vertex.inputs), name=vertex.name)
    start, output = new[id(graph.vertices[0])], new[id(graph.output)]
    return Graph(in_order(start, [output]), graph.note)
