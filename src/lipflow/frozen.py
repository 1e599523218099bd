"""`freeze`, and frozen networks: graphs of primitives in float64, with their constants.

Let f be the exact map of the graph and f̂ the program. For x in the domain, ‖f̂(x) - f(x)‖ ≤ E, and fᵢ - fⱼ is
dᵢⱼ-Lipschitz. E is `rounding` and d is `pair_bounds`; `lipflow.graph.fold` computes them.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, cast, final

import torch
from torch import Tensor, nn

from lipflow.files import read_tensors, save_tensors
from lipflow.graph import UNIT, Domain, Graph, certified, fold, lower
from lipflow.graph.file import SCHEMA, describe, restored, tensors_of
from lipflow.graph.fold import Constants
from lipflow.graph.graph import last_value, numel
from lipflow.node import LoweringError, Vertex
from lipflow.operators.certified import CertifiedOperator
from lipflow.operators.columns import CACHE_BYTES
from lipflow.pixels import to_unit
from lipflow.primitives import Constant
from lipflow.rounding import RANGE, require_arithmetic, subnormal
from lipflow.shapes import Shape, in_shape_of, require_batch, shape_of
from lipflow.torch_state import as_written, without_inference
from lipflow.untrusted import RUBBISH, json_object

MAX_CHUNK_IMAGES = 64  # in a chunk of layers that have more weights than values per image


class LedgerRow(NamedTuple):
    """A vertex of the graph, with its own constants."""

    kind: str  # of its primitive
    name: str  # of the module that it comes from
    size: str  # the shapes or numbers of its primitive
    lipschitz: float  # L of its primitive, from its inputs to its value
    how: str  # how this L was obtained
    rounding: float  # a bound on the rounding error that it adds
    reach: float  # a bound on the norm of its value
    norm: float | None  # a bound on the norm of its operator, if it has one


@final
@dataclass(frozen=True, eq=False, repr=False)
class Frozen:
    """A network that can be certified: immutable, in float64, callable, differentiable in its input.

    It maps images (batch, *in_shape), uint8 (read as k/255) or floats in its domain, to scores (batch, classes).
    `lipschitz` is L of the whole network, `rounding` is E, `pair_bounds` holds the constants of fᵢ - fⱼ, and `ledger`
    has a row for each vertex of the graph. `module()` wraps it in an nn.Module.
    """

    graph: Graph
    domain: Domain
    ledger: tuple[LedgerRow, ...]
    lipschitz: float
    rounding: float
    pair_bounds: Tensor

    @staticmethod
    @as_written
    def of(graph: Graph, domain: Domain = UNIT) -> "Frozen":
        """Make a frozen network from a graph of certified primitives."""
        require_arithmetic()
        for vertex in graph.vertices:
            require_numbers(vertex)
        folded = fold(graph, lambda op: cast(CertifiedOperator, op).norm, domain, rounding=True)
        total, rounding = folded.lipschitz, folded.error
        if not (math.isfinite(total) and math.isfinite(rounding)):
            raise LoweringError(f"the constants of this network are beyond float64: L = {total}, E = {rounding}")
        ledger = tuple(_ledger_row(v, k) for v, k in zip(graph.vertices, folded.vertices, strict=True))
        return Frozen(graph, (float(domain[0]), float(domain[1])), ledger, total, rounding, folded.pairs)

    @as_written
    def __call__(self, x: Tensor) -> Tensor:
        x = self.receive(x)
        body, dense, chunk_images = self._parts
        start, features = self.graph.vertices[0], body[-1]
        chunks = [
            last_value(body, {id(start): chunk}).expand(len(chunk), *features.shape) for chunk in x.split(chunk_images)
        ]
        scores = last_value(dense, {id(features): torch.cat(chunks)})
        return scores.expand(len(x), *scores.shape[1:])  # scores that do not depend on the image have one row

    def receive(self, x: Tensor) -> Tensor:
        """Convert images to float64 on the CPU, uint8 as k/255."""
        require_batch(x, self.in_shape)
        if x.dtype == torch.uint8:
            return to_unit(x.cpu(), torch.float64)
        if not x.is_floating_point():
            raise TypeError(f"images are uint8, or floats in {list(self.domain)}, not {x.dtype}")
        return x.to("cpu", torch.float64)

    @property
    def in_shape(self) -> Shape:
        return self.graph.in_shape

    @property
    def classes(self) -> int:
        """The number of scores; 0 if the network is not a classifier."""
        return len(self.pair_bounds)

    def module(self) -> nn.Module:
        """Wrap the network in an nn.Module without parameters, for attack libraries that need one."""
        return _Module(self)

    @cached_property
    def _parts(self) -> tuple[Sequence[Vertex], Sequence[Vertex], int]:
        """The body, which runs on chunks of images; the dense part, which runs on all images; the images of a chunk.

        The values of a chunk between two layers of the body fit into the processor's cache. Dense layers have more
        weights than values, so they run on all images at once. The last vertex of the body is the first of the dense
        part. From the body, the dense part needs only this vertex and constants.
        """
        vertices = self.graph.vertices
        place = {id(v): i for i, v in enumerate(vertices)}
        constants = {id(v) for v in vertices if isinstance(v.primitive, Constant)}
        cut = earliest = len(vertices) - 1
        for i in reversed(range(len(vertices))):
            needed = [place[id(v)] for v in vertices[i].inputs if id(v) not in constants]
            if len(vertices[i].shape) == 1 and i <= earliest:
                cut = i
            if len(vertices[i].shape) != 1:
                break
            earliest = min([earliest, *needed])
        body = vertices[: cut + 1]
        dense = [*(v for v in body[:-1] if id(v) in constants), *vertices[cut:]]
        values = max(numel(v) for v in body)
        weights = max((t.numel() for v in body for _, t in tensors_of(v.primitive)), default=0)
        return body, dense, max(1, CACHE_BYTES // (8 * values), min(MAX_CHUNK_IMAGES, weights // values))

    def __repr__(self) -> str:
        kinds = ", ".join(v.primitive.kind for v in self.graph.vertices[1:7])
        more = ", …" if len(self.graph.vertices) > 7 else ""
        shapes = f"{self.in_shape} → {self.graph.output.shape}"
        return f"Frozen({shapes}, L = {self.lipschitz}, E = {self.rounding:.3g}, [{kinds}{more}])"

    def save(self, path: str | Path) -> None:
        """Write the network to a safetensors file: tensors, and the graph as metadata."""
        description, tensors = describe(self.graph, self.domain)
        metadata = {"lipflow": json.dumps(description, sort_keys=True)}
        save_tensors(tensors, Path(path), metadata)

    @staticmethod
    @as_written
    @without_inference
    def load(path: str | Path) -> "Frozen":
        """Read a network from a file, and bound every norm again."""
        tensors, metadata = read_tensors(Path(path))
        if "lipflow" not in metadata:
            raise ValueError(f"{path} is not a frozen lipflow network: its metadata has no entry 'lipflow'")
        description = json_object(Path(path), metadata["lipflow"].encode())
        if "model" in description:
            raise ValueError(f"{path} is a network that is not frozen: use lipflow.freeze(lipflow.load(path))")
        if type(description.get("schema")) is not int or description["schema"] != SCHEMA:
            raise ValueError(
                f"{path} has schema {description.get('schema')!r}, of another version of lipflow; this version reads "
                f"schema {SCHEMA}: freeze and certify the network again"
            )
        try:
            return Frozen.of(*restored(description, tensors))
        except RUBBISH as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise ValueError(f"{path} does not describe a network: {kind}{' '.join(str(error).split())}") from None

    @property
    def digest(self) -> str:
        """SHA-256 of the graph and all tensors."""
        description, tensors = describe(self.graph, self.domain)
        sha = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
        for name, t in tensors.items():
            sha.update(name.encode())
            sha.update(t.numpy().tobytes())
        return sha.hexdigest()


def _ledger_row(vertex: Vertex, constants: Constants) -> LedgerRow:
    p, op = vertex.primitive, getattr(vertex.primitive, "op", None)
    norm = op.norm if isinstance(op, CertifiedOperator) else None
    return LedgerRow(p.kind, vertex.name, p.size, constants.stretch, p.how, constants.added, constants.reach, norm)


class _Module(nn.Module):
    def __init__(self, frozen: Frozen) -> None:
        super().__init__()
        self.frozen, self.training = frozen, False

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x)


@as_written
@without_inference
@torch.no_grad()
def freeze(model: nn.Module | Frozen, in_shape: Shape | None = None, domain: Domain | None = None) -> Frozen:
    """Lower a network to primitives in float64, bound every norm, and return a network that `certify` takes.

    Networks made by `build` know their input shape; for others, give in_shape=(channels, height, width). Certificates
    hold for inputs whose values lie in the `domain` (low, high), by default (0, 1).
    """
    if isinstance(model, Frozen):
        if domain not in (None, model.domain) or (in_shape is not None and shape_of(in_shape) != model.in_shape):
            raise ValueError(
                f"this network was frozen for {model.in_shape} in {list(model.domain)}; for another shape or domain "
                "freeze the live network"
            )
        return model
    return Frozen.of(certified(lower(model, in_shape_of(model, in_shape))), UNIT if domain is None else domain)


def require_numbers(vertex: Vertex) -> None:
    """Raise if a stored number is not finite, so large that products may overflow, or subnormal.

    Some processors read subnormal numbers as 0, and a large input multiplies that error.
    """
    for field, t in tensors_of(vertex.primitive):
        if not t.is_floating_point():
            continue
        found = f"{vertex.name or 'the network'}: {vertex.primitive.kind} has a number in {field} that is"
        if bool(subnormal(t).any()):
            raise LoweringError(f"{found} subnormal, below 2⁻¹⁰²²; set it to 0")
        if not bool((t.abs() <= float(RANGE)).all()):  # false for NaN
            raise LoweringError(f"{found} not finite, or so large that products overflow")
