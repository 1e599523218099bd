"""`lower` refuses what it cannot follow or bound; errors name the place and say what to do."""

import copy
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lipflow
from lipflow import LoweringError, blocks
from lipflow.flows import ConvexPotential, DenseWeight, Flow, Skew
from lipflow.graph import lower
from lipflow.node import Node
from lipflow.operators import DenseOperator
from lipflow.primitives import Descent
from lipflow.primitives.declared import declared
from tests.graph.test_lower import SOMETHING_ELSE, Halved
from tests.graph.test_rules import IMAGES, constant
from tests.soundness.graphs import Calls


def tripled(x: Tensor) -> Tensor:
    return x * 3


def written(target, x):
    target[:, :4] = x
    return target


def with_a_view_from_before(x):
    zeros = torch.zeros(2, 8, dtype=x.dtype)
    view = zeros[:, :4]
    written(zeros, x)
    return view + x


def failing(error):
    def function(x):
        raise error("its own words")

    return function


class Nothing(Halved):
    def lower(self, x):
        pass


class Endless(Halved):
    def lower(self, x):
        return declared(x, "Endless", self, lambda norm: 0.5)


MIXES = "images of a batch|a constant differs"
NOT_FINITE = "NaN or infinite"
ITS_OWN_WORDS = r"^test_refusals\.py, line \d+: .*its own words"
OF_VECTORS = {
    "leak, vmap": (lambda x: torch.vmap(lambda v: v * 2)(x), ""),
    "leak, jit": (lambda x: torch.jit.script(tripled)(x), ""),
    "leak, torch.func.grad": (lambda x: torch.func.grad(lambda v: (v * v).sum())(x), ""),
    "leak, torch.func.jvp": (lambda x: torch.func.jvp(lambda v: 2 * v, (x,), (x,))[0], ""),
    "leak, another thread": (lambda x: ThreadPoolExecutor().submit(lambda: x * 2).result(), ""),
    "leak, .data": (lambda x: x.data * 2, ""),
    "leak, .T": (lambda x: (x.T * 2).T, ""),
    "leak, torch.Tensor(x)": (lambda x: torch.Tensor(x) * 2, ""),
    "leak, torch.tensor(x)": (lambda x: torch.tensor(x) * 2, ""),
    "leak, numpy": (lambda x: torch.from_numpy(x.numpy() * 2), ""),
    "leak, tolist": (lambda x: torch.tensor(x.tolist()), ""),
    "leak, item": (lambda x: x * x[0, 0].item(), r"\.item\(\), float\(\) or a condition"),
    "leak, item of a mean": (lambda x: x * x.mean().item(), r"\.item\(\), float\(\) or a condition"),
    "leak, a condition": (lambda x: x if x.max() > 0 else 2 * x, ""),
    "leak, a comparison": (lambda x: x if (x > 0).all() else 2 * x, ""),
    "leak, ==": (lambda x: x * (x == 3), ""),
    "leak, deepcopy": (lambda x: copy.deepcopy(x) * 2, ""),
    "leak, its storage": (lambda x: torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()), ""),
    "leak, aten": (lambda x: torch.ops.aten.mul(x, 2.0), ""),
    "leak, a view from before": (with_a_view_from_before, "a constant is NaN"),
    "mixes, flip": (lambda x: x.flip(0), MIXES),
    "mixes, one image for both": (lambda x: x[[0, 0]], MIXES),
    "mixes, one image": (lambda x: x + x[0], MIXES),
    "mixes, iteration": (lambda x: torch.stack(list(x)), MIXES),
    "mixes, reshape": (lambda x: x.reshape(4, 2).reshape(2, 4), MIXES),
    "mixes, a constant of each image": (lambda x: x + torch.arange(2.0, dtype=x.dtype)[:, None], MIXES),
    "mixes, broadcasting": (lambda x: x[:, None] + x, MIXES),
    "mixes, sort": (lambda x: x.sort(0).values, MIXES),
    "mixes, flatten": (nn.Flatten(0), r"flatten \(in function; .*\): it mixes the images of a batch"),
    "not finite, number": (lambda x: x + math.nan, NOT_FINITE),
    "not finite, factor": (lambda x: x * x.new_full((4,), math.inf), NOT_FINITE),
    "not finite, side by side": (lambda x: torch.cat([x, x.new_full((2, 1), math.nan)], 1), NOT_FINITE),
    "not finite, weight": (lambda x: F.linear(x, constant(3, 4) * math.nan), "NaN or infinite values on random images"),
    "not finite, bias": (lambda x: F.linear(x, constant(3, 4), constant(3) / 0), NOT_FINITE),
    "not finite, written to": (lambda x: written(x.new_full((2, 8), math.nan), x), NOT_FINITE),
    "argument, rounding_mode": (lambda x: torch.div(x, 2, rounding_mode="floor"), "rounding_mode"),
    "argument, out": (lambda x: torch.add(x, x, out=torch.empty(2, 4, dtype=x.dtype)), "'out'"),
    "argument, in place": (lambda x: x[:, :1].clone().add_(x), "another shape than its target"),
    "argument, dropout": (lambda x: F.dropout(x), "random in training"),
    "argument, batch": (lambda x: F.batch_norm(x, x.new_zeros(4), x.new_ones(4), training=True), "its batch"),
    "argument, hardtanh": (lambda x: F.hardtanh(x, -2.0, 2.0), r"not for \[-2.0, 2.0\]; use torch.minimum"),
    "argument, float16": (lambda x: x.to(torch.float16) + 1, "float16"),
    "no bound, layer norm": (nn.LayerNorm(4), r"^F\.layer_norm \(in function; .*\): .*use BatchNorm"),
    "no bound, gelu": (nn.GELU(), r"^F\.gelu \(in function; .*\): .*lipflow\.blocks\.MaxMin"),
    "no bound, softmax": (nn.Softmax(1), r"^F\.softmax \(in function; .*\): .*scores"),
    "no bound, a weight of the input": (lambda x: F.linear(x, x), "weights depend on the input"),
    "no bound, a product": (lambda x: x * x, "product of two values"),
    "no bound, a quotient of two": (lambda x: x / (1 + x.abs()), "quotient by a value"),
    "shape, matrix": (nn.Linear(60, 3), r"^F\.linear \(in function; .*\): affine .* shape \(4,\)$"),
    "shape, a vector": (lambda x: x @ x.new_ones(4), r"a vector is a matrix v\[:, None\]"),
    "shape, conv": (nn.Conv2d(1, 1, 1), r"^F\.conv2d \(in function; .*\): it takes images"),
    "user, TypeError": (failing(TypeError), ITS_OWN_WORDS),
    "user, KeyError": (failing(KeyError), ITS_OWN_WORDS),
    "user, lower runs itself": (Endless(), "runs itself"),
    "user, lower of nothing": (Nothing(), "`lower` of Nothing returns a NoneType, and not a node"),
    "user, two outputs": (lambda x: (x, x), "returns a tuple"),
    "user, constant": (lambda x: torch.ones(2, 4), "does not depend on its input"),
    "user, lazy": (nn.LazyLinear(3), "run it on one batch first"),
}
OF_IMAGES = {
    "computes, bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), "more than"),
    "computes, pad with a value": (lambda x: F.pad(x, (1, 1), value=1.0), "more than"),
    "computes, area": (lambda x: F.interpolate(x, size=3, mode="area"), "more than"),
    "computes, fold": (lambda x: F.fold(F.unfold(x, 3, padding=1), (6, 6), 3, padding=1), "no rule"),
    "argument, max_pool, ceil_mode": (nn.MaxPool2d(2, ceil_mode=True), "ceil_mode"),
    "argument, max_pool, indices": (nn.MaxPool2d(2, return_indices=True), "return_indices"),
    "argument, avg_pool, ceil_mode": (nn.AvgPool2d(2, ceil_mode=True), "ceil_mode"),
    "argument, avg_pool": (nn.AvgPool2d(3, padding=1, count_include_pad=False), "with count_include_pad=True"),
    "computes, a mean over the batch": (lambda x: x - x.mean(0, keepdim=True), "over the pixels of images only"),
    "shape, a matrix on many vectors": (lambda x: F.linear(x, constant(3, 6)), "flatten first"),
    "shape, overlapping windows": (nn.AdaptiveAvgPool2d(4), "overlap; the output size must divide"),
    "shape, a large kernel": (nn.Conv2d(4, 2, 9), "9 rows does not fit an input of 6"),
    "shape, a large window": (blocks.MaxPool(9), "9×9 takes images at least as large"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*OF_VECTORS, *OF_IMAGES])
def test_lower_refuses(name):
    function, words = {**OF_VECTORS, **OF_IMAGES}[name]
    with pytest.raises(LoweringError, match=words or None) as raised:
        lower(Calls(function), (4,) if name in OF_VECTORS else IMAGES)
    assert raised.type is LoweringError


def test_a_node_holds_no_numbers():
    """If it held zeros that could be computed with, every leak would give `x + constant` with L = 1."""
    nodes = []
    lower(Calls(lambda x: nodes.append(x) or x * 2), (4,))
    with pytest.raises(LoweringError, match="outside"):
        _ = nodes[0] + 1


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


def test_errors_name_the_module_and_the_line_of_the_user():
    with pytest.raises(LoweringError) as error:
        lower(nn.Sequential(nn.ReLU(), nn.Sequential(Product())), (4,))
    found = re.search(r"mul \(in 1\.0; test_refusals\.py, line (\d+)\): a product", str(error.value))
    assert found is not None
    assert Path(__file__).read_text(encoding="utf-8").splitlines()[int(found[1]) - 1].strip() == "return x * x"


class UsesAFlow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = lipflow.cpl_conv(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class NotAPrimitive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x

    def lower(self, x: Node) -> Node:
        return Descent(DenseOperator(torch.eye(3)), None, "relu", 1.0)(x)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("module", "shape", "words"),
    [
        (UsesAFlow(), (5, 8, 8), r"^in layer\.field\.weight; test_refusals\.py, line \d+: this layer takes images"),
        (NotAPrimitive(), (3,), r"^test_refusals\.py, line \d+: σ is a Nonlinearity"),
    ],
)
def test_errors_of_layers_name_the_file_that_uses_them(module, shape, words):
    with pytest.raises(LoweringError, match=words):
        lower(module, shape)


# Fields, operators and declared bounds


class Stronger(ConvexPotential):
    def gradient(self, x: Tensor) -> Tensor:
        return 3 * super().gradient(x)


class Twice(DenseOperator):
    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return 2 * super().__call__(x, bias)

    def with_weight(self, weight: Tensor) -> DenseOperator:
        return Twice(weight)


class TwiceWeight(DenseWeight):
    def operator(self, shape: tuple[int, ...] | None) -> DenseOperator:
        return Twice(super().operator(shape).weight)


def hooked() -> ConvexPotential:
    field = ConvexPotential(DenseWeight(3, 4))
    field.register_forward_hook(lambda field, inputs, output: 3 * output)
    return field


UNKNOWN_OPERATOR = r"^0: freeze takes the operators .*, not Twice|norm_bound takes a .*, not Twice"
FIELDS = {
    "stronger, explicit": (lambda: Stronger(DenseWeight(3, 4)), lipflow.ExplicitEuler(), SOMETHING_ELSE),
    "stronger, implicit": (lambda: Stronger(DenseWeight(3, 4)), lipflow.ImplicitEuler(), SOMETHING_ELSE),
    "hooked": (hooked, lipflow.ExplicitEuler(), SOMETHING_ELSE),
    "operator, explicit": (lambda: ConvexPotential(TwiceWeight(3, 4)), lipflow.ExplicitEuler(), UNKNOWN_OPERATOR),
    "operator, skew": (lambda: Skew(TwiceWeight(3, 3)), lipflow.Exponential(), UNKNOWN_OPERATOR),
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("of", [lipflow.freeze, lipflow.lipschitz_bound])
def test_fields_that_differ_from_their_parts_are_refused(of, name):
    make, step, words = FIELDS[name]
    with pytest.raises(LoweringError, match=words):
        of(nn.Sequential(Flow(make(), step)), (3,))
