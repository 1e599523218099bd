"""The rule of all functions that only move numbers: run them on addresses, which show where each entry came from.

Note [addresses]. Every entry of the inputs gets a number of its own, its address; zeros stay zero. A function that only
moves numbers returns addresses and zeros, which are the index of one `Gather`. The two images of a node get addresses
in opposite order, each with a random part. So a function that compares entries moves the two images differently, and a
function that computes returns numbers that are not addresses: both are refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lipflow.graph.graph import Builder, numel
from lipflow.node import IMAGES, NO_NUMBERS, LoweringError, Node, Vertex

SPACING = 2**20  # between addresses, half of it random; less where there are many entries
EXACT_BITS = 52  # integers below 2⁵² are exact in float64


def move(
    builder: Builder, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], view: bool
) -> Any:
    """Apply a function that only moves numbers. The result of a `view` shares the memory of its input."""
    addresses = Addresses(builder, [*tensors_in(args), *tensors_in(kwargs)])
    result = function(*addresses.swap(args), **addresses.swap(kwargs))
    if view and len(addresses.sources) == 1:
        base = nodes_in((args, kwargs))[0]
        return map_tensors(result, lambda t: base.view_of(addresses.index(t)))
    return map_tensors(result, lambda t: Node.of(addresses.read(t), builder))


def assign(builder: Builder, target: Tensor, index: Any, value: Any) -> Vertex:
    """The value of `target` after `target[index] = value`."""
    shape = torch.zeros(tuple(target.shape))[index].shape
    if not isinstance(value, Node):
        value = torch.as_tensor(value, dtype=torch.float64).expand(shape)
    addresses = Addresses(builder, [target, value])
    result = addresses.swap(target).clone()
    result[index] = addresses.swap(value)
    return addresses.read(result)


class Addresses:
    """Addresses of the entries of some nodes and constants."""

    def __init__(self, builder: Builder, tensors: Sequence[Tensor]) -> None:
        self.builder = builder
        sources: dict[int, tuple[Vertex, Tensor | None]] = {}  # by id of a tensor: its vertex, and a mask of its zeros
        for t in tensors:
            if isinstance(t, Node):
                sources[id(t)] = t.vertex, None
            elif t.is_floating_point() and id(t) not in sources:
                value = _constant(t)
                sources[id(t)] = builder.constant(value), value == 0
        self.sources = [vertex for vertex, _ in sources.values()]
        sizes = [numel(vertex) for vertex in self.sources]
        total = sum(sizes)
        spacing = max(2, min(SPACING, 2 ** (EXACT_BITS - 1 - total.bit_length())))
        random = torch.Generator().manual_seed(total)
        jitter = torch.randint(spacing // 2, (IMAGES, total), generator=random).double()
        upwards = torch.arange(1, total + 1).double() * spacing
        self.known = torch.stack([upwards, upwards.flip(0)]) + jitter  # (images, entries)
        self.addresses: dict[int, Tensor] = {}
        for (key, (vertex, zero)), part in zip(sources.items(), self.known.split(sizes, 1), strict=True):
            addresses = part.reshape(IMAGES, *vertex.shape).contiguous()
            self.addresses[key] = addresses if zero is None else addresses.masked_fill(zero, 0.0)

    def swap(self, value: Any) -> Any:
        """Arguments with addresses instead of numbers."""
        return map_tensors(value, lambda t: self.addresses.get(id(t), t))

    def read(self, result: Tensor) -> Vertex:
        """The vertex whose entries are at these addresses."""
        return self.builder.gather(self.index(result), self.sources)

    def index(self, result: Tensor) -> Tensor:
        """The position of each entry in the concatenated sources; -1 for a zero."""
        if result.dtype != torch.float64:
            raise LoweringError(f"its result is {result.dtype}, and not float32 or float64")
        if result.ndim < 1 or len(result) != IMAGES:
            raise LoweringError(
                f"it mixes the images of a batch: its result has shape {tuple(result.shape)}; {NO_NUMBERS}"
            )
        first, second = result.reshape(IMAGES, -1)
        known = self.known[0]
        index = torch.searchsorted(known, first.contiguous()).clamp_max(len(known) - 1)
        zero, moved = (first == 0) & (second == 0), (known[index] == first) & (self.known[1][index] == second)
        if not bool((zero | moved).all()):
            if bool(torch.isin(first, self.known[1]).any() | torch.isin(second, known).any()):
                raise LoweringError("it mixes the images of a batch")
            raise LoweringError("it does more than move numbers, for these arguments")
        return torch.where(zero, -1, index).reshape(result.shape[1:])


def _constant(t: Tensor) -> Tensor:
    """One image of a plain tensor, with NaN where its two images differ."""
    t = t.detach().to("cpu", torch.float64)
    if t.ndim < 1 or len(t) != IMAGES:
        raise LoweringError(f"a constant of shape {tuple(t.shape)} does not fit a batch of {IMAGES} images")
    return torch.where(t[0] == t[1], t[0], torch.nan)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for inner in value for t in tensors_in(inner)] if isinstance(value, list | tuple) else []


def nodes_in(value: Any) -> list[Node]:
    """The nodes in nested lists, tuples and dicts."""
    return [t for t in tensors_in(value) if isinstance(t, Node)]


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply a function to the tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(inner, function) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        inner = [map_tensors(v, function) for v in value]
        return inner if isinstance(value, list) else tuple(inner)
    return value
