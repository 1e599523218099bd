"""Modules with hooks, subclasses and forwards of their own have the right bound; refusals name the place and say what
to do."""

import copy
import re

import pytest
import torch
from torch import Tensor, nn

import lipflow
from lipflow import LoweringError, blocks
from lipflow.flows import ConvexPotential, DenseWeight, Flow, Skew
from lipflow.operators import DenseOperator


def _chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), lipflow.cpl_dense(4, 3, h=0.5))


def _agree(model: nn.Module, shape: tuple[int, ...]) -> lipflow.Frozen:
    """The frozen network, which computes what the live one does, and stretches no more than it says."""
    frozen = lipflow.freeze(model, in_shape=shape)
    x = torch.rand(20, *shape, dtype=torch.float64)
    live = copy.deepcopy(model).double().eval()
    torch.testing.assert_close(frozen(x), live(x).detach(), rtol=1e-9, atol=1e-9)
    bound = lipflow.lipschitz_bound(model, shape)
    assert bound.lipschitz == pytest.approx(frozen.lipschitz, rel=1e-6)
    for image in torch.randn(20, *shape, dtype=torch.float64):
        jacobian = torch.autograd.functional.jacobian(lambda v: live(v[None])[0].flatten(), image)
        assert isinstance(jacobian, Tensor)
        assert float(torch.linalg.matrix_norm(jacobian.flatten(1), 2)) <= bound.lipschitz * (1 + 1e-12)
    return frozen


def _refused(model: nn.Module, shape: tuple[int, ...], words: str) -> str:
    """Both freeze and lipschitz_bound refuse a model; the last message."""
    for call in (lipflow.freeze, lipflow.lipschitz_bound):
        with pytest.raises(LoweringError, match=words) as refusal:
            call(model, in_shape=shape)
    return str(refusal.value)


SOMETHING_ELSE = r"^0 \(\w+\) computes something else than it was lowered to"


# Hooks are part of a network


PLACES = {
    "chain": lambda m: m,
    "chain within": lambda m: m[1],
    "torch's own": lambda m: m[1][0],
    "layer": lambda m: m[2],
}


@pytest.mark.parametrize("place", PLACES)
def test_hooks_are_lowered_wherever_they_are(place):
    model = _chain()
    plain = _agree(model, (1, 2, 2)).lipschitz
    for factor in (3, -1):
        handle = PLACES[place](model).register_forward_hook(lambda module, inputs, output, c=factor: c * output)
        assert _agree(model, (1, 2, 2)).lipschitz == pytest.approx(abs(factor) * plain, rel=1e-6)
        handle.remove()
    assert _agree(model, (1, 2, 2)).lipschitz == plain


def test_a_hook_on_a_field_which_lowering_does_not_call_is_refused():
    model = nn.Sequential(lipflow.cpl_dense(4, 3))
    model[0].field.register_forward_hook(lambda field, inputs, output: 3 * output)
    _refused(model, (4,), SOMETHING_ELSE)


def test_a_hook_on_a_weight_is_lowered():
    """The step size follows the weight, and not what a hook makes of it: the layer stretches, and the bound says so."""
    model = nn.Sequential(lipflow.cpl_dense(4, 3)).double()
    model[0].field.weight.register_forward_hook(lambda weight, inputs, op: op.with_weight(3 * op.weight))
    assert lipflow.lipschitz_bound(model, in_shape=(4,)).lipschitz == pytest.approx(2 * 9 - 1, rel=1e-6)
    with pytest.raises(LoweringError, match="the certified norm of its weight gives"):
        lipflow.freeze(model, in_shape=(4,))


# Modules with a forward of their own, and subclasses


class LouderReLU(nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        return 100 * input


class Loop(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(super().forward(input))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * self.branch(x)


class Extended(ConvexPotential):
    pass


class Turned(Skew):
    pass


def _seen(norm: nn.Module, *shape: int) -> nn.Module:
    """A normalisation after some training, with weights that are not 1 and 0."""
    for _ in range(20):
        norm(3 * torch.randn(16, *shape) + 1)
    for p in norm.parameters():
        nn.init.normal_(p)
    return norm


MODULES = {
    "a subclass with another forward": (LouderReLU, (4,)),
    "a chain that runs twice": (lambda: Loop(nn.Linear(4, 4), nn.ReLU()), (4,)),
    "a residual block": (Residual, (4,)),
    "a subclass without one": (lambda: type("Linear2", (nn.Linear,), {})(4, 2), (4,)),
    "data parallel": (lambda: nn.DataParallel(nn.Linear(4, 2)), (4,)),
    "batch normalisation": (lambda: _seen(nn.BatchNorm2d(3), 3, 4, 4), (3, 4, 4)),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout()), (4,)),
    "adaptive pooling": (lambda: nn.AdaptiveAvgPool2d(2), (3, 4, 6)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1), (3, 4, 3)),
    "pixel shuffle": (lambda: nn.PixelShuffle(2), (4, 2, 3)),
    "pixel unshuffle": (lambda: nn.PixelUnshuffle(2), (2, 4, 2)),
    "flatten some axes": (lambda: nn.Flatten(2), (2, 3, 2)),
    "average with a divisor of its own": (lambda: nn.AvgPool2d(3, divisor_override=1), (2, 6, 6)),
    "reflecting padding": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 4, 5)),
    "replicating padding": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"), (2, 4, 5)),
    "a subclass of a potential": (lambda: Flow(Extended(DenseWeight(3, 4)), lipflow.ExplicitEuler(0.5)), (3,)),
    "a subclass of a skew field": (lambda: Flow(Turned(DenseWeight(3, 3)), lipflow.Exponential()), (3,)),
    "a subclass of a skew field, midpoint": (lambda: Flow(Turned(DenseWeight(3, 3)), lipflow.Midpoint()), (3,)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_lowered_by_what_they_compute(name):
    make, shape = MODULES[name]
    torch.manual_seed(0)
    _agree(make(), shape)


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


@pytest.mark.parametrize(
    "step", [lipflow.ExplicitEuler(), lipflow.ExplicitEuler(0.5), lipflow.ImplicitEuler()], ids=str
)
def test_a_gradient_that_is_not_that_of_its_parts_is_refused(step):
    torch.manual_seed(0)
    _refused(nn.Sequential(Flow(Stronger(DenseWeight(3, 4)), step)), (3,), SOMETHING_ELSE)


@pytest.mark.parametrize("step", [lipflow.ExplicitEuler(), lipflow.ImplicitEuler(), lipflow.Exponential()], ids=str)
def test_operators_of_no_known_kind_are_refused(step):
    field = Skew(TwiceWeight(3, 3)) if isinstance(step, lipflow.Exponential) else ConvexPotential(TwiceWeight(3, 4))
    words = r"^0: freeze knows the operators .*, and not Twice|norm_bound takes a .*, not Twice"
    _refused(nn.Sequential(Flow(field, step)), (3,), words)


# Refusals: the place, the reason, and what to do


REFUSALS = {
    "layer norm": (nn.LayerNorm(4), r"^F\.layer_norm \(in 1\.1\): it divides by .*; use BatchNorm, or leave it out"),
    "gelu": (nn.GELU(), r"^F\.gelu \(in 1\.1\): .*lipflow\.blocks\.MaxMin"),
    "silu": (nn.SiLU(), r"^F\.silu \(in 1\.1\): .*torch\.relu"),
    "softmax": (nn.Softmax(1), r"^F\.softmax \(in 1\.1\): leave it out, as .* are of scores"),
    "a matrix that does not fit": (nn.Linear(60, 3), r"^F\.linear \(in 1\.1\): affine .* shape \(4,\)$"),
    "all images as one vector": (nn.Flatten(0), r"flatten \(in 1\.1\): it mixes the images of a batch"),
    "images from vectors": (nn.Conv2d(1, 1, 1), r"^F\.conv2d \(in 1\.1\): it takes images \(batch, channels, height"),
    "max_pool, ceil_mode": (nn.MaxPool2d(2, ceil_mode=True), "without ceil_mode"),
    "max_pool, indices": (nn.MaxPool2d(2, return_indices=True), "without ceil_mode and return_indices"),
    "avg_pool, ceil_mode": (nn.AvgPool2d(2, ceil_mode=True), "without ceil_mode"),
    "avg_pool, no padding": (nn.AvgPool2d(3, padding=1, count_include_pad=False), "only if its padding is counted"),
    "overlapping windows": (nn.AdaptiveAvgPool2d(2), "windows of .* overlap; take sizes that divide"),
    "a large kernel": (nn.Conv2d(2, 2, 9), "a kernel that spans 9 rows does not fit an input of 5"),
    "a large window": (blocks.MaxPool(9), "pooling 9×9 takes images at least as large"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_names_its_place_and_says_what_to_do(name):
    module, words = REFUSALS[name]
    of_vectors = "1\\.1" in words
    _refused(
        nn.Sequential(nn.ReLU(), nn.Sequential(nn.Flatten() if of_vectors else nn.Identity(), module)),
        (1, 2, 2) if of_vectors else (2, 5, 5),
        words,
    )


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


def test_a_refusal_of_a_users_line_names_the_line():
    words = r"mul \(in 1; test_refusals\.py, line (\d+)\): a product of two values"
    found = re.search(words, _refused(nn.Sequential(nn.ReLU(), Product()), (4,), words))
    assert found is not None
    with open(__file__, encoding="utf-8") as source:
        assert source.readlines()[int(found[1]) - 1].strip() == "return x * x"


def test_freeze_refuses_declared_bounds():
    assumed = nn.Sequential(nn.Linear(4, 4), lipflow.Assume(nn.GELU(), 1.2))
    with pytest.raises(LoweringError, match=r"^1: Assume\(GELU\) has a declared bound, which lipschitz_bound takes"):
        lipflow.freeze(assumed, in_shape=(4,))
