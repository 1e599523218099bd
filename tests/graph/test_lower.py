"""Lowering is running: what a network computes is what its graph computes, and what cannot be seen is refused."""

import copy
import math
import threading
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


class Calls(nn.Module):
    """A module that calls a function of itself and its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(2 * torch.eye(4))

    def forward(self, x):
        return self.function(self, x)


def kinds(graph) -> list[str]:
    return [v.primitive.kind for v in graph.vertices]


def refused(function, words: str, shape=(4,)) -> None:
    with pytest.raises(LoweringError, match=words or None):
        lower(Calls(function), shape)


def constant_of(function, shape=(4,)) -> float:
    return lipschitz_bound(Calls(function), shape).lipschitz


# 1. What bypasses the mode cannot compute


def in_a_thread(module, x):
    found = []

    def run():
        try:
            found.append(x * 2)
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def with_a_view_from_before(module, x):
    zeros = torch.zeros(2, 8, dtype=x.dtype)
    view = zeros[:, :4]
    zeros[:, :4] = x
    return view + x


LEAKS = {
    "vmap": lambda m, x: torch.vmap(lambda v: v * 2)(x),
    "jit": lambda m, x: torch.jit.script(_tripled)(x),
    "torch.func.grad": lambda m, x: torch.func.grad(lambda v: (v * v).sum())(x),
    "torch.func.jvp": lambda m, x: torch.func.jvp(lambda v: 2 * v, (x,), (x,))[0],
    "another thread": in_a_thread,
    ".data": lambda m, x: x.data * 2,
    ".T": lambda m, x: (x.T * 2).T,
    "torch.Tensor(x)": lambda m, x: torch.Tensor(x) * 2,
    "torch.tensor(x)": lambda m, x: torch.tensor(x) * 2,
    "numpy": lambda m, x: torch.from_numpy(x.numpy() * 2),
    "tolist": lambda m, x: torch.tensor(x.tolist()),
    "item": lambda m, x: x * x[0, 0].item(),
    "a condition": lambda m, x: x if x.max() > 0 else 2 * x,
    "a comparison": lambda m, x: x if (x > 0).all() else 2 * x,
    "==": lambda m, x: x * (x == 3),
    "deepcopy": lambda m, x: copy.deepcopy(x) * 2,
    "its storage": lambda m, x: torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()),
    "aten": lambda m, x: torch.ops.aten.mul(x, 2.0),
    "a view from before": with_a_view_from_before,
}


def _tripled(x: Tensor) -> Tensor:
    return x * 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LEAKS)
def test_what_leaks_past_the_mode_is_refused(name):
    refused(LEAKS[name], "")


def test_a_view_from_before_holds_no_numbers():
    """The probe would refuse it too, but for views that the output hardly depends on."""
    refused(with_a_view_from_before, "a constant is NaN")


def test_a_node_holds_no_numbers():
    """Were it zeros that could be computed with, `x + constant` with L = 1 would come out of every leak."""
    seen = []
    lower(Calls(lambda m, x: seen.append(x) or x * 2), (4,))
    with pytest.raises(LoweringError, match="outside of what lowering sees"):
        _ = seen[0] + 1
    assert isinstance(seen[0], Node)


MIXES = {
    "flip": lambda m, x: x.flip(0),
    "one image for both": lambda m, x: x[[0, 0]],
    "one image": lambda m, x: x + x[0],
    "iteration": lambda m, x: torch.stack(list(x)),
    "reshape": lambda m, x: x.reshape(4, 2).reshape(2, 4),
    "a constant of each image": lambda m, x: x + torch.arange(2.0, dtype=x.dtype)[:, None],
    "broadcasting": lambda m, x: x[:, None] + x,
}


@pytest.mark.parametrize("name", MIXES)
def test_what_mixes_the_images_of_a_batch_is_refused(name):
    refused(MIXES[name], "images of a batch|a constant differs")


def test_constants_are_finite():
    refused(lambda m, x: x + math.nan, "NaN or infinite")
    refused(lambda m, x: x * m.weight.new_full((4,), math.inf), "NaN or infinite")
    refused(lambda m, x: torch.cat([x, x.new_full((2, 1), math.nan)], 1), "NaN or infinite")


def test_a_plain_tensor_that_a_node_was_written_into_stands_for_it():
    def halves(module, x):
        out = x.new_empty(len(x), 8)
        out[:, ::2] = x
        out[:, 1::2] = 2 * x
        return out

    assert constant_of(halves) == pytest.approx(math.sqrt(5), rel=1e-9)
    assert constant_of(lambda m, x: torch.ones(len(x), 4, dtype=x.dtype).add_(x) * 3) == 3
    refused(lambda m, x: _written(x.new_full((2, 8), math.nan), x), "NaN or infinite")


def _written(target, x):
    target[:, :4] = x
    return target


# 3. A rule names its arguments


ARGUMENTS = {
    "rounding_mode": lambda m, x: torch.div(x, 2, rounding_mode="floor"),
    "'out'": lambda m, x: torch.add(x, x, out=torch.empty(2, 4, dtype=x.dtype)),
    "random in training": lambda m, x: F.dropout(x),
    "deviation of its batch": lambda m, x: F.batch_norm(x, x.new_zeros(4), x.new_ones(4), training=True),
    "ceil_mode": lambda m, x: F.max_pool2d(x.reshape(2, 1, 2, 2), 2, ceil_mode=True),
    "float16": lambda m, x: x.to(torch.float16) + 1,
}


@pytest.mark.parametrize("words", ARGUMENTS)
def test_arguments_without_a_rule_are_refused(words):
    refused(ARGUMENTS[words], words)


# 4. In-place functions


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, *grads):
        return 2 * grads[0]


def changed_in_place(module, x):
    y = x @ module.weight
    y += x
    return F.relu(y, inplace=True)


def with_a_copy(module, x):
    y = x.clone()
    y[:, 0] = 0.0
    return y + x


CONSTANTS = {
    "alpha": (lambda m, x: torch.add(x, x, alpha=3), 4),
    "another alpha": (lambda m, x: torch.sub(x, other=x, alpha=-3), 4),
    "a squeeze of all but the batch": (lambda m, x: x[:, :1].squeeze()[..., None], 1),
    "in place": (changed_in_place, 3),
    "a copy has memory of its own": (with_a_copy, 2),
    "an autograd function": (lambda m, x: Doubled.apply(x), 2),
    "a checkpoint": (lambda m, x: checkpoint(lambda v: v @ m.weight, x, use_reentrant=False), 2),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_what_runs_is_what_is_lowered(name):
    function, constant = CONSTANTS[name]
    assert constant_of(function) == pytest.approx(constant, rel=1e-9)


def change_a_view(module, x):
    y = x * 2
    y[:, :2].mul_(100)
    return y


def change_the_base(module, x):
    y = x * 2
    part = y[:, :2]
    y.mul_(100)
    return torch.cat([part, y], 1)


def change_a_view_of_a_view(module, x):
    y = (x * 2).reshape(-1, 2, 2)
    y.transpose(1, 2)[:, 0] += 3 * y[:, 1]
    return y.flatten(1)


def change_the_input(module, x):
    x -= 0.5
    return x.relu_() @ module.weight


@pytest.mark.parametrize("function", [change_a_view, change_the_base, change_a_view_of_a_view, change_the_input])
def test_views_share_the_memory_of_their_base(function):
    module, x = Calls(function).double(), torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(lower(module, (4,)).run(x.clone()), module(x.clone()))


# 5. Modules that know more than their parts


class Halved(nn.Module):
    """0.5·x, said to be so by its `lower`."""

    factor = 0.5

    def forward(self, x):
        return self.factor * x

    def lower(self, x):
        return Sum([0.5])(x)


class Wrong(Halved):
    """`lower` says 0.5·x, and it computes -0.5·x."""

    def lower(self, x):
        return Sum([-0.5])(x)


class OnlyInTheMiddle(Halved):
    """`lower` is right near 0 only."""

    def forward(self, x):
        return 0.5 * x + 0.1 * torch.relu(x - 20)

    def lower(self, x):
        return Sum([0.5])(x)


def test_lower_counts_for_the_forward_that_it_stands_beside_and_hooks_run_around_it():
    class Overridden(Halved):
        """A subclass with a forward of its own, which the inherited `lower` says nothing of."""

        def forward(self, x):
            return 3 * x

    layer = Halved()
    assert lipschitz_bound(Overridden(), (4,)).lipschitz == 3
    assert lipschitz_bound(layer, (4,)).lipschitz == 0.5
    layer.register_forward_hook(lambda module, args, output: 3 * output)
    assert lipschitz_bound(layer, (4,)).lipschitz == 1.5
    layer.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    assert lipschitz_bound(layer, (4,)).lipschitz == 3


def test_a_class_that_cannot_be_changed_has_a_lowering_in_the_table(monkeypatch):
    class Theirs(nn.Module):
        def forward(self, x):
            return torch.nn.functional.softsign(x)  # slopes in (0, 1]

    with pytest.raises(LoweringError, match="softsign"):
        lower(Theirs(), (4,))
    monkeypatch.setitem(LOWERINGS, Theirs, lambda module, x: declared(x, "Theirs", F.softsign, lambda norm: 1.0))
    assert lipschitz_bound(Theirs(), (4,)).lipschitz == 1


# 6. The probe


class Random(nn.Module):
    def forward(self, x):
        return x + torch.randn(x.shape[1:], dtype=x.dtype)


class OfTheBatch(nn.Module):
    """How much it stretches depends on how many images there are."""

    def forward(self, x):
        return x * len(x)


class Rolled(nn.Module):
    """It mixes images, in a way that batches of two do not show."""

    def forward(self, x):
        return x.roll(2, 0)


WRONG = [Wrong(), OnlyInTheMiddle(), Random(), OfTheBatch(), Rolled()]


@pytest.mark.parametrize("module", WRONG, ids=lambda m: type(m).__name__)
def test_a_graph_that_computes_something_else_is_refused_by_name(module):
    chain = nn.Sequential(nn.Flatten(), nn.Sequential(module), nn.ReLU())
    with pytest.raises(LoweringError, match=r"^1\.0 \(\w+\) computes something else"):
        lower(chain, (4,))
    with pytest.raises(LoweringError, match="computes something else"):
        lipflow.freeze(chain, in_shape=(4,))


def test_what_computes_in_float32_is_lowered_so():
    class Single(nn.Module):
        """Its matrix is no parameter, so that no copy in float64 reaches it."""

        def __init__(self):
            super().__init__()
            self.matrix = torch.randn(3, 4)

        def forward(self, x):
            return x.float() @ self.matrix.T

    module = Single()
    graph = lower(module, (4,))
    assert "its own float32" in graph.note
    exact = float(torch.linalg.matrix_norm(module.matrix.double(), 2))
    assert lipschitz_bound(module, (4,)).lipschitz == pytest.approx(exact, rel=1e-6)


def test_complex_weights_keep_their_imaginary_part():
    class Spectrum(nn.Module):
        """A convolution whose kernel is learned as its spectrum."""

        def __init__(self):
            super().__init__()
            self.spectrum = nn.Parameter(torch.randn(2, 2, 3, 2, dtype=torch.complex64))

        def kernel(self):
            return torch.fft.irfft2(self.spectrum, s=(3, 3))

        def forward(self, x):
            return F.conv2d(x, self.kernel(), padding=1)

    module = Spectrum()
    plain = nn.Conv2d(2, 2, 3, padding=1, bias=False)
    plain.weight = nn.Parameter(module.kernel().detach())
    assert lipschitz_bound(module, (2, 5, 5)).lipschitz == pytest.approx(
        lipschitz_bound(plain, (2, 5, 5)).lipschitz, rel=1e-5
    )


def test_functions_that_hold_the_original_see_it_in_evaluation_mode():
    class Closure(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4).double()
            self.function = lambda x: self.linear(x) * (1.0 if self.training else 100.0)

        def forward(self, x):
            return self.function(x)

    module = Closure().train()
    norm = float(torch.linalg.matrix_norm(module.linear.weight.detach(), 2))
    assert lipschitz_bound(module, (4,)).lipschitz == pytest.approx(100 * norm)
    assert module.training


def test_parameters_without_a_shape_are_refused():
    with pytest.raises(LoweringError, match="run it on one batch first"):
        lower(nn.Sequential(nn.LazyLinear(3)), (4,))


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("last", [nn.ReLU(), nn.GELU()], ids=["lowered", "refused"])
def test_the_module_is_left_as_it_was(last, live):
    """Modes, buffers, attributes, hooks and gradients, whether it is lowered or refused."""

    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), lipflow.cpl_dense(4, 3), last)
            self.scratch = torch.zeros(2, 4)
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x):
            self.total += 1
            if isinstance(x, Node):
                self.scratch[:] = x
            self.last = self.layers(x)
            return self.last

    module = Remembers().train()
    module.layers[1].eval()
    before = {name: t.clone() for name, t in module.state_dict().items()}
    with pytest.raises(LoweringError) if isinstance(last, nn.GELU) else nullcontext():
        lower(module, (4,), live)
    assert not hasattr(module, "last")
    assert bool((module.scratch == 0).all())
    assert [part for part in module.modules() if not part.training] == [module.layers[1]]
    assert all("forward" not in vars(part) and not part._forward_hooks for part in module.modules())
    assert all(torch.equal(before[name], t) for name, t in module.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in module.parameters())
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32
    copy.deepcopy(module)


def test_numbers_that_cancel_are_allowed_their_rounding():
    norm = nn.BatchNorm1d(4)
    linear = nn.Linear(4, 4)
    norm.running_mean.fill_(1e8)
    nn.init.constant_(linear.bias, 1e8)
    lower(nn.Sequential(linear, norm), (4,))
    with pytest.raises(LoweringError, match="computes something else"):
        lower(nn.Sequential(linear, norm, Wrong()), (4,))


@pytest.mark.parametrize("error", [TypeError, ValueError, KeyError, AttributeError])
def test_errors_of_a_module_say_where_they_are_from(error):
    def fail(module, x):
        raise error("its own words")

    with pytest.raises(LoweringError, match=r"in 1; test_lower\.py, line \d+: .*its own words"):
        lower(nn.Sequential(nn.ReLU(), Calls(fail)), (4,))


def test_a_lower_that_runs_itself_is_refused():
    class Endless(Halved):
        def lower(self, x):
            return declared(x, "Endless", self, lambda norm: 0.5)

    with pytest.raises(LoweringError, match="runs itself"):
        lower(nn.Sequential(Endless()), (4,))


def test_errors_of_the_network_itself_stay_what_they_are():
    with pytest.raises(LoweringError, match=r"linear \(in 1.*does not take an input of shape \(64,\)"):
        lower(nn.Sequential(nn.Flatten(), nn.Linear(60, 3)), (1, 8, 8))
    with pytest.raises(LoweringError, match="returns a tuple"):
        lower(Calls(lambda m, x: (x, x)), (4,))
    with pytest.raises(LoweringError, match="does not depend on its input"):
        lower(Calls(lambda m, x: torch.ones(2, 4)), (4,))


# 7. Contents once


def test_equal_contents_are_one_object_and_equal_computations_one_vertex():
    layer = nn.Linear(4, 4)
    graph = lower(nn.Sequential(layer, nn.ReLU(), copy.deepcopy(layer), nn.ReLU(), layer), (4,))
    for kind, count in ((Affine, 3), (Pointwise, 2)):
        found = [id(v.primitive) for v in graph.vertices if isinstance(v.primitive, kind)]
        assert (len(found), len(set(found))) == (count, 1)
    graph = lower(Calls(lambda m, x: torch.relu(x @ m.weight) + torch.relu(x @ m.weight)), (4,))
    assert kinds(graph) == ["input", "affine", "pointwise", "sum"]
    assert graph.output.primitive.coefficients == [2.0]


def test_a_norm_is_bounded_once(monkeypatch):
    counted = []
    real = lipflow.operators.certified.norm_certificate
    monkeypatch.setattr("lipflow.operators.certified.norm_certificate", lambda op: counted.append(op) or real(op))
    layer = nn.Linear(4, 4)
    lipflow.freeze(nn.Sequential(layer, nn.ReLU(), copy.deepcopy(layer), nn.ReLU(), layer), in_shape=(4,))
    assert len(counted) == 1
