"""The certified object: a graph of primitives in float64, its constants, and its file.

Let f be the exact map of the graph, and f̂ the program that runs it. Over the box of its domain ‖f̂(x) - f(x)‖ ≤ E, and
fᵢ - fⱼ is dᵢⱼ-Lipschitz: `rounding` and `pair_bounds`, folded by `lipflow.graph.fold`.
"""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lipflow.bound import shape_for
from lipflow.certificate import Certificates, from_logits, require_pixels
from lipflow.files import save_tensors, write_atomic
from lipflow.graph import UNIT, Domain, Graph, certified, fold, lower
from lipflow.graph.file import SCHEMA, describe, restored, tensors_of
from lipflow.graph.graph import last_value, size
from lipflow.node import LoweringError, Vertex
from lipflow.operators.certified import CertifiedOperator
from lipflow.operators.columns import CACHE_BYTES
from lipflow.primitives import Constant
from lipflow.rounding import RANGE
from lipflow.shapes import Shape, require_batch, shape_of

P = ParamSpec("P")
T = TypeVar("T")
CHUNK = 250  # images that `certify` runs at a time
MANY = 64  # images that go through a layer together where its weights are larger than they are


class Row(NamedTuple):
    """One line of the ledger: a vertex, its constant and where that comes from, its rounding, and what it may reach."""

    kind: str
    name: str
    size: str
    lipschitz: float
    how: str
    rounding: float
    reach: float


def _on_the_cpu(function: Callable[P, T]) -> Callable[P, T]:
    """The function, whose new tensors are on the CPU also where the user has set another default device."""

    @wraps(function)
    def there(*arguments: P.args, **named: P.kwargs) -> T:
        if torch.get_default_device().type == "cpu":  # within `torch.device`, every function of torch costs more
            return function(*arguments, **named)
        with torch.device("cpu"):
            return function(*arguments, **named)

    return there


@final
@dataclass(frozen=True, eq=False, repr=False)
class Frozen:
    """A network that can be certified: immutable, float64, called like a function, differentiable in its input.

    It takes images `(batch, *in_shape)`, uint8 as k/255 or floats in its domain, to scores `(batch, classes)`.
    `lipschitz` is the L of the whole network, `rounding` its E, `pair_bounds` the constants of fᵢ - fⱼ; `ledger` has a
    row for each vertex of its graph. Its weights are its own. `module()` is for programs that ask for an nn.Module.
    """

    graph: Graph
    domain: Domain
    ledger: tuple[Row, ...]
    lipschitz: float
    rounding: float
    pair_bounds: Tensor

    @staticmethod
    def of(graph: Graph, domain: Domain = UNIT) -> "Frozen":
        """Fold the constants of a certified graph."""
        require_arithmetic()
        for vertex in graph.vertices:
            require_numbers(vertex)
        folded = fold(graph, lambda op: cast(CertifiedOperator, op).norm, domain, rounding=True)
        total, rounding = folded.lipschitz, folded.error
        if not (math.isfinite(total) and math.isfinite(rounding)):
            raise LoweringError(f"the constants of this network are beyond float64: L = {total}, E = {rounding}")
        ledger = tuple(
            Row(v.primitive.kind, v.name, v.primitive.size, k.stretch, v.primitive.how, k.added, k.reach)
            for v, k in zip(graph.vertices, folded.vertices, strict=True)
        )
        return Frozen(graph, (float(domain[0]), float(domain[1])), ledger, total, rounding, folded.pairs)

    def __call__(self, x: Tensor) -> Tensor:
        # Compiled, it would be another program than the one that is certified: leave the graph of a compiler.
        return (_uncompiled if "torch._dynamo" in sys.modules else Frozen._run)(self, x)

    def _run(self, x: Tensor) -> Tensor:
        x = self.receive(x)
        first, rest, at_a_time = self._parts
        start = self.graph.vertices[0]
        # While they are images, few at a time: what passes between layers stays in the cache, if not their weights.
        parts = [
            last_value(first, {id(start): part}).expand(len(part), *first[-1].shape) for part in x.split(at_a_time)
        ]
        scores = last_value(rest, {id(first[-1]): torch.cat(parts)})
        return scores.expand(len(x), *scores.shape[1:])  # one row where they do not depend on the images

    def receive(self, x: Tensor) -> Tensor:
        """Images as the network computes with them: float64 on the CPU, uint8 as k/255."""
        require_batch(x, self.in_shape)
        if x.dtype == torch.uint8:
            return x.to("cpu", torch.float64) / 255
        if not x.is_floating_point():
            raise TypeError(f"images are uint8, or floats in {list(self.domain)}, not {x.dtype}")
        return x.to("cpu", torch.float64)

    @property
    def in_shape(self) -> Shape:
        return self.graph.in_shape

    @property
    def classes(self) -> int:
        """The number of scores; 0 for a network that is no classifier."""
        return len(self.pair_bounds)

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(label, certified radius) of each image."""
        certificates = certify(self, x)
        return certificates.label, certificates.radius

    def module(self) -> nn.Module:
        """The network as an nn.Module without parameters, for attack libraries and the like."""
        return _Module(self)

    @cached_property
    def _parts(self) -> tuple[Sequence[Vertex], Sequence[Vertex], int]:
        """The vertices to run a few images at a time, those that run on all at once, and how many are a few.

        The second half begins at a vertex that is all it needs of the first, and has vectors only.
        """
        vertices = self.graph.vertices
        place = {id(v): i for i, v in enumerate(vertices)}
        held = {id(v) for v in vertices if isinstance(v.primitive, Constant)}
        cut = earliest = len(vertices) - 1
        for i in reversed(range(len(vertices))):
            needed = [place[id(v)] for v in vertices[i].inputs if id(v) not in held]
            if len(vertices[i].shape) == 1 and i <= earliest:
                cut = i
            if len(vertices[i].shape) != 1:
                break
            earliest = min([earliest, *needed])
        first = vertices[: cut + 1]
        rest = [*(v for v in first[:-1] if id(v) in held), first[-1], *vertices[cut + 1 :]]
        largest = max(size(v) for v in first)
        weights = max((t.numel() for v in first for _, t in tensors_of(v.primitive)), default=0)
        return first, rest, max(1, CACHE_BYTES // (8 * largest), min(MANY, weights // largest))

    def __repr__(self) -> str:
        kinds = ", ".join(v.primitive.kind for v in self.graph.vertices[1:7])
        more = ", …" if len(self.graph.vertices) > 7 else ""
        shapes = f"{self.in_shape} → {self.graph.output.shape}"
        return f"Frozen({shapes}, L = {self.lipschitz}, E = {self.rounding:.3g}, [{kinds}{more}])"

    # Files

    def save(self, path: str | Path) -> None:
        """Write the network to a safetensors file: tensors, and the graph as metadata."""
        description, tensors = describe(self.graph, self.domain)
        metadata = {"lipflow": json.dumps(description, sort_keys=True)}
        write_atomic(Path(path), lambda temporary: save_tensors(tensors, temporary, metadata))

    @staticmethod
    @_on_the_cpu
    def load(path: str | Path) -> "Frozen":
        """Read a network from its file. Every norm is bounded anew: a file's word is not taken."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no file {path}")
        try:
            with safe_open(str(path), framework="pt") as file:
                text = (file.metadata() or {}).get("lipflow")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from None
        if text is None:
            raise ValueError(f"{path} is no frozen lipflow network: its metadata has no 'lipflow'")
        try:
            description = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path} does not describe a network: {error}") from None
        if not isinstance(description, dict):
            raise ValueError(f"{path} does not describe a network")
        if "model" in description:
            raise ValueError(f"{path} is a network that is not frozen: lipflow.freeze(lipflow.load(path))")
        if description.get("schema") != SCHEMA:
            raise ValueError(
                f"{path} has schema {description.get('schema')!r}, of another version of lipflow, and this one reads "
                f"{SCHEMA}; freeze and certify the network again"
            )
        try:
            return Frozen.of(*restored(description, tensors))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise ValueError(f"{path} does not describe a network: {kind}{error}") from None

    @property
    def digest(self) -> str:
        """SHA-256 over the graph and every tensor."""
        description, tensors = describe(self.graph, self.domain)
        sha = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
        for name, t in tensors.items():
            sha.update(name.encode())
            sha.update(t.numpy().tobytes())
        return sha.hexdigest()


_UNCOMPILED: list[Any] = []


def _uncompiled(frozen: Frozen, x: Tensor) -> Tensor:
    """The scores as Python computes them, within a compiled program too."""
    if not _UNCOMPILED:
        _UNCOMPILED.append(torch.compiler.disable(Frozen._run))  # when it is needed, as it imports the compiler
    return _UNCOMPILED[0](frozen, x)


class _Module(nn.Module):
    """A frozen network as a module that has nothing to train."""

    def __init__(self, frozen: Frozen) -> None:
        super().__init__()
        self.frozen, self.training = frozen, False

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x)


@_on_the_cpu
@torch.no_grad()
def freeze(model: nn.Module | Frozen, in_shape: Shape | None = None, domain: Domain | None = None) -> Frozen:
    """Lower a network to primitives in float64, bound every norm once, and return what can be certified.

    Built networks know their input shape; for others, give in_shape=(channels, height, width). Certificates hold for
    inputs in the box [low, high] of the `domain`, [0, 1] unless it is given.
    """
    if isinstance(model, Frozen):
        if domain not in (None, model.domain) or (in_shape is not None and shape_of(in_shape) != model.in_shape):
            raise ValueError(
                f"this network is frozen already, for {model.in_shape} in {list(model.domain)}; freeze the live network"
            )
        return model
    return Frozen.of(certified(lower(model, shape_for(model, in_shape))), UNIT if domain is None else domain)


@_on_the_cpu
@torch.no_grad()
def certify(frozen: Frozen, images: Tensor) -> Certificates:
    """A label and a radius for each of some images `(n, *in_shape)`: uint8, or floats in the network's domain."""
    if not isinstance(frozen, Frozen):
        raise TypeError(f"certify takes a frozen network: lipflow.freeze(model), not {type(frozen).__name__}")
    if not frozen.classes:
        raise ValueError(
            "certify takes a classifier of two classes or more, whose output is (batch, classes), not "
            f"(batch, {str(frozen.graph.output.shape)[1:]}"
        )
    require_batch(images, frozen.in_shape)
    require_pixels(images, frozen.domain)
    parts = [frozen(chunk) for chunk in images.split(CHUNK)]
    return from_logits(torch.cat(parts), frozen.pair_bounds, frozen.rounding)


def require_numbers(vertex: Vertex) -> None:
    """Refuse stored numbers that are not finite, that overflow once they are multiplied, or that some processors read
    as 0: an error of a subnormal weight is not small, where the weight meets large numbers."""
    for field, t in tensors_of(vertex.primitive):
        if not t.is_floating_point():
            continue
        bits = t.contiguous().view(torch.int64)
        exponent = (bits >> 52) & 2047  # read from the bits: a processor that flushes would not see them
        called = f"{vertex.name or 'the network'}: {vertex.primitive.kind}"
        if bool(((exponent == 0) & (bits << 1 != 0)).any()):
            raise LoweringError(f"{called} has a subnormal number in {field}, below 2⁻¹⁰²²; set it to 0")
        if bool((t.abs() > float(RANGE)).any()) or not bool(torch.isfinite(t).all()):
            raise LoweringError(f"{called} has a number in {field} that is beyond float64 once it is multiplied")


def require_arithmetic() -> None:
    """Refuse a machine whose float64 is not IEEE with rounding to nearest, as far as a quick test can tell."""
    one = torch.ones(1, dtype=torch.float64)
    half = one * 2.0**-53
    right = [
        (one + half == one).item(),  # a tie goes to even
        (one + half * 1.5 > one).item(),
        (one - half < one).item(),
        (one / 3 * 3 == one).item(),
        ((one * 2.0**27 + 1).square() - 2.0**54 == 2.0**28).item(),
    ]
    exact = torch.arange(1, 10001, dtype=torch.float64) @ torch.arange(1, 10001, dtype=torch.float64)
    if not all(right) or exact.item() != 10000 * 10001 * 20001 // 6:
        raise RuntimeError(
            "float64 arithmetic here does not round to nearest as IEEE 754 says; nothing can be certified"
        )
