"""Convert a certified graph to plain data and tensors, and back, for the file of a frozen network.

The description is a list of primitives, whose tensors have names, and a list of vertices [primitive, *inputs].
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from typing import Any, get_args, get_origin

import torch
from torch import Tensor

from lipflow.graph.fold import Domain
from lipflow.graph.graph import Graph
from lipflow.node import LoweringError, Vertex
from lipflow.operators import ConvOperator, DenseOperator, FourierMultiplier, LinearOperator
from lipflow.operators.certified import CertifiedAdjoint, CertifiedFourier, CertifiedOperator, certified_operator
from lipflow.operators.operator import Adjoint
from lipflow.primitives import KINDS, NONLINEARITIES, Input, Primitive
from lipflow.primitives.nonlinearity import EXACT_SIGMAS, Nonlinearity, name_of
from lipflow.shapes import Shape
from lipflow.untrusted import MAX_NUMBERS

SCHEMA = 2


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


_OPERATORS: dict[type, str] = {DenseOperator: "matrix", ConvOperator: "convolution", FourierMultiplier: "fourier"}


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
    """The inverse of `describe`, which refuses what `describe` does not write. Every norm is bounded again."""
    _require_fields("the network", description, ("schema", "domain", "primitives", "vertices", "names", "note"))
    named = _Tensors(tensors)
    primitives = [_primitive(i, entry, named) for i, entry in enumerate(description["primitives"])]
    if unused := sorted(tensors.keys() - named.used):
        raise ValueError(f"no primitive uses the tensors {unused[:9]}")
    if unused := sorted(set(range(len(primitives))) - {which for which, *_ in description["vertices"]}):
        raise ValueError(f"no vertex uses the primitives {unused[:9]}")
    shapes: list[Shape] = []
    numbers = 0
    for i, (which, *inputs) in enumerate(description["vertices"]):
        if not _is(list[int], [which, *inputs]) or not 0 <= which < len(primitives):
            raise ValueError(f"vertex {i} is {[which, *inputs]}, which are not a primitive and indices of vertices")
        p = primitives[which]
        if not all(0 <= j < i for j in inputs) or isinstance(p, Input) != (i == 0):
            raise ValueError(f"vertex {i} does not come after its inputs")
        shapes.append(p.out_shape(*(shapes[j] for j in inputs)))
        op = getattr(p, "op", None)  # inside of a descent, its output is no vertex
        numbers += math.prod(shapes[i]) + (math.prod(op.out_shape) if op else 0)
        if numbers > MAX_NUMBERS:
            raise ValueError(f"the values up to vertex {i} are {numbers} numbers, above the limit, {MAX_NUMBERS}")
    if not shapes:
        raise ValueError("the file holds no network")
    for key, wanted in (("domain", tuple[float, float]), ("names", list[str]), ("note", str)):
        if not _is(wanted, description[key]):
            raise ValueError(f"the {key} of a network cannot be {description[key]!r}")
    # Norms are bounded after all shapes were compared: it takes long for an operator of a forged size.
    primitives = [_with_norm(p) for p in primitives]
    vertices: list[Vertex] = []
    for (which, *inputs), shape, name in zip(description["vertices"], shapes, description["names"], strict=True):
        vertices.append(Vertex(primitives[which], tuple(vertices[j] for j in inputs), shape, name))
    low, high = description["domain"]
    return Graph(tuple(vertices), description["note"]), (low, high)


def _with_norm(p: Primitive) -> Primitive:
    op = getattr(p, "op", None)
    return p if op is None else dataclasses.replace(p, op=certified_operator(op))  # pyright: ignore[reportCallIssue]


class _Tensors:
    """The tensors of a file by name, and the names that were used."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.used = tensors, set[str]()

    def __call__(self, name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        t = self.tensors.get(name)
        if t is None or t.dtype != dtype or not t.numel() or not bool(torch.isfinite(t).all()):
            raise ValueError(f"the file has no finite {str(dtype).removeprefix('torch.')} tensor {name!r}")
        self.used.add(name)
        return t


def _require_fields(what: str, entry: dict[str, Any], names: Iterable[str]) -> None:
    if entry.keys() != set(names):
        raise ValueError(f"{what} has the fields {', '.join(names)}, not {', '.join(map(str, entry))}")


def _is(wanted: Any, value: Any) -> bool:
    """Whether a value of a JSON file is of a type. An integer is not a float, and true is not 1."""
    args = get_args(wanted)
    if not args:
        return type(value) is wanted
    of_length = get_origin(wanted) is tuple and ... not in args
    fits = type(value) is list and all(type(v) is args[0] for v in value)
    return fits and (not of_length or len(value) == len(args))


def _primitive(index: int, entry: dict[str, Any], tensors: _Tensors) -> Primitive:
    """A primitive from its description and the tensors of the file."""
    kind = KINDS.get(entry.get("kind", ""))
    if kind is None:
        raise ValueError(f"primitive {index} is of an unknown kind: {entry.get('kind')!r}")
    fields = dataclasses.fields(kind)
    _require_fields(f"a {kind.kind} primitive", entry, ("kind", *(f.name for f in fields)))
    return kind(**{f.name: _field(kind, f, entry[f.name], tensors) for f in fields})


def _field(kind: type[Primitive], field: dataclasses.Field[Any], value: Any, tensors: _Tensors) -> Any:
    """The value of a field of a primitive, by its type: the inverse of `_plain`."""
    wanted: Any = field.type
    if wanted is LinearOperator:
        return _operator(value, tensors)
    if wanted is Nonlinearity and value in EXACT_SIGMAS:
        return NONLINEARITIES[value]
    if wanted == Tensor | None and value is None:
        return None
    if wanted in (Tensor, Tensor | None):
        index = field.name == "index"
        return tensors(value, torch.int32).to(torch.int64) if index else tensors(value)
    if not _is(wanted, value):
        raise ValueError(f"the {field.name} of a {kind.kind} primitive cannot be {value!r}")
    return tuple(value) if get_origin(wanted) is tuple else value


def _operator(entry: dict[str, Any], tensors: _Tensors) -> LinearOperator:
    kind = {kind: made for made, kind in _OPERATORS.items()}.get(entry["kind"])
    if kind is None:
        raise ValueError(f"an operator is of an unknown kind: {entry['kind']!r}")
    weights = ("real", "imaginary") if kind is FourierMultiplier else ("weight",)
    _require_fields(f"a {entry['kind']} operator", entry, ("kind", "geometry", "adjoint", *weights))
    values = [tensors(entry[name]) for name in weights]
    plain = kind(torch.complex(*values) if kind is FourierMultiplier else values[0], **entry["geometry"])
    if json.dumps(plain.geometry, sort_keys=True) != json.dumps(entry["geometry"], sort_keys=True):
        raise ValueError(f"the geometry of this operator is {plain.geometry}, not {entry['geometry']}")
    if type(entry["adjoint"]) is not bool:
        raise ValueError(f"an operator is an adjoint or not, so `adjoint` cannot be {entry['adjoint']!r}")
    return Adjoint(plain) if entry["adjoint"] else plain
