"""What the layers of a network do better together than each on its own.

Consecutive Convex Potential Layers run as one function (`through`). And the power iterations before a training step are
one for all layers of a shape (`iterate`): a layer on its own iterates in its forward pass, on one vector, which makes
many small products; layers of a shape are the groups of one grouped convolution. While u is held, a layer may run twice
in a step, as recomputed activations do.
"""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from contextvars import Token

import torch
from torch import Tensor, nn

from lipflow.flows.descent import Layer, descend
from lipflow.flows.field import ConvexPotential
from lipflow.flows.flow import Flow
from lipflow.flows.step import ExplicitEuler
from lipflow.flows.weight import HELD, ConvWeight, Weight, moves
from lipflow.operators import Conv2d
from lipflow.operators.columns import run
from lipflow.operators.conv import likes_channels_last
from lipflow.operators.norm import in_full, power_iteration

AT_ONCE = 32  # layers that iterate together: their vectors and columns are in memory at once


def through(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    """x after all layers, consecutive Convex Potential Layers as one function.

    Convolutions by oneDNN like images channels last. A module whose own type says `any_layout = True` takes them so;
    what extends such a type, and every other module, is handed them as they came.
    """
    chain: list[Layer] = []
    turned = False  # whether x lies channels last, and did not when it came
    for module in layers:
        layer = _as_layer(module, x)
        if chain and (layer is None or not chain[-1].joins(layer, x)):
            x, chain = descend(x, *chain), []
        if layer is None:
            free = vars(type(module)).get("any_layout", False) and not listened(module)
            x = module(x.contiguous() if turned and not free else x)
            turned = turned and free and not x.is_contiguous()
        else:
            if likes_channels_last(layer.op, x) and x.is_contiguous() and not layer.by_columns(x):
                x, turned = x.contiguous(memory_format=torch.channels_last), True
            chain.append(layer)
    x = descend(x, *chain) if chain else x
    return x.contiguous() if turned else x


def in_chains(chain: nn.Sequential) -> list[nn.Module]:
    """The layers of chains within chains, in their order; a chain that someone listens to stays whole."""
    children = [(m, _chain(m)) for m in chain._modules.values() if m is not None]
    parts = ([m] if inner is None else in_chains(inner) for m, inner in children)
    return [layer for part in parts for layer in part]


class Around(nn.Module):
    """A module around a chain of layers, and at times no more than that: then a network looks through it."""

    @abstractmethod
    def bare(self) -> nn.Sequential | None:
        """The chain, where `forward` does no more for now than to run it."""


def _chain(module: nn.Module) -> nn.Sequential | None:
    """What a module runs one after the other, if it is no more than that and nobody listens to it."""
    inner = module.bare() if isinstance(module, Around) else module
    return inner if type(inner) is nn.Sequential and not listened(module) and not listened(inner) else None


def _as_layer(module: nn.Module, x: Tensor) -> Layer | None:
    """A Convex Potential Layer that nobody listens to, on inputs of x's shape."""
    if type(module) is not Flow or any(listened(m) for m in module.modules()):
        return None
    if not (type(module.step) is ExplicitEuler and type(module.field) is ConvexPotential):
        return None  # what extends them may compute anything
    return module.field.layer(x, module.step.h)


def listened(module: nn.Module) -> bool:
    """Whether a module has hooks, or a forward of its own, so that it has to be called."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in vars(module)


def followed(network: nn.Module) -> list[Weight]:
    """The weights whose norm some step size follows, of those layers in training that have seen their input size."""
    flows = (m for m in network.modules() if isinstance(m, Flow))
    return [
        flow.field.weight
        for flow in flows
        if flow.field.training
        and isinstance(flow.field, ConvexPotential)
        and isinstance(flow.step, ExplicitEuler)
        and flow.step.h is None
        and flow.field.weight.u.numel()
        and not flow.field.weight.u.is_meta
        and moves(flow.field.weight)
    ]


class Hold:
    """Within this, no forward pass moves the vectors of these weights and scales. It may be entered again."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.held = frozenset(map(id, modules))
        self.tokens: list[Token[frozenset[int]]] = []

    def __enter__(self) -> None:
        self.tokens.append(HELD.set(HELD.get() | self.held))

    def __exit__(self, *_: object) -> None:
        HELD.reset(self.tokens.pop())


@torch.no_grad()
def iterate(weights: Sequence[Weight]) -> None:
    """One power iteration of every weight, kept."""
    alike: dict[Hashable, list[Weight]] = defaultdict(list)
    for weight in weights:
        alike[_likeness(weight)].append(weight)
    groups = [group[i : i + AT_ONCE] for group in alike.values() for i in range(0, len(group), AT_ONCE)]
    for group in groups:
        if type(group[0]) is ConvWeight and len(group) > 1:
            with in_full(group[0].u):
                _iterate_as_one([weight for weight in group if type(weight) is ConvWeight])
        else:
            # Matrices are read once in any case: to stack them would only copy them.
            for weight in group:
                weight.u.copy_(power_iteration(weight.operator(None), weight.u, 1))


def _likeness(weight: Weight) -> Hashable:
    geometry = repr(weight.geometry) if isinstance(weight, ConvWeight) else ""
    return type(weight), weight.weight.shape, weight.u.shape, geometry, weight.u.dtype, weight.u.device


def _iterate_as_one(weights: Sequence[ConvWeight]) -> None:
    count, first = len(weights), weights[0]
    geometry = {**first.geometry, "groups": count * first.geometry["groups"]}
    size = first.in_size
    assert size is not None
    op = Conv2d(torch.cat([weight.weight.detach() for weight in weights]), size, **geometry)
    old = torch.stack([weight.u for weight in weights])
    v = _units(_apply(op, old.reshape(1, *op.in_shape)), count)
    new = _units(_apply(op, v, forward=False), count).reshape(old.shape)
    flat = new.flatten(1)
    moved = (flat != 0).any(1) & flat.isfinite().all(1)  # else there is nothing to follow, and u stays
    for weight, u, keep in zip(weights, new, moved, strict=True):
        weight.u.copy_(torch.where(keep, u, weight.u))


def _apply(op: Conv2d, x: Tensor, forward: bool = True) -> Tensor:
    if op.padding_mode == "zeros" and x.device.type == "cpu":
        return run(op, x, forward)
    return op(x) if forward else op.adjoint(x)


def _units(x: Tensor, count: int) -> Tensor:
    """Each of `count` equal parts of x, of norm 1; or 0 where it is 0."""
    parts = x.reshape(count, -1)
    scaled = parts / parts.abs().amax(1, keepdim=True)  # squares would overflow or vanish
    return torch.where(parts.ne(0).any(1, keepdim=True), scaled / scaled.norm(dim=1, keepdim=True), 0.0).reshape(
        x.shape
    )
