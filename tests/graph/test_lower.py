"""`lower`: the graph computes what the network computes; a network that cannot be followed is refused."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lipflow
from lipflow import LoweringError, lipschitz_bound
from lipflow.graph import LOWERINGS, lower
from lipflow.node import Node
from lipflow.primitives import Affine, Pointwise, Sum
from lipflow.primitives.declared import declared
from tests.graph.test_rules import Calls

TWO = 2 * torch.eye(4, dtype=torch.float64)


def refused(function, words: str) -> None:
    with pytest.raises(LoweringError, match=words or None):
        lower(Calls(function), (4,))


def constant_of(function) -> float:
    return lipschitz_bound(Calls(function), (4,)).lipschitz


# Computations that bypass the lowering mode


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


LEAKS = {
    "vmap": lambda x: torch.vmap(lambda v: v * 2)(x),
    "jit": lambda x: torch.jit.script(tripled)(x),
    "torch.func.grad": lambda x: torch.func.grad(lambda v: (v * v).sum())(x),
    "torch.func.jvp": lambda x: torch.func.jvp(lambda v: 2 * v, (x,), (x,))[0],
    "another thread": lambda x: ThreadPoolExecutor().submit(lambda: x * 2).result(),
    ".data": lambda x: x.data * 2,
    ".T": lambda x: (x.T * 2).T,
    "torch.Tensor(x)": lambda x: torch.Tensor(x) * 2,
    "torch.tensor(x)": lambda x: torch.tensor(x) * 2,
    "numpy": lambda x: torch.from_numpy(x.numpy() * 2),
    "tolist": lambda x: torch.tensor(x.tolist()),
    "item": lambda x: x * x[0, 0].item(),
    "a condition": lambda x: x if x.max() > 0 else 2 * x,
    "a comparison": lambda x: x if (x > 0).all() else 2 * x,
    "==": lambda x: x * (x == 3),
    "deepcopy": lambda x: copy.deepcopy(x) * 2,
    "its storage": lambda x: torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()),
    "aten": lambda x: torch.ops.aten.mul(x, 2.0),
    "a view from before": with_a_view_from_before,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LEAKS)
def test_lower_refuses_leaks(name):
    refused(LEAKS[name], "")


def test_a_view_from_before_holds_nan():
    """The probe refuses it too, unless the output hardly depends on the view."""
    refused(with_a_view_from_before, "a constant is NaN")


def test_a_node_holds_no_numbers():
    """If it held zeros that could be computed with, every leak would give `x + constant` with L = 1."""
    nodes = []
    lower(Calls(lambda x: nodes.append(x) or x * 2), (4,))
    with pytest.raises(LoweringError, match="outside"):
        _ = nodes[0] + 1


MIXES = {
    "flip": lambda x: x.flip(0),
    "one image for both": lambda x: x[[0, 0]],
    "one image": lambda x: x + x[0],
    "iteration": lambda x: torch.stack(list(x)),
    "reshape": lambda x: x.reshape(4, 2).reshape(2, 4),
    "a constant of each image": lambda x: x + torch.arange(2.0, dtype=x.dtype)[:, None],
    "broadcasting": lambda x: x[:, None] + x,
}


@pytest.mark.parametrize("name", MIXES)
def test_lower_refuses_what_mixes_images(name):
    refused(MIXES[name], "images of a batch|a constant differs")


NOT_FINITE = {
    "number": lambda x: x + math.nan,
    "factor": lambda x: x * x.new_full((4,), math.inf),
    "side by side": lambda x: torch.cat([x, x.new_full((2, 1), math.nan)], 1),
    "written to": lambda x: written(x.new_full((2, 8), math.nan), x),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_lower_refuses_constants_that_are_not_finite(name):
    refused(NOT_FINITE[name], "NaN or infinite")


ARGUMENTS = {
    "rounding_mode": lambda x: torch.div(x, 2, rounding_mode="floor"),
    "'out'": lambda x: torch.add(x, x, out=torch.empty(2, 4, dtype=x.dtype)),
    "random in training": lambda x: F.dropout(x),
    "its batch": lambda x: F.batch_norm(x, x.new_zeros(4), x.new_ones(4), training=True),
    "ceil_mode": lambda x: F.max_pool2d(x.reshape(2, 1, 2, 2), 2, ceil_mode=True),
    "float16": lambda x: x.to(torch.float16) + 1,
}


@pytest.mark.parametrize("words", ARGUMENTS)
def test_lower_refuses_arguments_without_a_rule(words):
    refused(ARGUMENTS[words], words)


# In-place functions, and functions that call others


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x


def changed_in_place(x):
    y = x @ TWO
    y += x
    return F.relu(y, inplace=True)


def with_a_copy(x):
    y = x.clone()
    y[:, 0] = 0.0
    return y + x


def interleaved(x):
    out = x.new_empty(len(x), 8)
    out[:, ::2] = x
    out[:, 1::2] = 2 * x
    return out


CONSTANTS = {
    "alpha": (lambda x: torch.add(x, x, alpha=3), 4),
    "another alpha": (lambda x: torch.sub(x, other=x, alpha=-3), 4),
    "a squeeze of all but the batch": (lambda x: x[:, :1].squeeze()[..., None], 1),
    "in place": (changed_in_place, 3),
    "a copy has memory of its own": (with_a_copy, 2),
    "an autograd function": (Doubled.apply, 2),
    "a checkpoint": (lambda x: checkpoint(lambda v: v @ TWO, x, use_reentrant=False), 2),
    "written to a plain tensor": (interleaved, math.sqrt(5)),
    "added to a plain tensor": (lambda x: torch.ones(len(x), 4, dtype=x.dtype).add_(x) * 3, 3),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_lipschitz_bound_of_what_runs(name):
    function, constant = CONSTANTS[name]
    assert constant_of(function) == pytest.approx(constant, rel=1e-9)


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
    y = (x * 2).reshape(-1, 2, 2)
    y.transpose(1, 2)[:, 0] += 3 * y[:, 1]
    return y.flatten(1)


def change_the_input(x):
    x -= 0.5
    return x.relu_() @ TWO


@pytest.mark.parametrize("function", [change_a_view, change_the_base, change_a_view_of_a_view, change_the_input])
def test_views_share_the_memory_of_their_base(function):
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(lower(Calls(function), (4,)).run(x.clone()), function(x.clone()))


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


class Endless(Halved):
    def lower(self, x):
        return declared(x, "Endless", self, lambda norm: 0.5)


def test_lower_applies_to_the_forward_beside_it_and_hooks_run_around_it():
    layer = Halved()
    assert lipschitz_bound(Overridden(), (4,)).lipschitz == 3
    assert lipschitz_bound(layer, (4,)).lipschitz == 0.5
    layer.register_forward_hook(lambda module, args, output: 3 * output)
    assert lipschitz_bound(layer, (4,)).lipschitz == 1.5
    layer.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    assert lipschitz_bound(layer, (4,)).lipschitz == 3


def test_the_table_lowers_a_class_that_cannot_be_changed(monkeypatch):
    with pytest.raises(LoweringError, match="softsign"):
        lower(nn.Softsign(), (4,))
    monkeypatch.setitem(LOWERINGS, nn.Softsign, lambda module, x: declared(x, "softsign", F.softsign, lambda norm: 1))
    assert lipschitz_bound(nn.Softsign(), (4,)).lipschitz == 1


# The probe


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
    with pytest.raises(LoweringError, match=r"^1\.0 \(\w+\) computes something else"):
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


# Errors


def fail(x):
    raise KeyError("its own words")


ERRORS = {
    r"in 1; test_lower\.py, line \d+: .*its own words": nn.Sequential(nn.ReLU(), Calls(fail)),
    "runs itself": nn.Sequential(Endless()),
    r"linear \(in 1.*does not take an input of shape \(4,\)": nn.Sequential(nn.Flatten(), nn.Linear(60, 3)),
    "returns a tuple": Calls(lambda x: (x, x)),
    "does not depend on its input": Calls(lambda x: torch.ones(2, 4)),
    "run it on one batch first": nn.Sequential(nn.LazyLinear(3)),
}


@pytest.mark.parametrize("words", ERRORS)
def test_errors_say_what_is_wrong_and_where(words):
    with pytest.raises(LoweringError, match=words):
        lower(ERRORS[words], (4,))


# Interning


def test_equal_contents_are_one_object_and_equal_computations_one_vertex():
    layer = nn.Linear(4, 4)
    graph = lower(nn.Sequential(layer, nn.ReLU(), copy.deepcopy(layer), nn.ReLU(), layer), (4,))
    for kind, count in ((Affine, 3), (Pointwise, 2)):
        found = [id(v.primitive) for v in graph.vertices if isinstance(v.primitive, kind)]
        assert (len(found), len(set(found))) == (count, 1)
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
