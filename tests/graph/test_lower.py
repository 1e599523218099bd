"""`lower`: the graph computes what the network computes, and the network is left as it was."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lipflow
from lipflow import LoweringError, lipschitz_bound
from lipflow.flows import ConvexPotential, DenseWeight, Flow, Skew
from lipflow.graph import LOWERINGS, lower
from lipflow.node import Node
from lipflow.primitives import Affine, Pointwise, Sum
from lipflow.primitives.declared import declared
from lipflow.testing import jacobian_within_bound
from tests.graph.test_rules import constant
from tests.soundness.graphs import Calls

TWO = 2 * torch.eye(4, dtype=torch.float64)


# Modules with a `lower`


class Halved(nn.Module):
    factor = 0.5

    def forward(self, x):
        return self.factor * x

    def lower(self, x):
        return Sum([0.5])(x)


class Wrong(Halved):
    def lower(self, x):
        return Sum([-0.5])(x)


class RightNearZero(Halved):
    def forward(self, x):
        return 0.5 * x + 0.1 * torch.relu(x - 20)

    lower = Halved.lower


class Overridden(Halved):
    """`forward` is below the inherited `lower`, which does not apply to it."""

    def forward(self, x):
        return 3 * x


def test_lower_applies_to_the_forward_beside_it_and_hooks_run_around_it():
    layer = Halved()
    assert lipschitz_bound(Overridden(), (4,)).lipschitz == 3
    layer.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    assert lipschitz_bound(layer, (4,)).lipschitz == 1


@pytest.mark.parametrize("place", ["", "1", "1.0", "2"], ids=["chain", "inner chain", "torch's own", "layer"])
def test_hooks_are_lowered_at_every_place(place):
    model = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), lipflow.cpl_dense(4, 3, h=0.5))
    plain = agree(model, (1, 2, 2))
    model.get_submodule(place).register_forward_hook(lambda module, inputs, output: -3 * output)
    assert agree(model, (1, 2, 2)) == pytest.approx(3 * plain, rel=1e-6)


def test_a_hook_on_a_weight_is_bounded_and_not_frozen():
    """The step size follows the weight without the hook, so that the layer expands."""
    model = nn.Sequential(lipflow.cpl_dense(4, 3)).double()
    model[0].field.weight.register_forward_hook(lambda weight, inputs, op: op.with_weight(3 * op.weight))
    assert lipschitz_bound(model, in_shape=(4,)).lipschitz == pytest.approx(2 * 9 - 1, rel=1e-6)
    with pytest.raises(LoweringError, match="certified norm"):
        lipflow.freeze(model, in_shape=(4,))


def test_the_table_lowers_a_class_that_cannot_be_changed(monkeypatch):
    with pytest.raises(LoweringError, match="softsign"):
        lower(nn.Softsign(), (4,))
    monkeypatch.setitem(LOWERINGS, nn.Softsign, lambda module, x: declared(x, "softsign", F.softsign, lambda norm: 1))
    assert lipschitz_bound(nn.Softsign(), (4,)).lipschitz == 1


# Modules of users


def agree(model: nn.Module, shape: tuple[int, ...]) -> float:
    """L of a network: its frozen form computes the same and has the same L, and no Jacobian is larger."""
    frozen, bound = lipflow.freeze(model, in_shape=shape), lipflow.lipschitz_bound(model, shape).lipschitz
    x = torch.rand(20, *shape, dtype=torch.float64)
    live = copy.deepcopy(model).double().eval()
    torch.testing.assert_close(frozen(x), live(x).detach(), rtol=1e-9, atol=1e-9)
    assert bound == pytest.approx(frozen.lipschitz, rel=1e-6)
    jacobian_within_bound(live, shape)
    return bound


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


def subclass(kind: type[nn.Module], *arguments: object) -> nn.Module:
    return type("Subclass", (kind,), {})(*arguments)


MODULES = {
    "another forward": (LouderReLU, (4,)),
    "a chain that runs twice": (lambda: Loop(nn.Linear(4, 4), nn.ReLU()), (4,)),
    "a residual block": (lambda: Residual(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), (4,)),
    "a subclass without a forward": (lambda: subclass(nn.Linear, 4, 2), (4,)),
    "data parallel": (lambda: nn.DataParallel(nn.Linear(4, 2)), (4,)),
    "batch normalization": (trained_norm, (3, 4, 4)),
    "a potential": (lambda: Flow(subclass(ConvexPotential, DenseWeight(3, 4)), lipflow.ExplicitEuler(0.5)), (3,)),
    "a skew field": (lambda: Flow(subclass(Skew, DenseWeight(3, 3)), lipflow.Exponential()), (3,)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_lowered_by_what_they_compute(name):
    make, shape = MODULES[name]
    agree(make(), shape)


# The probe


SOMETHING_ELSE = r"^0 \(\w+\) computes something else"
WRONG = {
    "wrong lower": Wrong(),
    "lower right near zero": RightNearZero(),
    "random": Calls(lambda x: x + torch.randn(x.shape[1:], dtype=x.dtype)),
    "size of the batch": Calls(lambda x: x * len(x)),
    "mixed beyond two images": Calls(lambda x: x.roll(2, 0)),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("of", [lower, lipflow.freeze])
def test_the_probe_names_the_module_that_computes_something_else(of, name):
    with pytest.raises(LoweringError, match=SOMETHING_ELSE.replace("0", r"1\.0")):
        of(nn.Sequential(nn.Flatten(), nn.Sequential(WRONG[name]), nn.ReLU()), (4,))


def test_the_probe_allows_for_the_rounding_of_numbers_that_cancel():
    norm, linear = nn.BatchNorm1d(4), nn.Linear(4, 4)
    norm.running_mean.fill_(1e8)
    nn.init.constant_(linear.bias, 1e8)
    lower(nn.Sequential(linear, norm), (4,))
    with pytest.raises(LoweringError, match="something else"):
        lower(nn.Sequential(linear, norm, Wrong()), (4,))


# Types, modes and state


def test_a_module_that_computes_in_float32_is_lowered_in_float32():
    matrix = torch.randn(4, 3)
    module = Calls(lambda x: x.float() @ matrix)
    assert "float32" in lower(module, (4,)).note
    exact = float(torch.linalg.matrix_norm(matrix.double(), 2))
    assert lipschitz_bound(module, (4,)).lipschitz == pytest.approx(exact, rel=1e-6)


def test_complex_weights_keep_their_imaginary_part():
    class Spectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.spectrum = nn.Parameter(torch.randn(2, 2, 3, 2, dtype=torch.complex64))

        def forward(self, x):
            return F.conv2d(x, torch.fft.irfft2(self.spectrum, s=(3, 3)), padding=1)

    module = Spectrum()
    kernel = torch.fft.irfft2(module.spectrum.detach(), s=(3, 3)).double()
    plain = lipschitz_bound(Calls(lambda x: F.conv2d(x, kernel, padding=1)), (2, 5, 5))
    assert lipschitz_bound(module, (2, 5, 5)).lipschitz == pytest.approx(plain.lipschitz, rel=1e-5)


def test_a_function_that_holds_the_original_sees_it_in_evaluation_mode():
    module = Calls(lambda x: module.part(x) * (1.0 if module.training else 100.0))
    module.part = Halved()
    assert lipschitz_bound(module.train(), (4,)).lipschitz == 50
    assert module.training


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("last", [nn.ReLU(), nn.GELU()], ids=["lowered", "refused"])
def test_lower_leaves_the_module_as_it_was(last, copied, live):
    """Modes, buffers, attributes, hooks and gradients; at another input size than before too."""

    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), lipflow.cpl_conv(2, 3), last)
            self.scratch = torch.zeros(2, 1, 5, 5)
            self.register_buffer("total", torch.zeros(1, 5, 5))

        def __deepcopy__(self, memo):
            raise RuntimeError("cannot be copied")

        def forward(self, x):
            self.total += 1
            if isinstance(x, Node):
                self.scratch[:] = x
            self.last = self.layers(x)
            return self.last

    if copied:
        del Remembers.__deepcopy__
    module = Remembers().train()
    module.layers(torch.zeros(2, 1, 8, 8))
    module.layers[1].eval()
    before = {name: t.clone() for name, t in module.state_dict().items()}
    with pytest.raises(LoweringError, match=r"in layers\.3") if isinstance(last, nn.GELU) else nullcontext():
        graph = lower(module, (1, 5, 5), live)
        assert ("float32" in graph.note) == (not copied and not live)
    assert not hasattr(module, "last")
    assert bool((module.scratch == 0).all())
    assert [part for part in module.modules() if not part.training] == [module.layers[1]]
    assert all("forward" not in vars(part) and not part._forward_hooks for part in module.modules())
    assert all(torch.equal(before[name], t) for name, t in module.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in module.parameters())
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


# Interning


def test_equal_contents_are_one_object_and_equal_computations_one_vertex():
    layer = nn.Linear(4, 4)
    graph = lower(nn.Sequential(layer, nn.ReLU(), copy.deepcopy(layer), nn.ReLU(), layer), (4,))
    for kind, count in ((Affine, 3), (Pointwise, 2)):
        found = [id(v.primitive) for v in graph.vertices if isinstance(v.primitive, kind)]
        assert (len(found), len(set(found))) == (count, 1)
    large = constant(20, 20)
    other = large + F.one_hot(torch.tensor([1] * 20), 20).T  # row 1 is not in the sample of the keys
    graph = lower(Calls(lambda x: torch.relu(x @ large) @ other), (20,))
    assert len({id(v.primitive) for v in graph.vertices}) == 4
    graph = lower(Calls(lambda x: torch.relu(x @ TWO) + torch.relu(x @ TWO)), (4,))
    assert [v.primitive.kind for v in graph.vertices] == ["input", "affine", "pointwise", "sum"]
    assert graph.output.primitive.coefficients == [2.0]


def test_freeze_bounds_each_norm_once(monkeypatch):
    counted = []
    real = lipflow.operators.certified.norm_certificate
    monkeypatch.setattr("lipflow.operators.certified.norm_certificate", lambda op: counted.append(op) or real(op))
    layer = nn.Linear(4, 4)
    lipflow.freeze(nn.Sequential(layer, nn.ReLU(), copy.deepcopy(layer), nn.ReLU(), layer), in_shape=(4,))
    assert len(counted) == 1
