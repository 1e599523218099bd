"""Convert a certified graph to plain data and tensors, and back, for the file of a frozen network.

The description is a list of primitives, whose tensors have names, and a list of vertices [primitive, *inputs].
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, get_origin

import torch
from torch import Tensor

from lipflow.graph.fold import Domain
from lipflow.graph.graph import Graph
from lipflow.node import LoweringError, Vertex
from lipflow.operators import ConvOperator, DenseOperator, FourierMultiplier, LinearOperator
from lipflow.operators.certified import CertifiedAdjoint, CertifiedFourier, CertifiedOperator, certified_operator
from lipflow.primitives import KINDS, NONLINEARITIES, Input, Primitive
from lipflow.primitives.nonlinearity import EXACT_SIGMAS, Nonlinearity, name_of
from lipflow.untrusted import MAX_NUMBERS

SCHEMA = 2
MAX_WORK, WORK_PER_BYTE = 2**43, 2**14  # multiplications, a quarter of an hour, and more by tensors
MAX_ITERATIONS = 2**20  # of all proximal layers and series together


def tensors_of(p: Primitive) -> list[tuple[str, Tensor]]:
    """Every tensor of a primitive, by name."""
    named: dict[str, Tensor] = {}
    for field in dataclasses.fields(p):
        value = getattr(p, field.name)
        if isinstance(value, CertifiedOperator):
            named |= _weights(value)
        elif isinstance(value, Tensor):
            named[field.name] = value
    return list(named.items())


def _weights(op: CertifiedOperator) -> dict[str, Tensor]:
    op = op.inner if isinstance(op, CertifiedAdjoint) else op
    if isinstance(op, CertifiedFourier):
        return dict(real=op.real, imaginary=op.imaginary)
    return dict(weight=op.weight)


def describe(graph: Graph, domain: Domain) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A certified graph and its domain as plain data, and its tensors by name, without duplicates."""
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    primitives: list[dict[str, Any]] = []
    known: dict[int, int] = {}
    place = {id(v): i for i, v in enumerate(graph.vertices)}

    def name(t: Tensor) -> str:
        if id(t) not in names:
            names[id(t)] = f"t{len(tensors)}"
            tensors[names[id(t)]] = (t.to(torch.int32) if t.dtype == torch.int64 else t).contiguous()
        return names[id(t)]

    vertices = []
    for v in graph.vertices:
        p = v.primitive
        if id(p) not in known:
            if KINDS.get(p.kind) is not type(p):
                raise LoweringError(f"{v.name}: {p.kind} is a kind of primitive that lipflow.check does not know")
            fields = {f.name: _plain(getattr(p, f.name), name) for f in dataclasses.fields(p)}
            known[id(p)] = len(primitives)
            primitives.append(dict(kind=p.kind, **fields))
        vertices.append([known[id(p)], *(place[id(i)] for i in v.inputs)])
    description = dict(
        schema=SCHEMA,
        domain=list(domain),
        primitives=primitives,
        vertices=vertices,
        names=[v.name for v in graph.vertices],
        note=graph.note,
    )
    return description, tensors


_OPERATORS: dict[type[Any], str] = {DenseOperator: "matrix", ConvOperator: "convolution", FourierMultiplier: "fourier"}


def _plain(value: Any, name: Callable[[Tensor], str]) -> Any:
    if isinstance(value, CertifiedOperator):
        plain = dict(kind=_OPERATORS[type(value.op)], geometry=value.op.geometry)
        weights = {key: name(t) for key, t in _weights(value).items()}
        return dict(plain, adjoint=isinstance(value, CertifiedAdjoint), **weights)
    if isinstance(value, Tensor):
        return name(value)
    if isinstance(value, Nonlinearity):
        return name_of(value)
    return list(value) if isinstance(value, tuple) else value


def restored(description: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Graph, Domain]:
    """The inverse of `describe`. Every norm is bounded again."""
    _require_work(description["primitives"], tensors)
    primitives = [_primitive(i, entry, tensors) for i, entry in enumerate(description["primitives"])]
    vertices: list[Vertex] = []
    values = steps = 0
    for i, ((which, *inputs), name) in enumerate(zip(description["vertices"], description["names"], strict=True)):
        if not all(type(j) is int for j in (which, *inputs)) or not 0 <= which < len(primitives):
            raise ValueError(f"vertex {i} is {[which, *inputs]}, which are not a primitive and indices of vertices")
        p = primitives[which]
        if not all(0 <= j < i for j in inputs) or isinstance(p, Input) != (i == 0):
            raise ValueError(f"vertex {i} does not come after its inputs")
        taken = tuple(vertices[j] for j in inputs)
        vertices.append(Vertex(p, taken, p.out_shape(*(v.shape for v in taken)), str(name)))
        values += math.prod(vertices[-1].shape)
        if values > MAX_NUMBERS:
            raise ValueError(
                f"the values of its first {i + 1} vertices are {values} numbers, above the limit, {MAX_NUMBERS}"
            )
        steps += getattr(p, "iterations", 0) + getattr(p, "terms", 0)
        if steps > MAX_ITERATIONS:
            raise ValueError(f"its layers that iterate take more than {MAX_ITERATIONS} steps together")
    if not vertices:
        raise ValueError("the file holds no network")
    low, high = description["domain"]
    if not all(type(number) in (int, float) for number in (low, high)):
        raise ValueError(f"a domain is two numbers, not {[low, high]}")
    return Graph(tuple(vertices), str(description["note"])), (float(low), float(high))


def _require_work(primitives: list[dict[str, Any]], tensors: dict[str, Tensor]) -> None:
    """Raise if the operators are of so large images that bounding their norms would take hours."""
    work, limit = 0, MAX_WORK + WORK_PER_BYTE * sum(t.nbytes for t in tensors.values())
    for i, entry in enumerate(primitives):
        if "op" not in entry:
            continue
        op = _uncertified(entry["op"], tensors)
        shape, weights = op.weight.shape, op.weight.numel()
        if (values := math.prod(op.in_shape) + math.prod(op.out_shape)) > MAX_NUMBERS:
            raise ValueError(f"primitive {i} maps {values} numbers, above the limit, {MAX_NUMBERS}")
        if isinstance(op, ConvOperator):
            rows, columns = op.rows.padded + op.rows.extent, op.columns.padded + op.columns.extent
            sides = 1 + (rows + columns) // 8  # of the tori that are tried; with a matrix at each frequency
            work += rows * columns * sides * weights * (2 + 12 * min(shape[:2]) // (shape[2] * shape[3]))
        else:
            work += weights * 3 * min(shape[-2:]) + sum(op.in_shape) ** 2
        if work > limit:
            raise ValueError(f"the norms of its first {i + 1} primitives take more than {limit} multiplications")


def _primitive(index: int, entry: dict[str, Any], tensors: dict[str, Tensor]) -> Primitive:
    """A primitive from its description and the tensors of the file."""
    kind = KINDS.get(entry.get("kind", ""))
    if kind is None:
        raise ValueError(f"primitive {index} is of an unknown kind: {entry.get('kind')!r}")
    return kind(**{f.name: _field(kind, f, entry[f.name], tensors) for f in dataclasses.fields(kind)})


def _field(kind: type[Primitive], field: dataclasses.Field[Any], value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value of a field of a primitive, by its type: the inverse of `_plain`."""
    wanted: Any = field.type
    if wanted is LinearOperator:
        return _operator(value, tensors)
    if wanted is Nonlinearity:
        if value not in EXACT_SIGMAS:
            raise ValueError(f"a {kind.kind} primitive cannot be built from σ = {value!r}")
        return NONLINEARITIES[value]
    if wanted == Tensor | None and value is None:
        return None
    if wanted in (Tensor, Tensor | None):
        index = field.name == "index"
        return _tensor(tensors, value, torch.int32).to(torch.int64) if index else _tensor(tensors, value)
    if get_origin(wanted) is tuple:
        return tuple(value or ())
    number, numbers = (float, value) if wanted == list[float] else (wanted, [value])
    if number in (int, float, bool) and any(type(n) is not number for n in numbers):
        raise ValueError(f"the {field.name} of a {kind.kind} primitive cannot be {value!r}")
    return value


def _operator(entry: dict[str, Any], tensors: dict[str, Tensor]) -> CertifiedOperator:
    op = certified_operator(_uncertified(entry, tensors))
    return op.certified_adjoint() if entry["adjoint"] else op


def _uncertified(entry: dict[str, Any], tensors: dict[str, Tensor]) -> DenseOperator | ConvOperator | FourierMultiplier:
    kind = {kind: made for made, kind in _OPERATORS.items()}.get(entry["kind"])
    if kind is None:
        raise ValueError(f"an operator is of an unknown kind: {entry['kind']!r}")
    if kind is FourierMultiplier:
        weight = torch.complex(_tensor(tensors, entry["real"]), _tensor(tensors, entry["imaginary"]))
    else:
        weight = _tensor(tensors, entry["weight"])
    return kind(weight, **entry["geometry"])


def _tensor(tensors: dict[str, Tensor], name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    t = tensors.get(name)
    if t is None or t.dtype != dtype or not bool(torch.isfinite(t).all()):
        raise ValueError(f"the file has no finite {str(dtype).removeprefix('torch.')} tensor {name!r}")
    return t
