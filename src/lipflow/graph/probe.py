"""Comparison of a graph with the network that it was lowered from, on random images."""

from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lipflow.graph.graph import Graph, in_order, values
from lipflow.graph.modules import lowering_of
from lipflow.node import IMAGES, LoweringError, Vertex

SCALES = (1.0, 30.0, 1e-3)  # of the random images; those of the second scale are far outside of [0, 1]
# Tolerances for the output of a module: relative to its norm, and to the greatest norm of all values before it.
TOLERANCES_FLOAT64 = (1e-9, 1e-13)
TOLERANCES_FLOAT32 = (1e-4, 1e-6)


def probe(module: nn.Module, graph: Graph, outputs: dict[str, list[Vertex]], dtype: torch.dtype) -> None:
    """Run a network and its graph on random images, and compare the outputs of every module.

    The batch has another size than that of a node, so that a constant that depends on the batch size is noticed.
    """
    random = torch.Generator().manual_seed(0)
    wanted = [vertex for vertices in outputs.values() for vertex in vertices]
    order = in_order(graph.vertices[0], [*wanted, graph.output])
    for scale in SCALES:
        x = scale * torch.randn(IMAGES + 1, *graph.in_shape, generator=random, dtype=torch.float64)
        found: dict[str, list[Tensor]] = {}
        with torch.no_grad(), torch.device("cpu"), ExitStack() as stack:
            for name, part in module.named_modules():
                stack.callback(part.register_forward_hook(partial(_collect, found, name)).remove)
            result = module(x.to(dtype, copy=True))  # a copy, as the module may change it in place
            if isinstance(result, Tensor) and result.dtype != dtype:
                raise RuntimeError(f"{type(module).__name__} computes in {result.dtype}, and not in {dtype}")
        expected: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
        for name, vertices in outputs.items():
            # Modules inside of one with a `lower` may be called another number of times.
            if len(found.get(name, [])) == len(vertices):
                for vertex, theirs in zip(vertices, found[name], strict=True):
                    expected[id(vertex)].append((name, theirs))
        expected[id(graph.output)].append(("", result))
        largest = max(float(t.norm()) for tensors in found.values() for t in tensors)
        for vertex, ours in zip(order, values(order, {id(order[0]): x.to(dtype).double()}), strict=True):
            largest = max(largest, float(ours.norm()))
            for name, theirs in expected[id(vertex)]:
                require_close(module, name, theirs, ours, dtype, largest)


def _collect(found: dict[str, list[Tensor]], name: str, module: nn.Module, args: Any, output: Any) -> None:
    if isinstance(output, Tensor):
        found.setdefault(name, []).append(output.detach().clone())


def require_close(
    module: nn.Module, name: str, theirs: Tensor, ours: Tensor, dtype: torch.dtype, largest: float
) -> None:
    """Raise LoweringError if the outputs of a module and of the graph differ; `largest` is the greatest norm so far."""
    part = module.get_submodule(name)
    label = f"{name} ({type(part).__name__})" if name else type(part).__name__
    why = "is its `lower` right?" if lowering_of(type(part)) else "does it do the same in every call and batch?"
    images = IMAGES + 1
    if theirs.shape != (images, *ours.shape[1:]):
        shapes = f"{tuple(theirs.shape)} for {images} images, lowered {(images, *ours.shape[1:])}"
        raise LoweringError(f"{label} returns another shape than it was lowered to: {shapes}; {why}")
    if not bool(torch.isfinite(theirs).all()):
        raise LoweringError(f"{label} returns NaN or infinite values on random images")
    length, apart = float(theirs.double().norm()), float((theirs.double() - ours).norm())
    close, rounded = TOLERANCES_FLOAT64 if dtype == torch.float64 else TOLERANCES_FLOAT32
    if not apart <= close * length + rounded * largest:
        raise LoweringError(
            f"{label} computes something else than it was lowered to: on random images the outputs are {apart:.3g} "
            f"apart, of norm {length:.3g}; {why}"
        )
