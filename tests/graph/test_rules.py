"""Rules: what a function does to nodes is what it does to tensors, and its bound is not below its Jacobians."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lipflow import LoweringError, lipschitz_bound
from lipflow.graph import lower
from lipflow.graph.address import Addresses, move
from lipflow.graph.graph import Builder
from lipflow.graph.table import COPIES, FACTORIES, IN_PLACE, INSTEAD, RULES, VIEWS
from lipflow.node import Node

IMAGES, VECTOR = (4, 6, 6), (6,)


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def constant(*shape: int) -> torch.Tensor:
    """Numbers that do not depend on the input, the same at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)), dtype=torch.float64)


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


FUNCTIONS = {
    "x + number": lambda x: x + 2,
    "number - x": lambda x: 1 - x,
    "x - channels": lambda x: x - constant(4, 1, 1),
    "x + entries": lambda x: x + constant(4, 6, 6),
    "entries + x": lambda x: constant(4, 6, 6) + x,
    "x + x": lambda x: x + x,
    "x - x": lambda x: x - x.flip(2),
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
    "written into zeros": _written,
    "clone": lambda x: x.clone().detach().contiguous().double() * 2,
    "shapes": lambda x: x * (x.shape[1] + x.size(2) + x.ndim + x.numel() // len(x)),
}


@pytest.mark.parametrize("name", [*MOVES, *FUNCTIONS])
def test_a_function_of_nodes_is_that_of_tensors(name):
    module = Calls({**MOVES, **FUNCTIONS}[name])
    graph = lower(module, IMAGES)
    x = torch.randn(2, *IMAGES, dtype=torch.float64)
    torch.testing.assert_close(graph.run(x), module(x), rtol=1e-12, atol=1e-12)
    if name in MOVES:
        assert {v.primitive.kind for v in graph.vertices} <= {"input", "constant", "gather"}


@pytest.mark.parametrize("name", [*MOVES, *FUNCTIONS])
def test_a_bound_is_not_below_the_jacobian(name):
    module = Calls({**MOVES, **FUNCTIONS}[name])
    bound = lipschitz_bound(module, IMAGES).lipschitz
    greatest = 0.0
    for x in torch.randn(3, *IMAGES, dtype=torch.float64):
        jacobian = torch.autograd.functional.jacobian(lambda v: module(torch.stack([v, v]))[0].flatten(), x)
        greatest = max(greatest, float(torch.linalg.matrix_norm(jacobian.flatten(1), 2)))
    assert greatest <= bound * (1 + 1e-11)
    if name in MOVES:
        assert greatest >= bound * (1 - 1e-7), "the bound of a move is exact"


def test_moves_compose_to_one():
    graph = lower(Calls(lambda x: F.pad(x.flip(3).permute(0, 2, 3, 1)[..., :2], (1, 1)).flatten(1)), IMAGES)
    assert [v.primitive.kind for v in graph.vertices] == ["input", "gather"]
    there_and_back = lower(Calls(lambda x: F.pixel_shuffle(F.pixel_unshuffle(x, 2), 2).flip(1).flip(1)), IMAGES)
    assert [v.primitive.kind for v in there_and_back.vertices] == ["input"]


COMPUTES = {
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "pad with a value": lambda x: F.pad(x, (1, 1), value=1.0),
    "average": lambda x: F.interpolate(x, size=3, mode="area"),
    "fold": lambda x: F.fold(F.unfold(x, 3, padding=1), (6, 6), 3, padding=1),
}


@pytest.mark.parametrize("name", COMPUTES)
def test_what_does_more_than_to_move_numbers_is_refused(name):
    with pytest.raises(LoweringError, match=r"does more than to move numbers|no rule"):
        lower(Calls(COMPUTES[name]), IMAGES)


def test_addresses_tell_comparisons_and_averages_from_moves():
    """Even of one window of two entries: the two images have their addresses in opposite order."""
    builder = Builder(torch.float64)
    node = Node.of(builder.input((2,)), builder)
    for function in (
        lambda x: x.amax(1, keepdim=True),
        lambda x: x.sort(1).values,
        lambda x: x.mean(1, keepdim=True),
        lambda x: x.sum(1, keepdim=True),
        lambda x: 2 * x,
        lambda x: x + 1,
        lambda x: x.median(1, keepdim=True).values,
        lambda x: x.cumsum(1),
    ):
        with pytest.raises(LoweringError):
            move(builder, function, (node,), {}, view=False)
    assert Addresses(builder, [node]).known.unique().numel() == 4


REFUSED = {
    "a product": (lambda x: x * x, "product of two values"),
    "a quotient": (lambda x: 1 / x, "no rule|quotient"),
    "a quotient of two": (lambda x: x / (1 + x.abs()), "quotient by a value"),
    "a weight of the input": (lambda x: F.linear(x.flatten(1), x.flatten(1)), "weights depend on the input"),
    "a matrix on many vectors": (lambda x: F.linear(x, constant(3, 6)), "flatten first"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_bound_is_refused_with_a_reason(name):
    function, words = REFUSED[name]
    with pytest.raises(LoweringError, match=words):
        lower(Calls(function), IMAGES)


def test_every_function_is_in_one_table():
    tables = [set(table) for table in (RULES, IN_PLACE, VIEWS, COPIES, FACTORIES, INSTEAD)]
    for one, other in itertools.combinations(tables, 2):
        assert not one & other
