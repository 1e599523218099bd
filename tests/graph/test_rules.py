"""Rules: a function of nodes computes what it computes of tensors, and its bound is not below its Jacobians."""

import functools
import math
from collections import Counter

import pytest
import torch
from torch.autograd.functional import jacobian
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lipflow import LoweringError, lipschitz_bound
from lipflow.graph import lower
from lipflow.graph.address import move
from lipflow.graph.graph import Builder
from lipflow.graph.table import COPIES, FACTORIES, IN_PLACE, INSTEAD, RULES, VIEWS
from lipflow.node import Node
from lipflow.operators.multiplier import multiply
from tests.soundness.graphs import Calls

IMAGES = (4, 6, 6)


def constant(*shape: int) -> torch.Tensor:
    """Random numbers, the same at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)), dtype=torch.float64)


def kinds(graph) -> list[str]:
    return [v.primitive.kind for v in graph.vertices]


MOVES = {
    "view": lambda x: x.view(len(x), -1),
    "reshape": lambda x: x.reshape(len(x), 2, -1),
    "flatten": lambda x: torch.flatten(x, 1, 2),
    "unflatten": lambda x: x.unflatten(1, (2, -1)),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "transpose": lambda x: x.transpose(1, 3),
    "movedim": lambda x: torch.movedim(x, 1, -1),
    "mT": lambda x: x.mT,
    "slices": lambda x: x[:, 1:, ::2, -3:],
    "an index": lambda x: x[:, 1],
    "a list": lambda x: x[:, [2, 0, 0]],
    "None": lambda x: x[:, None],
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "squeeze of all but the batch": lambda x: x[:, :1, :1, :1].squeeze()[..., None],
    "unsqueeze": lambda x: x.unsqueeze(2),
    "narrow": lambda x: x.narrow(2, 1, 3),
    "select": lambda x: x.select(3, 2),
    "split": lambda x: x.split([1, 3], 1)[1],
    "chunk": lambda x: torch.chunk(x, 2, 1)[0],
    "unbind": lambda x: x.unbind(1)[2],
    "cat": lambda x: torch.cat([x, x.flip(1), x[:, :1]], 1),
    "cat with constants": lambda x: torch.cat([x, constant(1, 2, 6, 6).expand(len(x), -1, -1, -1).to(x.dtype)], 1),
    "stack": lambda x: torch.stack([x, x], 2),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1)),
    "pad, circular": lambda x: F.pad(x, (1, 2, 2, 1), mode="circular"),
    "pad, reflect": lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "expand": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "flip": lambda x: x.flip(3),
    "roll": lambda x: x.roll((1, 2), (2, 3)),
    "rot90": lambda x: torch.rot90(x, 1, (2, 3)),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "unfold": lambda x: F.unfold(x, 3, padding=1),
    "index_select": lambda x: x.index_select(1, torch.tensor([3, 1])),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "tril": lambda x: x.tril(),
    "assignment": lambda x: _assigned(x.clone()),
}


def _assigned(x):
    x[:, 0] = x[:, 1]
    x[:, 2, 1:] = 3.0
    return x


def _written(x):
    out = x.new_zeros(len(x), 4, 8, 8)
    out[:, :, 1:-1, 1:-1] = x
    return out


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, *grads):
        return 2 * grads[0]


def with_a_copy(x):
    y = x.clone()
    y[:, 0] = 0.0
    return y + x


def change_a_view(x):
    y = x * 2
    y[:, :2].mul_(100)
    return y


def change_the_base(x):
    y = x * 2
    part = y[:, :2]
    y.mul_(100)
    return torch.cat([part, y], 1)


def change_a_view_of_a_view(x):
    y = (x * 2).reshape(-1, 2, 2, 6, 6)
    y.transpose(1, 2)[:, 0] += 3 * y[:, 1]
    return y.flatten(1)


def change_the_input(x):
    x -= 0.5
    return 2 * x.relu_()


FUNCTIONS = {
    "x + number": lambda x: x + 2,
    "number - x": lambda x: 1 - x,
    "x - channels": lambda x: x - constant(4, 1, 1),
    "x + entries": lambda x: x + constant(4, 6, 6),
    "entries + x": lambda x: constant(4, 6, 6) + x,
    "x + x": lambda x: x + x,
    "x - x": lambda x: x - x.flip(2),
    "x + x, alpha": lambda x: torch.add(x, x.flip(2), alpha=3),
    "x - x, alpha": lambda x: torch.sub(x, other=x.flip(2), alpha=-3),
    "-x": lambda x: -x,
    "x * number": lambda x: 3 * x,
    "x * channels": lambda x: x * constant(4, 1, 1),
    "x * entries": lambda x: x * constant(4, 6, 6),
    "x / number": lambda x: x / 3,
    "x / channels": lambda x: x / (1 + constant(4, 1, 1).abs()),
    "a channel of each, broadcast": lambda x: x + x[:, :, :1, :1],
    "linear": lambda x: F.linear(x.flatten(1), constant(5, 144), constant(5)),
    "matmul": lambda x: x.flatten(1) @ constant(144, 3),
    "conv2d": lambda x: F.conv2d(x, constant(6, 2, 3, 3), constant(6), 2, 1, 1, 2),
    "conv2d, same": lambda x: F.conv2d(x, constant(3, 4, 3, 3), padding="same", dilation=2),
    "conv2d, one number": lambda x: F.conv2d(x, constant(3, 4, 3, 3), stride=[2], padding=[1]),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, constant(4, 3, 3, 3), constant(3), 2, 1, 1),
    "conv_transpose2d, groups": lambda x: F.conv_transpose2d(x, constant(4, 2, 3, 3), groups=2, dilation=2),
    "batch_norm": lambda x: F.batch_norm(x, constant(4), constant(4).square(), constant(4), constant(4)),
    "dropout": lambda x: F.dropout(x, 0.3, False) + 1,
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "avg_pool2d, overlapping": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "avg_pool2d, rest": lambda x: F.avg_pool2d(x, (4, 5)),
    "avg_pool2d, divisor": lambda x: F.avg_pool2d(x, 2, divisor_override=3),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (3, None)),
    "mean": lambda x: x.mean((-1, -2)),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_pool2d, dilated": lambda x: F.max_pool2d(x, (2, 3), 1, 0, (2, 1)),
    "relu": lambda x: torch.relu(x),
    "relu_": lambda x: (2 * x).relu_(),
    "hardtanh": lambda x: F.hardtanh(x),
    "abs": lambda x: x.abs(),
    "maximum": lambda x: torch.maximum(x[:, :2], x[:, 2:]),
    "minimum": lambda x: torch.minimum(x, x.flip(1)),
    "maximum with a constant": lambda x: torch.maximum(x, constant(4, 1, 1).to(x.dtype)),
    "sort": lambda x: x.sort(1).values,
    "sort, descending": lambda x: torch.sort(x, 2, descending=True).values,
    "in place": lambda x: (x * 2).add_(1).mul_(3).sub_(x),
    "in place, functional": lambda x: F.relu(3 * x, inplace=True),
    "plain zeros that x is written into": _written,
    "plain ones that x is added to": lambda x: torch.ones(x.shape, dtype=x.dtype).add_(x) * 3,
    "an autograd function": Doubled.apply,
    "a checkpoint": lambda x: checkpoint(lambda v: 2 * v, x, use_reentrant=False),
    "views, a copy has memory of its own": with_a_copy,
    "views, a view changes": change_a_view,
    "views, the base changes": change_the_base,
    "views, a view of a view changes": change_a_view_of_a_view,
    "views, the input changes": change_the_input,
    "clone": lambda x: x.clone().detach().contiguous().double() * 2,
    "to": lambda x: x.to(torch.float64) * 2,
    "shapes": lambda x: x * (x.shape[1] + x.size(2) + x.ndim + x.numel() // len(x) + x.stride(1)),
    "multiply in the frequency domain": lambda x: multiply(torch.complex(*constant(2, 1, 6, 4, 3, 4)), x),
}


@pytest.mark.parametrize("name", [*MOVES, *FUNCTIONS])
def test_a_rule_computes_its_function_and_is_not_below_the_jacobian(name):
    module = Calls({**MOVES, **FUNCTIONS}[name])
    graph, bound = lower(module, IMAGES), lipschitz_bound(module, IMAGES).lipschitz
    images = torch.randn(3, *IMAGES, dtype=torch.float64)
    torch.testing.assert_close(graph.run(images.clone()), module(images.clone()), rtol=1e-12, atol=1e-12)
    jacobians = (jacobian(lambda v: module(torch.stack([v, v]))[0].flatten(), x).flatten(1) for x in images)
    greatest = max(float(torch.linalg.matrix_norm(j, 2)) for j in jacobians)
    assert greatest <= bound * (1 + 1e-11)
    if name in MOVES:
        assert greatest >= bound * (1 - 1e-7)
        assert {*kinds(graph)} <= {"input", "constant", "gather"}


def test_moves_compose_to_one():
    graph = lower(Calls(lambda x: F.pad(x.flip(3).permute(0, 2, 3, 1)[..., :2], (1, 1)).flatten(1)), IMAGES)
    assert kinds(graph) == ["input", "gather"]
    there_and_back = lower(Calls(lambda x: F.pixel_shuffle(F.pixel_unshuffle(x, 2), 2).flip(1).flip(1)), IMAGES)
    assert kinds(there_and_back) == ["input"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.amax(1, keepdim=True),
        lambda x: x.sort(1).values,
        lambda x: x.mean(1, keepdim=True),
        lambda x: x.sum(1, keepdim=True),
        lambda x: 2 * x,
        lambda x: x + 1,
        lambda x: x.median(1, keepdim=True).values,
        lambda x: x.cumsum(1),
    ],
)
def test_addresses_tell_moves_from_computations(function):
    """Even of two entries, as the two images have their addresses in opposite order."""
    builder = Builder(torch.float64)
    with pytest.raises(LoweringError):
        move(builder, function, (Node.of(builder.input((2,)), builder),), {}, view=False)


def test_every_function_is_in_one_table():
    counts = Counter(f for table in (RULES, IN_PLACE, VIEWS, COPIES, FACTORIES, INSTEAD) for f in set(table))
    twice = [function for function, count in counts.items() if count > 1]
    assert not twice, f"{twice} are in two tables of graph/table.py; a function with a rule is not in _INSTEAD"


def test_every_rule_has_a_case(monkeypatch):
    unused = set()

    def recorded(rule):
        @functools.wraps(rule)
        def wrapper(*args, **kwargs):
            unused.discard(rule.__name__)
            return rule(*args, **kwargs)

        return wrapper

    for table in (RULES, IN_PLACE):
        for function, rule in table.items():
            if rule.__name__ != "<lambda>":
                unused.add(rule.__name__)
                monkeypatch.setitem(table, function, recorded(rule))
    for function in FUNCTIONS.values():
        lower(Calls(function), IMAGES)
    assert not unused, "add a line to FUNCTIONS"
