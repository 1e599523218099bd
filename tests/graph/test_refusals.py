"""Hooks, subclasses and forwards of users have the right bound, or an error that names the place and what to do."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lipflow
from lipflow import LoweringError, blocks
from lipflow.flows import ConvexPotential, DenseWeight, Flow, Skew
from lipflow.operators import DenseOperator
from lipflow.testing import jacobian_within_bound


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def agree(model: nn.Module, shape: tuple[int, ...]) -> float:
    """L of a network: its frozen form computes the same and has the same L, and no Jacobian is larger."""
    frozen, bound = lipflow.freeze(model, in_shape=shape), lipflow.lipschitz_bound(model, shape).lipschitz
    x = torch.rand(20, *shape, dtype=torch.float64)
    live = copy.deepcopy(model).double().eval()
    torch.testing.assert_close(frozen(x), live(x).detach(), rtol=1e-9, atol=1e-9)
    assert bound == pytest.approx(frozen.lipschitz, rel=1e-6)
    jacobian_within_bound(live, shape)
    return bound


def refused(model: nn.Module, shape: tuple[int, ...], words: str) -> str:
    """The message with which both freeze and lipschitz_bound refuse a model."""
    for call in (lipflow.freeze, lipflow.lipschitz_bound):
        with pytest.raises(LoweringError, match=words) as refusal:
            call(model, in_shape=shape)
    return str(refusal.value)


SOMETHING_ELSE = r"^0 \(\w+\) computes something else"


# Hooks


PLACES = {
    "chain": lambda m: m,
    "inner chain": lambda m: m[1],
    "torch's own": lambda m: m[1][0],
    "layer": lambda m: m[2],
}


@pytest.mark.parametrize("place", PLACES)
def test_hooks_are_lowered_at_every_place(place):
    model = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), lipflow.cpl_dense(4, 3, h=0.5))
    plain = agree(model, (1, 2, 2))
    for factor in (3, -1):
        handle = PLACES[place](model).register_forward_hook(lambda module, inputs, output, c=factor: c * output)
        assert agree(model, (1, 2, 2)) == pytest.approx(abs(factor) * plain, rel=1e-6)
        handle.remove()
    assert agree(model, (1, 2, 2)) == plain


def test_a_hook_on_a_field_is_refused_as_lowering_does_not_call_fields():
    model = nn.Sequential(lipflow.cpl_dense(4, 3))
    model[0].field.register_forward_hook(lambda field, inputs, output: 3 * output)
    refused(model, (4,), SOMETHING_ELSE)


def test_a_hook_on_a_weight_is_bounded_and_not_frozen():
    """The step size follows the weight without the hook, so that the layer expands."""
    model = nn.Sequential(lipflow.cpl_dense(4, 3)).double()
    model[0].field.weight.register_forward_hook(lambda weight, inputs, op: op.with_weight(3 * op.weight))
    assert lipflow.lipschitz_bound(model, in_shape=(4,)).lipschitz == pytest.approx(2 * 9 - 1, rel=1e-6)
    with pytest.raises(LoweringError, match="certified norm"):
        lipflow.freeze(model, in_shape=(4,))


# Modules with a forward of their own, and subclasses


class LouderReLU(nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        return 100 * input


class Loop(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(super().forward(input))


class Residual(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return input + 0.5 * super().forward(input)


def trained_norm() -> nn.Module:
    norm = nn.BatchNorm2d(3)
    for _ in range(20):
        norm(3 * torch.randn(16, 3, 4, 4) + 1)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


def subclass(kind: type, *arguments: object) -> nn.Module:
    return type("Subclass", (kind,), {})(*arguments)


MODULES = {
    "another forward": (LouderReLU, (4,)),
    "a chain that runs twice": (lambda: Loop(nn.Linear(4, 4), nn.ReLU()), (4,)),
    "a residual block": (lambda: Residual(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), (4,)),
    "a subclass without a forward": (lambda: subclass(nn.Linear, 4, 2), (4,)),
    "data parallel": (lambda: nn.DataParallel(nn.Linear(4, 2)), (4,)),
    "batch normalisation": (trained_norm, (3, 4, 4)),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout()), (4,)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1), (3, 4, 3)),
    "a subclass of a potential": (
        lambda: Flow(subclass(ConvexPotential, DenseWeight(3, 4)), lipflow.ExplicitEuler(0.5)),
        (3,),
    ),
    "a subclass of a skew field": (lambda: Flow(subclass(Skew, DenseWeight(3, 3)), lipflow.Exponential()), (3,)),
    "a subclass, midpoint": (lambda: Flow(subclass(Skew, DenseWeight(3, 3)), lipflow.Midpoint()), (3,)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_lowered_by_what_they_compute(name):
    make, shape = MODULES[name]
    agree(make(), shape)


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


UNKNOWN_OPERATOR = r"^0: freeze knows the operators .*, and not Twice|norm_bound takes a .*, not Twice"


@pytest.mark.parametrize(
    ("field", "step", "words"),
    [
        (lambda: Stronger(DenseWeight(3, 4)), lipflow.ExplicitEuler(), SOMETHING_ELSE),
        (lambda: Stronger(DenseWeight(3, 4)), lipflow.ExplicitEuler(0.5), SOMETHING_ELSE),
        (lambda: Stronger(DenseWeight(3, 4)), lipflow.ImplicitEuler(), SOMETHING_ELSE),
        (lambda: ConvexPotential(TwiceWeight(3, 4)), lipflow.ExplicitEuler(), UNKNOWN_OPERATOR),
        (lambda: ConvexPotential(TwiceWeight(3, 4)), lipflow.ImplicitEuler(), UNKNOWN_OPERATOR),
        (lambda: Skew(TwiceWeight(3, 3)), lipflow.Exponential(), UNKNOWN_OPERATOR),
    ],
)
def test_fields_that_differ_from_their_parts_are_refused(field, step, words):
    refused(nn.Sequential(Flow(field(), step)), (3,), words)


# Errors: the place, the reason, and what to do


REFUSALS = {
    "layer norm": (nn.LayerNorm(4), r"^F\.layer_norm \(in 1\.1\): .*use BatchNorm"),
    "gelu": (nn.GELU(), r"^F\.gelu \(in 1\.1\): .*lipflow\.blocks\.MaxMin"),
    "softmax": (nn.Softmax(1), r"^F\.softmax \(in 1\.1\): .*scores"),
    "a matrix that does not fit": (nn.Linear(60, 3), r"^F\.linear \(in 1\.1\): affine .* shape \(4,\)$"),
    "all images as one vector": (nn.Flatten(0), r"flatten \(in 1\.1\): it mixes the images of a batch"),
    "images from vectors": (nn.Conv2d(1, 1, 1), r"^F\.conv2d \(in 1\.1\): it takes images"),
    "max_pool, indices": (nn.MaxPool2d(2, return_indices=True), "return_indices"),
    "avg_pool, ceil_mode": (nn.AvgPool2d(2, ceil_mode=True), "ceil_mode"),
    "avg_pool, no padding": (nn.AvgPool2d(3, padding=1, count_include_pad=False), "padding is counted"),
    "overlapping windows": (nn.AdaptiveAvgPool2d(2), "overlap; take sizes that divide"),
    "a large kernel": (nn.Conv2d(2, 2, 9), "9 rows does not fit an input of 5"),
    "a large window": (blocks.MaxPool(9), "9×9 takes images at least as large"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_errors_name_the_place_and_say_what_to_do(name):
    module, words = REFUSALS[name]
    vectors = r"1\.1" in words
    inner = nn.Sequential(nn.Flatten() if vectors else nn.Identity(), module)
    refused(nn.Sequential(nn.ReLU(), inner), (1, 2, 2) if vectors else (2, 5, 5), words)


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


def test_errors_name_the_line_of_the_user():
    words = r"mul \(in 1; test_refusals\.py, line (\d+)\): a product of two values"
    found = re.search(words, refused(nn.Sequential(nn.ReLU(), Product()), (4,), words))
    assert found is not None
    assert Path(__file__).read_text(encoding="utf-8").splitlines()[int(found[1]) - 1].strip() == "return x * x"


def test_freeze_refuses_declared_bounds():
    assumed = nn.Sequential(nn.Linear(4, 4), lipflow.Assume(nn.GELU(), 1.2))
    with pytest.raises(LoweringError, match=r"^1: Assume\(GELU\) has a declared bound"):
        lipflow.freeze(assumed, in_shape=(4,))
