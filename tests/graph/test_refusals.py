"""What was once refused and is lowered now has the right bound; what is refused names its place and what to do."""

import copy

import pytest
import torch
from torch import Tensor, nn

import lipflow
from lipflow import LoweringError, blocks
from lipflow.flows import ConvexPotential, DenseWeight, Flow, Skew, Step
from lipflow.operators import Dense, LinearOperator


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


# Hooks are part of a network


def tripled(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return 3 * output


def negated(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return -output


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
    for hook, factor in ((tripled, 3), (negated, 1)):
        handle = PLACES[place](model).register_forward_hook(hook)
        assert _agree(model, (1, 2, 2)).lipschitz == pytest.approx(factor * plain, rel=1e-6)
        handle.remove()
    assert _agree(model, (1, 2, 2)).lipschitz == plain


@pytest.mark.parametrize("place", [lambda n: n, lambda n: n.stages.pool, lambda n: n.head])
def test_hooks_on_a_built_network_are_lowered(place):
    network = lipflow.build("cpl-digits", in_shape=(1, 4, 4))
    before, x = lipflow.freeze(network), torch.rand(2, 1, 4, 4)
    place(network).register_forward_hook(negated)
    frozen = lipflow.freeze(network)
    assert frozen.lipschitz == pytest.approx(before.lipschitz, rel=1e-9)
    changed = float((frozen(x) - before(x)).abs().max())
    assert changed > 0.01


def test_a_hook_that_lowering_does_not_see_is_refused():
    """The lowering of a Flow does not call its field."""
    model = _chain()
    model[2].field.register_forward_hook(tripled)
    with pytest.raises(LoweringError, match=r"^2 \(Flow\) computes something else than it was lowered to"):
        lipflow.freeze(model, (1, 2, 2))


def test_a_hook_on_a_weight_is_lowered():
    """The step size follows the weight, and not what a hook makes of it: the layer stretches, and the bound says so."""
    model = nn.Sequential(lipflow.cpl_dense(4, 3)).double()

    def louder(module: nn.Module, inputs: tuple[Tensor], op: LinearOperator) -> LinearOperator:
        return op.with_weight(3 * op.weight)

    model[0].field.weight.register_forward_hook(louder)
    assert lipflow.lipschitz_bound(model, in_shape=(4,)).lipschitz == pytest.approx(2 * 9 - 1, rel=1e-6)
    assert lipflow.freeze(model, in_shape=(4,)).lipschitz == 1


def test_a_replaced_forward_is_what_is_lowered():
    model = _chain()
    model[1][1].forward = lambda input: 3 * input
    model[2].forward = lambda x: -x
    frozen = lipflow.freeze(model, in_shape=(1, 2, 2))
    norm = float(torch.linalg.matrix_norm(model[1][0].weight.detach().double(), 2))
    assert frozen.lipschitz == pytest.approx(3 * norm, rel=1e-6)
    x = torch.rand(3, 1, 2, 2)
    torch.testing.assert_close(frozen(x).float(), model(x).detach())


# Modules with a forward of their own, and subclasses


class Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = _chain()

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


class LouderReLU(nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        return 100 * input


class Loop(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(super().forward(input))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branch = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * self.branch(x)


MODULES = {
    "a module around a chain": (Mine, (1, 2, 2)),
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
}


def _seen(norm: nn.Module, *shape: int) -> nn.Module:
    """A normalisation after some training, with weights that are not 1 and 0."""
    torch.manual_seed(0)
    for _ in range(20):
        norm(3 * torch.randn(16, *shape) + 1)
    for p in norm.parameters():
        nn.init.normal_(p)
    return norm


@pytest.mark.parametrize("name", MODULES)
def test_what_was_refused_by_type_is_lowered_by_what_it_does(name):
    make, shape = MODULES[name]
    torch.manual_seed(0)
    _agree(make(), shape)


@pytest.mark.parametrize("name", ["batch normalisation", "adaptive pooling", "transposed convolution", "pixel shuffle"])
def test_bounds_of_linear_modules_are_those_of_their_matrices(name):
    make, shape = MODULES[name]
    module = make().double().eval()
    n = torch.Size(shape).numel()
    eye, origin = torch.eye(n, dtype=torch.float64).reshape(n, *shape), torch.zeros(1, *shape, dtype=torch.float64)
    norm = float(torch.linalg.matrix_norm((module(eye) - module(origin)).detach().flatten(1), 2))
    assert norm <= lipflow.lipschitz_bound(module, shape).lipschitz * (1 + 1e-12)
    assert lipflow.lipschitz_bound(module, shape).lipschitz <= norm * (
        1.05 if name.startswith("transposed") else 1 + 1e-8
    )


# What extends our types may compute anything


class Extended(ConvexPotential):
    pass


class Turned(Skew):
    pass


@pytest.mark.parametrize(
    "layer",
    [
        lambda: Flow(Extended(DenseWeight(3, 4)), lipflow.ExplicitEuler(0.5)),
        lambda: Flow(Turned(DenseWeight(3, 3)), lipflow.Exponential()),
        lambda: Flow(Turned(DenseWeight(3, 3)), lipflow.Midpoint()),
    ],
)
def test_what_extends_our_types_and_changes_nothing_is_lowered(layer):
    torch.manual_seed(0)
    _agree(nn.Sequential(layer()), (3,))


class Stronger(ConvexPotential):
    def gradient(self, x: Tensor) -> Tensor:
        return 3 * super().gradient(x)


class Twice(Dense):
    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return 2 * super().__call__(x, bias)

    def with_weight(self, weight: Tensor) -> Dense:
        return Twice(weight)


class TwiceWeight(DenseWeight):
    def operator(self, shape: tuple[int, ...] | None) -> Dense:
        return Twice(super().operator(shape).weight)


@pytest.mark.parametrize(
    "step", [lipflow.ExplicitEuler(), lipflow.ExplicitEuler(0.5), lipflow.ImplicitEuler()], ids=str
)
def test_a_gradient_that_is_not_that_of_its_parts_is_found_out(step: Step):
    torch.manual_seed(0)
    model = nn.Sequential(Flow(Stronger(DenseWeight(3, 4)), step))
    for call in (lipflow.freeze, lipflow.lipschitz_bound):
        with pytest.raises(LoweringError, match=r"^0 \(\w+\) computes something else than it was lowered to"):
            call(model, in_shape=(3,))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: Flow(ConvexPotential(TwiceWeight(3, 4)), lipflow.ExplicitEuler()),
        lambda: Flow(ConvexPotential(TwiceWeight(3, 4)), lipflow.ImplicitEuler()),
        lambda: Flow(Skew(TwiceWeight(3, 3)), lipflow.Exponential()),
    ],
)
def test_operators_of_no_known_kind_are_refused(layer):
    model = nn.Sequential(layer())
    with pytest.raises(LoweringError, match=r"^0: freeze knows the operators .*, and not Twice"):
        lipflow.freeze(model, in_shape=(3,))
    with pytest.raises(LoweringError, match=r"norm_bound takes a .*, not Twice"):
        lipflow.lipschitz_bound(model, in_shape=(3,))


# Refusals: the place, the reason, and what to do


REFUSALS = {
    "layer norm": (nn.LayerNorm(4), r"^F\.layer_norm \(in 1\.1\): it divides by .*; use BatchNorm, or leave it out"),
    "gelu": (nn.GELU(), r"^F\.gelu \(in 1\.1\): .*lipflow\.blocks\.MaxMin"),
    "silu": (nn.SiLU(), r"^F\.silu \(in 1\.1\): .*torch\.relu"),
    "softmax": (
        nn.Softmax(1),
        r"^F\.softmax \(in 1\.1\): leave it out, as labels, losses and certificates are of scores",
    ),
    "a matrix that does not fit": (
        nn.Linear(60, 3),
        r"^F\.linear \(in 1\.1\): affine \(60 → 3\) does not take an input of shape \(4,\)$",
    ),
    "all images as one vector": (nn.Flatten(0), r"flatten \(in 1\.1\): it mixes the images of a batch"),
    "images from vectors": (
        nn.Conv2d(1, 1, 1),
        r"^F\.conv2d \(in 1\.1\): it takes images \(batch, channels, height, width\)",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_names_its_place_and_says_what_to_do(name):
    module, words = REFUSALS[name]
    chain = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Flatten(), module))
    for call in (lipflow.freeze, lipflow.lipschitz_bound):
        with pytest.raises(LoweringError, match=words):
            call(chain, in_shape=(1, 2, 2))


def test_advice_names_things_that_exist():
    assert isinstance(lipflow.blocks.MaxMin(), nn.Module)
    assert callable(torch.relu)
    assert isinstance(lipflow.Assume(nn.GELU(), bound=1.2), nn.Module)


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


def test_a_refusal_of_a_users_line_names_the_line():
    with pytest.raises(
        LoweringError, match=r"mul \(in 1; test_refusals\.py, line \d+\): a product of two values"
    ) as refused:
        lipflow.freeze(nn.Sequential(nn.ReLU(), Product()), in_shape=(4,))
    line = int(str(refused.value).split("line ")[1].split(")")[0])
    with open(__file__, encoding="utf-8") as source:
        assert source.readlines()[line - 1].strip() == "return x * x"


def test_assume_is_refused_by_freeze_and_by_name():
    assumed = nn.Sequential(nn.Linear(4, 4), lipflow.Assume(nn.GELU(), 1.2))
    with pytest.raises(LoweringError, match=r"^1: Assume\(GELU\) has a declared bound, which lipschitz_bound takes"):
        lipflow.freeze(assumed, in_shape=(4,))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.MaxPool2d(2, ceil_mode=True), "without ceil_mode"),
        (nn.MaxPool2d(2, return_indices=True), "without ceil_mode and return_indices"),
        (nn.AvgPool2d(2, ceil_mode=True), "without ceil_mode"),
        (nn.AvgPool2d(3, padding=1, count_include_pad=False), "only if its padding is counted"),
        (nn.AdaptiveAvgPool2d(2), "windows of .* overlap; take sizes that divide"),
        (nn.Conv2d(2, 2, 9), "a kernel that spans 9 rows does not fit an input of 5"),
        (blocks.MaxPool(9), "pooling 9×9 takes images at least as large"),
    ],
    ids=str,
)
def test_what_would_be_another_function_is_refused(module, words):
    for call in (lipflow.freeze, lipflow.lipschitz_bound):
        with pytest.raises(ValueError, match=words):
            call(nn.Sequential(module), in_shape=(2, 5, 5))
