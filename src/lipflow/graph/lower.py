"""Lowering is running: a network becomes a graph of primitives by being called with a node in the place of a batch.

Functions of torch that meet a node are looked up in the rules; every other computation is ordinary arithmetic on
weights, so that parametrisations, normalisations and statistics become constants by themselves. What was lowered is
held against the network itself on random images (`probe`).
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from lipflow.graph.address import assign, move, tensors_in
from lipflow.graph.graph import Builder, Graph, in_order
from lipflow.graph.rewrite import rewrite
from lipflow.graph.rules import plain
from lipflow.graph.table import COPIES, FACTORIES, IN_PLACE, INSTEAD, RULES, VIEWS
from lipflow.node import IMAGES, LoweringError, Node, Vertex
from lipflow.primitives import Constant
from lipflow.shapes import Shape, shape_of

# How classes that cannot be given a `lower` of their own are lowered: {class: function(module, node) -> node}.
LOWERINGS: dict[type[nn.Module], Callable[[Any, Node], Node]] = {}

SCALES = (1.0, 30.0, 1e-3)  # of the random images of a probe; the second ones are far outside of [0, 1]
CLOSE = {torch.float64: 1e-9}  # how well a graph and its network agree, relatively
CLOSE_OTHERWISE = 1e-4
_HERE = Path(__file__).parents[1]


def lower(module: nn.Module, in_shape: Shape, live: bool = False) -> Graph:
    """The graph of primitives that a module computes in evaluation mode, on inputs of a shape.

    What is lowered is a float64 copy; or the module itself, left as it was, where it cannot be copied or run so. With
    `live` it is the module itself, and it is not held against anything: for estimates that are made every epoch.
    """
    shape = shape_of(in_shape)
    if live:
        with _in_evaluation(module):
            return _lowered(module, shape, _dtype_of(module), {})[0]
    try:
        twin = copy.deepcopy(module).to("cpu", torch.float64).eval()
    except Exception:  # whatever a copy of somebody's module raises, the module itself can be lowered
        return _itself(module, shape)
    try:
        with _default_dtype(torch.float64):
            return _probed(twin, shape, torch.float64)
    except LoweringError:
        raise
    except RuntimeError as error:
        if "TorchScript" in str(error):  # its interpreter has swallowed the refusal
            raise LoweringError("TorchScript cannot be looked into; lower the module before it is scripted") from None
        # It computes in a type of its own, say, that does not meet float64.
        try:
            return _itself(module, shape)
        except LoweringError:
            raise
        except RuntimeError:
            raise error from None


def _itself(module: nn.Module, shape: Shape) -> Graph:
    dtype = _dtype_of(module)
    state = {name: t.detach().clone() for name, t in (*module.named_parameters(), *module.named_buffers())}
    try:
        with _in_evaluation(module):
            graph = _probed(module, shape, dtype)
    finally:
        with torch.no_grad():
            for name, t in (*module.named_parameters(), *module.named_buffers()):
                if name in state and state[name].shape == t.shape:
                    t.copy_(state[name])
    return replace(
        graph, note=f"lowered in its own {str(dtype).removeprefix('torch.')}, as it cannot be copied to float64"
    )


def _probed(module: nn.Module, shape: Shape, dtype: torch.dtype) -> Graph:
    outputs: dict[str, list[Vertex]] = {}
    graph, new = _lowered(module, shape, dtype, outputs)
    seen = {name: [new(v) for v in vertices] for name, vertices in outputs.items()}
    probe(module, graph, seen, dtype)
    return graph


def _lowered(
    module: nn.Module, shape: Shape, dtype: torch.dtype, outputs: dict[str, list[Vertex]]
) -> tuple[Graph, Callable[[Vertex], Vertex]]:
    """Run a module on a node, and rewrite the graph; what modules return is put into `outputs`."""
    names = {id(m): name for name, m in module.named_modules()}
    mode = Lowering(dtype, names)
    start = mode.builder.input(shape)
    with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False), ExitStack() as stack:
        stack.enter_context(_lowered_forwards(module))
        for name, part in module.named_modules():
            handle = part.register_forward_hook(partial(_record, outputs, name))
            stack.callback(handle.remove)
        try:
            with mode:
                result = module(Node.of(start, mode.builder))
        except NotImplementedError as error:
            raise LoweringError(f"{error}; of a list of modules make a chain, nn.Sequential(*modules)") from None
        result = mode.stand_in(result)
    if not isinstance(result, Node):
        kind = "tensor that does not depend on its input" if isinstance(result, Tensor) else type(result).__name__
        raise LoweringError(f"{type(module).__name__} returns a {kind}; a network returns one tensor")
    result.require_current()
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
    """While this is entered, functions of torch that meet a node follow their rule."""

    def __init__(self, dtype: torch.dtype, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.builder = Builder(dtype, self.place)
        self.written: dict[int, tuple[Tensor, Node]] = {}  # plain tensors that nodes were written into

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.stand_in(args), self.stand_in(kwargs or {})
        nodes = [t for t in (*tensors_in(args), *tensors_in(kwargs)) if isinstance(t, Node)]
        if not nodes:
            return func(*args, **kwargs)
        try:
            with self:  # the rules themselves call functions of torch on nodes
                for node in nodes:
                    node.require_current()
                return self.apply(func, args, kwargs)
        except LoweringError as error:
            raise self.refusal(func, error) from None
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise self.refusal(func, error) from error

    def apply(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in VIEWS or func in COPIES:
            return move(self.builder, func, args, kwargs, view=func in VIEWS)
        if func in FACTORIES and not any(isinstance(t, Node) for t in tensors_in((args[1:], kwargs))):
            return func(plain(args[0]), *args[1:], **kwargs)
        if func is Tensor.__setitem__:
            target, index, value = args
            return self.write(target, assign(self.builder, target, index, value))
        if func in IN_PLACE:
            result = call(IN_PLACE[func], args, kwargs)
            if tuple(result.shape) != tuple(args[0].shape):
                raise LoweringError(f"its result has the shape {tuple(result.shape)}, and not that of its target")
            self.write(args[0], result.vertex)
            return args[0]
        if func in RULES:
            return call(RULES[func], args, kwargs)
        if func in INSTEAD:
            raise LoweringError(INSTEAD[func])
        raise LoweringError("it has no rule (lipflow.graph.table), so that its Lipschitz bound is not known")

    def write(self, target: Tensor, vertex: Vertex) -> None:
        """Overwrite a node; or let a plain tensor stand for one from now on, with NaN for whoever looks at it."""
        if isinstance(target, Node):
            target.overwrite(vertex)
            return
        target.fill_(torch.nan)
        self.written[id(target)] = target, Node.of(vertex, self.builder)

    def stand_in(self, value: Any) -> Any:
        """Arguments with nodes in the place of plain tensors that nodes were written into."""
        if not self.written:
            return value
        if isinstance(value, Tensor):
            return self.written[id(value)][1] if id(value) in self.written else value
        if isinstance(value, dict):
            return {key: self.stand_in(inner) for key, inner in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.stand_in(inner) for inner in value)
        return value

    def place(self) -> str:
        """The name of the innermost module that is running."""
        for frame in _frames():
            owner = frame.f_locals.get("self")
            if id(owner) in self.names and isinstance(owner, nn.Module):
                return self.names[id(owner)]
        return ""

    def refusal(self, func: Any, error: Exception) -> Exception:
        """An error that names the function, the module, and the line of the user's file."""
        if isinstance(error, LoweringError) and error.placed:
            return error
        name = resolve_name(func) or getattr(func, "__qualname__", repr(func))
        name = name.replace("torch.nn.functional", "F").removesuffix(".__get__")
        module, line = self.place(), next((f for f in _frames() if _is_users(f)), None)
        where = [f"in {module}"] if module else []
        where += [f"{Path(line.f_code.co_filename).name}, line {line.f_lineno}"] if line is not None else []
        text = f"{name}{' (' + '; '.join(where) + ')' if where else ''}: {error}"
        placed = LoweringError(text)
        placed.placed = True
        return placed


def call(rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """rule(*args, **kwargs), where an argument that the rule does not name is refused."""
    try:
        bound = inspect.signature(rule).bind(*args, **kwargs)
    except TypeError as error:
        raise LoweringError(f"its rule does not know these arguments: {error}") from None
    return rule(*bound.args, **bound.kwargs)


def _frames() -> Iterator[Any]:
    """The frames of the network that is running, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _lowered.__code__:
        yield frame
        frame = frame.f_back


def _is_users(frame: Any) -> bool:
    """Whether a frame is neither of torch nor of what lowers."""
    file = Path(frame.f_code.co_filename)
    ours = file.is_relative_to(_HERE / "graph") or file.is_relative_to(_HERE / "primitives") or file.name == "node.py"
    return not ours and not str(frame.f_globals.get("__name__", "")).startswith(("torch.", "importlib"))


@contextmanager
def _lowered_forwards(module: nn.Module) -> Iterator[None]:
    """While this is entered, modules that know how they are lowered do so when they are called."""
    changed = []
    try:
        for part in module.modules():
            way = lowering_of(type(part))
            if way is not None and "forward" not in vars(part):
                part.forward = partial(way, part)
                changed.append(part)
        yield
    finally:
        for part in changed:
            del part.forward


def lowering_of(kind: type) -> Callable[[Any, Node], Node] | None:
    """How a class is lowered: as the table says, or by its own `lower`, unless a subclass has another `forward`."""
    if kind in LOWERINGS:
        return LOWERINGS[kind]
    owners = {name: next((c for c in kind.__mro__ if name in vars(c)), None) for name in ("forward", "lower")}
    if owners["lower"] is None or owners["forward"] is None or not issubclass(owners["lower"], owners["forward"]):
        return None
    return vars(owners["lower"])["lower"]


def probe(module: nn.Module, graph: Graph, outputs: dict[str, list[Vertex]], dtype: torch.dtype) -> None:
    """Run a network and its graph on random images, and compare what every module returns."""
    random = torch.Generator().manual_seed(0)
    wanted = [vertex for vertices in outputs.values() for vertex in vertices]
    start, *order = in_order(graph.vertices[0], [*wanted, graph.output])
    for scale in SCALES:
        x = (scale * torch.randn(IMAGES, *graph.in_shape, generator=random, dtype=torch.float64)).to(dtype)
        found: dict[str, list[Tensor]] = {}
        with torch.no_grad(), torch.device("cpu"), ExitStack() as stack:
            for name, part in module.named_modules():
                stack.callback(part.register_forward_hook(partial(_collect, found, name)).remove)
            result = module(x)
            if isinstance(result, Tensor) and result.dtype != dtype:
                raise RuntimeError(f"{type(module).__name__} computes in {result.dtype}, and not in {dtype}")
            values = {id(start): x.double()}
            for vertex in order:
                values[id(vertex)] = vertex.primitive.run(*(values[id(v)] for v in vertex.inputs))
        for name, vertices in outputs.items():
            # What a module with a `lower` runs inside may be called another number of times.
            if len(found.get(name, [])) == len(vertices):
                for theirs, vertex in zip(found[name], vertices, strict=True):
                    require_close(_called(module, name), theirs, values[id(vertex)], dtype)
        require_close(type(module).__name__, result, values[id(graph.output)], dtype)


def _called(module: nn.Module, name: str) -> str:
    """A part of a module by its name and class."""
    kind = type(module.get_submodule(name)).__name__
    return f"{name} ({kind})" if name else kind


def _collect(found: dict[str, list[Tensor]], name: str, module: nn.Module, args: Any, output: Any) -> None:
    if isinstance(output, Tensor):
        found.setdefault(name, []).append(output.detach().clone())


def require_close(name: str, theirs: Tensor, ours: Tensor, dtype: torch.dtype) -> None:
    """Refuse a graph that computes something else than its network."""
    theirs = theirs.double()
    ours = ours.expand(len(theirs), *ours.shape[1:])
    if theirs.shape != ours.shape:
        shapes = f"{tuple(theirs.shape)}, lowered {tuple(ours.shape)}"
        raise LoweringError(f"{name} returns another shape than it was lowered to: {shapes}")
    if not bool(torch.isfinite(theirs).all()):
        raise LoweringError(f"{name} gives numbers that are not finite, on random images")
    length, apart = float(theirs.norm()), float((theirs - ours).norm())
    if not apart <= CLOSE.get(dtype, CLOSE_OTHERWISE) * length:
        raise LoweringError(
            f"{name} computes something else than it was lowered to: on random images the two are {apart:.3g} apart, "
            f"of {length:.3g}; is its `lower` right, and does it do the same in each call?"
        )


def _dtype_of(module: nn.Module) -> torch.dtype:
    tensors = (*module.parameters(), *module.buffers())
    return next((t.dtype for t in tensors if t.is_floating_point()), torch.get_default_dtype())


@contextmanager
def _in_evaluation(module: nn.Module) -> Iterator[None]:
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
