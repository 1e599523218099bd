"""Lowering: a network is called with a node instead of a batch, which records a graph of primitives.

A function of torch that is given a node is replaced by its rule. Every other computation is ordinary arithmetic on
weights, so that parametrizations, normalizations and statistics become constants. The graph is compared with the
network on random images (`probe`).
"""

import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, resolve_name

from lipflow.graph.address import assign, map_tensors, move, nodes_in
from lipflow.graph.graph import Builder, Graph, in_order
from lipflow.graph.modules import float64_copy, lowered_forwards, state_restored
from lipflow.graph.probe import probe
from lipflow.graph.rewrite import rewrite
from lipflow.graph.rules import as_plain
from lipflow.graph.table import COPIES, FACTORIES, IN_PLACE, INSTEAD, RULES, VIEWS
from lipflow.node import LoweringError, Node, Vertex
from lipflow.primitives import Constant
from lipflow.shapes import Shape, shape_of

_PACKAGE = Path(__file__).parents[1]


def lower(module: nn.Module, in_shape: Shape, live: bool = False) -> Graph:
    """The graph of primitives that a module computes in evaluation mode, on inputs of shape `in_shape`.

    A float64 copy is lowered, or the module itself if it cannot be copied or run in float64; its state is restored.
    With `live`, the module itself is lowered and not compared with its graph: faster, for estimates in every epoch.
    """
    shape = shape_of(in_shape)
    if not shape:
        raise LoweringError("in_shape is the shape of one input, such as (channels, height, width), not ()")
    if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
        raise LoweringError(f"{type(module).__name__} has parameters without a shape yet; run it on one batch first")
    dtype = _dtype_of(module)
    with state_restored(module):  # a copy too may hold functions that use the original
        if live:
            return _lowered(module, shape, dtype, {})[0]
        twin, failure = float64_copy(module), None
        if twin is not None:
            default = torch.get_default_dtype()
            try:
                torch.set_default_dtype(torch.float64)
                return _probed(twin, shape, torch.float64)
            except RuntimeError as error:
                if "TorchScript" in str(error):  # the interpreter raises it in place of a LoweringError
                    raise LoweringError("TorchScript cannot be lowered; lower the module before scripting it") from None
                failure = error  # such as a module that computes in float32
            finally:
                torch.set_default_dtype(default)
        try:
            graph = _probed(module, shape, dtype)
        except RuntimeError as error:
            raise failure or error from None
    name = str(dtype).removeprefix("torch.")
    return replace(graph, note=f"lowered in its own {name}, as it cannot be copied to float64")


def _probed(module: nn.Module, shape: Shape, dtype: torch.dtype) -> Graph:
    outputs: dict[str, list[Vertex]] = {}
    graph, new = _lowered(module, shape, dtype, outputs)
    probe(module, graph, {name: [new(v) for v in vertices] for name, vertices in outputs.items()}, dtype)
    return graph


def _lowered(
    module: nn.Module, shape: Shape, dtype: torch.dtype, outputs: dict[str, list[Vertex]]
) -> tuple[Graph, Callable[[Vertex], Vertex]]:
    """Run a module on a node and rewrite the graph; add to `outputs` what each module returns."""
    mode = Lowering(dtype, {id(m): name for name, m in module.named_modules()})
    start = mode.builder.input(shape)
    with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False), ExitStack() as stack:
        stack.enter_context(lowered_forwards(module))
        for name, part in module.named_modules():
            stack.callback(part.register_forward_hook(partial(_record, outputs, name)).remove)
        try:
            with mode:
                result = module(Node.of(start, mode.builder))
        except LoweringError as error:
            module_name = "" if error.located else mode.name_in(_frames_of(error))
            if not module_name:
                raise
            raise LoweringError(f"in {module_name}: {error}") from None
        except RecursionError:
            raise LoweringError(
                "a `lower` runs itself: while a module is lowered, `lower` replaces `forward`, so calling the module "
                "calls `lower` again; give `declared` a function other than the module"
            ) from None
        except NotImplementedError as error:
            hint = "; use nn.Sequential(*modules) to run a list of modules" if "ModuleList" in str(error) else ""
            raise LoweringError(f"{error}{hint}") from None
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise LoweringError(f"{mode.where(_frames_of(error))}: {error}") from error
        result = mode.stand_in(result)
    if not isinstance(result, Node):
        kind = "tensor that does not depend on its input" if isinstance(result, Tensor) else type(result).__name__
        raise LoweringError(f"{type(module).__name__} returns a {kind}; a network returns one tensor")
    for vertex in in_order(start, [result.vertex]):
        if isinstance(vertex.primitive, Constant) and not bool(torch.isfinite(vertex.primitive.value).all()):
            raise LoweringError(
                f"a constant of {vertex.name or 'the network'} is NaN or infinite, or differs between images of a batch"
            )
    new = rewrite(mode.builder)
    return Graph(in_order(start, [new(result.vertex)])), new


def _record(outputs: dict[str, list[Vertex]], name: str, module: nn.Module, args: Any, output: Any) -> None:
    if isinstance(output, Node):
        outputs.setdefault(name, []).append(output.vertex)


class Lowering(TorchFunctionMode):
    """While entered, functions of torch that are given a node are replaced by their rules."""

    def __init__(self, dtype: torch.dtype, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.builder = Builder(dtype, self.running_module)
        self.written: dict[int, tuple[Tensor, Node]] = {}  # plain tensors into which nodes were written

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.stand_in(args), self.stand_in(kwargs or {})
        if not nodes_in((args, kwargs)):
            return func(*args, **kwargs)
        try:
            with self:  # rules call functions of torch on nodes
                return self.apply(func, args, kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise self.located(func, error) from (None if isinstance(error, LoweringError) else error)

    def apply(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in VIEWS or func in COPIES:
            return move(self.builder, func, args, kwargs, view=func in VIEWS)
        if func in FACTORIES and len(nodes_in((args, kwargs))) == 1:
            return func(*map(as_plain, args), **{name: as_plain(value) for name, value in kwargs.items()})
        if func is Tensor.__setitem__:
            target, index, value = args
            return self.write(target, assign(self.builder, target, index, value))
        if func in IN_PLACE:
            result = call(IN_PLACE[func], args, kwargs)
            if tuple(result.shape) != tuple(args[0].shape):
                shapes = f"{tuple(result.shape)}, its target {tuple(args[0].shape)}"
                raise LoweringError(f"its result has another shape than its target: {shapes}")
            self.write(args[0], result.vertex)
            return args[0]
        if func in RULES:
            return call(RULES[func], args, kwargs)
        if func in INSTEAD:
            raise LoweringError(INSTEAD[func])
        raise LoweringError(
            "it has no rule, so its Lipschitz constant is unknown; docs/building.md lists the functions that have "
            "one, and lipflow.Assume(module, bound=...) declares a bound for lipschitz_bound"
        )

    def write(self, target: Tensor, vertex: Vertex) -> None:
        """Overwrite a node; or fill a plain tensor with NaN, and use a node instead of it from now on."""
        if isinstance(target, Node):
            target.overwrite(vertex)
            return
        target.fill_(torch.nan)
        self.written[id(target)] = target, Node.of(vertex, self.builder)

    def stand_in(self, value: Any) -> Any:
        """Arguments with nodes in place of the plain tensors into which nodes were written."""
        if not self.written:
            return value
        return map_tensors(value, lambda t: self.written[id(t)][1] if id(t) in self.written else t)

    def running_module(self) -> str:
        """The name of the innermost module that is running."""
        return self.name_in(_frames())

    def name_in(self, frames: Iterable[FrameType]) -> str:
        """The name of the innermost module in some frames."""
        for frame in frames:
            owner = frame.f_locals.get("self")
            if id(owner) in self.names and isinstance(owner, nn.Module):
                return self.names[id(owner)]
        return ""

    def where(self, frames: Iterable[FrameType]) -> str:
        """The module and the line of the user's file in some frames, such as "in 3.conv; net.py, line 12".

        If no file of the user is among them, it is the line of a layer of lipflow.
        """
        frames = list(frames)
        module, candidates = self.name_in(frames), [f for f in frames if _is_users(f)]
        outside = (f for f in candidates if not Path(f.f_code.co_filename).is_relative_to(_PACKAGE))
        user = next(outside, candidates[0] if candidates else None)
        parts = [f"in {module}"] if module else []
        parts += [f"{Path(user.f_code.co_filename).name}, line {user.f_lineno}"] if user is not None else []
        return "; ".join(parts)

    def located(self, func: Any, error: Exception) -> LoweringError:
        """An error that names the function, the module, and the line of the user's file."""
        if isinstance(error, LoweringError) and error.located:
            return error
        name = resolve_name(func) or getattr(func, "__qualname__", repr(func))
        name = name.replace("torch.nn.functional", "F").removesuffix(".__get__")
        where = self.where(_frames())
        error = LoweringError(f"{name}{f' ({where})' if where else ''}: {error}")
        error.located = True
        return error


def call(rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """rule(*args, **kwargs); arguments that the rule does not name are refused."""
    try:
        bound = inspect.signature(rule).bind(*args, **kwargs)
    except TypeError as error:
        raise LoweringError(f"its rule does not know these arguments: {error}") from None
    return rule(*bound.args, **bound.kwargs)


def _frames() -> Iterator[FrameType]:
    """The frames of the network that is running, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _lowered.__code__:
        yield frame
        frame = frame.f_back


def _frames_of(error: Exception) -> list[FrameType]:
    """The frames in which an error was raised, the innermost first."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)][:0:-1]


def _is_users(frame: FrameType) -> bool:
    """Whether a frame belongs neither to torch nor to the lowering."""
    file = Path(frame.f_code.co_filename)
    ours = any(file.is_relative_to(_PACKAGE / name) for name in ("graph", "primitives", "node.py"))
    generated = ("torch.", "importlib", "lipflow.primitives.")  # the `__init__` of a dataclass has no file
    return not ours and not str(frame.f_globals.get("__name__", "")).startswith(generated)


def _dtype_of(module: nn.Module) -> torch.dtype:
    tensors = (*module.parameters(), *module.buffers())
    return next((t.dtype for t in tensors if t.is_floating_point()), torch.get_default_dtype())
