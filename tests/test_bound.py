"""The pair (L, ε): of torch's own modules against their matrices, through chains, and that asking changes nothing."""

import copy
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lipflow
from lipflow import Assume, Bound, LoweringError, lipschitz_bound, norm_bound
from lipflow.graph import lower
from lipflow.primitives import Affine, Gather, Input
from lipflow.primitives.rearrange import overlap
from tests.operators.geometry import matrix_of

LAWS = settings(max_examples=60, deadline=None, derandomize=True)
SVD_ERROR = 1e-12  # far above what LAPACK's singular values are off by at these sizes, relatively


def jacobian(module: nn.Module, *shape: int) -> Tensor:
    """The matrix of an affine module, column by column."""
    module = copy.deepcopy(module).double()
    entries = math.prod(shape)
    with torch.no_grad():
        origin = module(torch.zeros(1, *shape, dtype=torch.float64))
        images = module(torch.eye(entries, dtype=torch.float64).reshape(entries, *shape)) - origin
    return images.reshape(entries, -1).T


def spectral(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


# torch's own modules


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.ReLU(), (3, 4, 4)),
        (nn.Hardtanh(), (3, 4, 4)),
        (nn.Identity(), (3, 4, 4)),
        (nn.Flatten(), (3, 4, 4)),
        (nn.Unflatten(1, (2, 2)), (4, 3)),
        (nn.PixelUnshuffle(2), (3, 4, 4)),
        (nn.PixelShuffle(2), (4, 2, 2)),
        (nn.ChannelShuffle(2), (4, 2, 2)),
        (nn.ZeroPad2d(2), (2, 3, 3)),
        (nn.MaxPool2d(2), (3, 4, 4)),
        (nn.MaxPool2d((2, 3), padding=1), (3, 5, 4)),
        (nn.Dropout(), (3, 4, 4)),
    ],
    ids=repr,
)
def test_these_modules_are_exactly_1_lipschitz(module, shape):
    assert lipschitz_bound(module, shape) == Bound(1.0, 0.0)
    generator = torch.Generator().manual_seed(0)
    module = copy.deepcopy(module).eval()
    x, y = (torch.randn(50, *shape, generator=generator, dtype=torch.float64) for _ in range(2))
    apart, after = (x - y).flatten(1).norm(dim=1), (module(x) - module(y)).flatten(1).norm(dim=1)
    assert bool((after <= apart * (1 + 1e-14)).all())


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("dilation", [1, 2, 3, 6])
def test_overlap_counts_the_windows_that_read_one_position(kernel, stride, dilation):
    reads = [i * stride + j * dilation for i in range(60) for j in range(kernel)]
    most = max(map(reads.count, set(reads)))
    assert overlap((kernel, kernel), (stride, stride), (dilation, dilation)) == most**2
    assert overlap((kernel, 1), (stride, 1), (dilation, 1)) == most


@pytest.mark.parametrize(
    ("options", "constant"),
    [
        (dict(kernel_size=3, stride=1), 3.0),
        (dict(kernel_size=3, stride=1, padding=1), 3.0),
        (dict(kernel_size=3, stride=2), 2.0),
        (dict(kernel_size=2, stride=(1, 2)), math.sqrt(2)),
        (dict(kernel_size=3, stride=2, dilation=2), 3.0),
        (dict(kernel_size=(2, 3), stride=3, dilation=2), 1.0),
    ],
    ids=str,
)
def test_max_pooling_stretches_by_the_root_of_its_overlap_and_no_more(options, constant):
    module = nn.MaxPool2d(**options)
    bound = lipschitz_bound(module, (1, 12, 12)).lipschitz
    assert bound == pytest.approx(constant, rel=1e-9)
    assert bound >= constant
    # One bright pixel is the maximum of every window that reads it: some position reaches the bound.
    pixels = torch.eye(144, dtype=torch.float64).reshape(144, 1, 12, 12)
    dark = module(torch.zeros(1, 1, 12, 12, dtype=torch.float64))
    assert float((module(pixels) - dark).flatten(1).norm(dim=1).max()) == pytest.approx(constant, rel=1e-15)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, 12, 12, generator=generator, dtype=torch.float64)
    y = x + torch.randn(x.shape, generator=generator, dtype=torch.float64) * (torch.rand(x.shape) < 0.05)
    stretched = (module(x) - module(y)).flatten(1).norm(dim=1)
    assert bool((stretched <= bound * (x - y).flatten(1).norm(dim=1) * (1 + 1e-14)).all())


@pytest.mark.parametrize("kernel", [1, 2, 3, (2, 3)])
@pytest.mark.parametrize("stride", [None, 1, 2, (3, 1)])
@pytest.mark.parametrize("padding", [0, 1])
def test_average_pooling_is_bounded_by_its_matrix(kernel, stride, padding):
    if kernel == 1 and padding:
        pytest.skip("torch pads by at most half of the kernel")
    module = nn.AvgPool2d(kernel, stride, padding)
    norm, bound = spectral(jacobian(module, 1, 9, 8)), lipschitz_bound(module, (1, 9, 8)).lipschitz
    assert norm * (1 - SVD_ERROR) <= bound
    if stride is None and not padding:
        assert bound == pytest.approx(norm, rel=1e-9)


def test_average_pooling_without_overlap_is_exactly_one_over_its_side():
    assert lipschitz_bound(nn.AvgPool2d(2), (3, 8, 8)) == Bound(0.5)
    assert lipschitz_bound(nn.AvgPool2d(4), (3, 8, 8)) == Bound(0.25)
    assert lipschitz_bound(nn.AvgPool2d(4, divisor_override=1), (3, 8, 8)) == Bound(4.0)


def test_batch_normalisation_in_evaluation_is_its_greatest_scale():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    norm.running_var.uniform_(0.5, 4)
    norm.weight.data.normal_()
    scale = float((norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()).detach().abs().max())
    bound = lipschitz_bound(norm, (4, 3, 3)).lipschitz
    assert bound == pytest.approx(scale, rel=1e-12)
    # It joins the convolution before it, and the two are one operator.
    conv = nn.Conv2d(2, 4, 3)
    both = lipschitz_bound(nn.Sequential(conv, norm), (2, 5, 5)).lipschitz
    exact = spectral(jacobian(nn.Sequential(conv, norm).eval(), 2, 5, 5))
    assert exact * (1 - SVD_ERROR) <= both <= 1.05 * exact
    assert both < lipschitz_bound(conv, (2, 5, 5)).lipschitz * bound


def test_linear_promises_its_certified_norm():
    linear = nn.Linear(7, 5)
    norm = spectral(linear.weight.detach().double())
    assert norm * (1 - SVD_ERROR) <= lipschitz_bound(linear, (7,)).lipschitz <= norm * (1 + 1e-8)


CONVOLUTIONS = [
    dict(kernel_size=3, padding=1),
    dict(kernel_size=3),
    dict(kernel_size=(2, 3), padding="same"),
    dict(kernel_size=3, padding="valid", stride=2),
    dict(kernel_size=2, padding=(1, 2), stride=(2, 1), dilation=(1, 2)),
    dict(kernel_size=3, padding=1, padding_mode="circular"),
    dict(kernel_size=(4, 2), padding="same", padding_mode="circular"),
    dict(kernel_size=2, padding=1, padding_mode="circular", stride=2),
    dict(kernel_size=3, padding=1, groups=2),
]


def only_operator(module: nn.Module, shape: tuple[int, ...]) -> lipflow.LinearOperator:
    """The operator of a module that is lowered to one affine vertex, after moves of numbers at most."""
    *first, last = lower(module, shape).vertices
    assert all(isinstance(v.primitive, Input | Gather) for v in first)
    assert isinstance(last.primitive, Affine)
    return last.primitive.op


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_conv2d_promises_its_certified_norm(options):
    torch.manual_seed(0)
    module = nn.Conv2d(2, 4, **options)
    matrix = jacobian(module, 2, 6, 5)
    found = matrix_of(only_operator(module, (2, 6, 5)))
    if options.get("padding_mode") == "circular":  # which is lowered after a roll of the image
        values = torch.linalg.svdvals(matrix)
        torch.testing.assert_close(torch.linalg.svdvals(found), values, rtol=0, atol=1e-12)
    else:
        torch.testing.assert_close(found, matrix, rtol=0, atol=1e-12)
    norm = spectral(matrix)
    # Looser by √2 an axis at most, where circular padding makes outputs coincide.
    assert norm * (1 - SVD_ERROR) <= lipschitz_bound(module, (2, 6, 5)).lipschitz <= 2.1 * norm


@pytest.mark.parametrize(
    "options",
    [
        dict(kernel_size=3),
        dict(kernel_size=3, stride=2, padding=1, output_padding=1),
        dict(kernel_size=(2, 3), stride=(1, 2), dilation=2, groups=2),
    ],
    ids=str,
)
def test_transposed_convolutions_promise_their_certified_norm(options):
    torch.manual_seed(0)
    module = nn.ConvTranspose2d(2, 4, **options)
    matrix = jacobian(module, 2, 4, 5)
    torch.testing.assert_close(matrix_of(only_operator(module, (2, 4, 5))), matrix, rtol=0, atol=1e-12)
    norm = spectral(matrix)
    assert norm * (1 - SVD_ERROR) <= lipschitz_bound(module, (2, 4, 5)).lipschitz <= 2.1 * norm


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_other_paddings_count_what_they_repeat(mode):
    torch.manual_seed(0)
    module = nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode)
    norm, bound = spectral(jacobian(module, 2, 6, 5)), lipschitz_bound(module, (2, 6, 5)).lipschitz
    assert norm * (1 - SVD_ERROR) <= bound <= 2.1 * norm


def test_a_shape_is_needed_unless_a_module_has_one():
    with pytest.raises(ValueError, match=r"give the shape of one input: in_shape=\(channels, height, width\)"):
        lipschitz_bound(nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 3)))
    network = lipflow.build("cpl-digits", in_shape=(1, 4, 4))
    assert lipschitz_bound(network) == lipschitz_bound(network, (1, 4, 4))
    with pytest.raises(ValueError, match=r"was built for \(1, 4, 4\), not \(1, 8, 8\)"):
        lipschitz_bound(network, (1, 8, 8))


def test_a_chain_tells_each_convolution_its_size():
    torch.manual_seed(0)
    chain = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.AvgPool2d(2), nn.Conv2d(2, 3, 2), nn.Flatten())
    first, last = only_operator(chain[0], (1, 11, 9)), only_operator(chain[2], (2, 2, 2))
    bound = lipschitz_bound(chain, (1, 11, 9)).lipschitz
    assert spectral(jacobian(chain, 1, 11, 9)) <= bound * (1 + SVD_ERROR)
    assert bound == pytest.approx(norm_bound(first) * 0.5 * norm_bound(last), rel=1e-9)


# Folding


@LAWS
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_a_chain_folds_to_the_product_and_the_weighted_sum(pairs):
    """L = Π Lᵢ and ε = Σ εᵢ Π_{j>i} Lⱼ: small integers are exact in float64."""
    chain = nn.Sequential(*(Assume(nn.Identity(), bound=factor, tolerance=error) for factor, error in pairs))
    total = math.prod(factor for factor, _ in pairs)
    error = sum(e * math.prod(factor for factor, _ in pairs[i + 1 :]) for i, (_, e) in enumerate(pairs))
    assert lipschitz_bound(chain, (3,)) == Bound(total, error)


def test_chains_nest_and_may_be_empty():
    inner = nn.Sequential(Assume(nn.Identity(), 3.0, 1.0), nn.Sequential(), nn.ReLU())
    assert lipschitz_bound(nn.Sequential(inner, Assume(nn.Identity(), 2.0)), (3,)) == Bound(6.0, 2.0)
    assert lipschitz_bound(nn.Sequential(), (3,)) == Bound(1.0, 0.0)


def test_a_module_that_a_chain_uses_twice_counts_twice():
    double = Assume(nn.Identity(), bound=2.0, tolerance=1.0)
    assert lipschitz_bound(nn.Sequential(double, double), (3,)) == Bound(4.0, 3.0)
    assert lipschitz_bound(nn.Sequential(double, nn.ReLU(), nn.Sequential(double, double)), (3,)) == Bound(8.0, 7.0)
    linear = nn.Linear(3, 3)
    linear.weight.data = 2 * torch.eye(3)
    assert 4 <= lipschitz_bound(nn.Sequential(linear, nn.ReLU(), linear), (3,)).lipschitz < 4 + 1e-8


class Branches(nn.Module):
    """a(x) + 2·b(x)."""

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a, self.b = a, b

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + 2 * self.b(x)


def test_branches_add():
    a, b = Assume(nn.Identity(), 3.0, 0.5), Assume(nn.Identity(), 5.0, 0.25)
    assert lipschitz_bound(Branches(a, b), (3,)) == Bound(13.0, 1.0)
    assert lipschitz_bound(Branches(a, nn.ReLU()), (3,)) == Bound(5.0, 0.5)


def test_a_zero_map_absorbs_every_tolerance_before_it():
    chain = nn.Sequential(Assume(nn.Identity(), 2.0, 7.0), Assume(nn.Identity(), 0.0, 1.0))
    assert lipschitz_bound(chain, (3,)) == Bound(0.0, 1.0)


def test_what_is_beyond_float64_is_infinite():
    chain = nn.Sequential(*[Assume(nn.Identity(), 1e200) for _ in range(2)])
    assert lipschitz_bound(chain, (3,)).lipschitz == math.inf


@pytest.mark.parametrize("domain", [(0.0, 1.0), (-3.0, 5.0)])
def test_what_is_left_unsolved_counts_over_the_domain(domain):
    """ε is carried by the layers that follow, and grows with the box of inputs."""
    torch.manual_seed(0)
    layer = lipflow.proximal(4, 6, iterations=3).double().eval()
    doubled = nn.Sequential(layer, Assume(nn.Identity(), 2.0))
    one = lipschitz_bound(layer, (4,), domain)
    assert one.lipschitz == 1
    assert 0 < one.tolerance < math.inf
    assert lipschitz_bound(doubled, (4,), domain) == Bound(2.0, 2 * one.tolerance)
    low, high = domain
    assert lipschitz_bound(layer, (4,), (low - 1, high + 1)).tolerance > one.tolerance
    solved = lipflow.Flow(layer.field, lipflow.ImplicitEuler(iterations=300)).eval()
    x = low + (high - low) * torch.rand(500, 4, dtype=torch.float64)
    assert float((layer(x) - solved(x)).norm(dim=1).max()) <= one.tolerance


# Assume


def test_assume_is_taken_at_its_word_and_computes_its_module():
    assumed = Assume(nn.GELU(), bound=1.2, tolerance=0.5)
    assert lipschitz_bound(assumed, (3,)) == Bound(1.2, 0.5)
    x = torch.ones(1, 1)
    assert torch.equal(assumed(x), nn.GELU()(x))
    assert "bound=1.2" in repr(assumed)
    # Its output may be of another shape, and is taken up by what follows.
    narrow = Assume(nn.Sequential(nn.Linear(4, 2), nn.GELU()), bound=3.0)
    linear = nn.Linear(2, 2, bias=False)
    linear.weight.data = 2 * torch.eye(2)
    assert lipschitz_bound(nn.Sequential(narrow, linear), (4,)).lipschitz == pytest.approx(6, rel=1e-8)


def test_a_word_is_taken_for_all_that_is_inside():
    inside = nn.Linear(2, 2)
    inside.register_forward_hook(lambda module, inputs, output: 100 * output)
    assert lipschitz_bound(Assume(inside, bound=1.0), (2,)).lipschitz == 1
    assumed = lipflow.Flow(lipflow.Potential(inside, 1.0), lipflow.ExplicitEuler(1.0))
    assert lipschitz_bound(assumed, (2,)).lipschitz == 1


@pytest.mark.parametrize("numbers", [(-1.0, 0.0), (math.nan, 0.0), (math.inf, 0.0), (1.0, -1.0), (1.0, math.nan)])
def test_assume_refuses_numbers_that_promise_nothing(numbers):
    with pytest.raises(ValueError, match="finite") as error:
        Assume(nn.Identity(), *numbers)
    assert str(numbers[0]) in str(error.value)
    assert str(numbers[1]) in str(error.value)


# Hooks are part of what is lowered


def tripled(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return 3 * output


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Sequential(nn.ReLU()), (3,)),
        (lambda: lipflow.cpl_dense(3, 4), (3,)),
        (lambda: lipflow.bjorck_dense(3, 3), (3,)),
        (lambda: lipflow.blocks.Flatten(), (3,)),
        (lambda: Assume(nn.ReLU(), 1.0, 0.5), (3,)),
        (lambda: lipflow.build("cpl-digits", in_shape=(1, 4, 4)), (1, 4, 4)),
    ],
)
def test_a_hook_that_triples_the_output_triples_the_bound(make, shape):
    module = make().eval()
    bound = lipschitz_bound(module, shape)
    thrice = Bound(pytest.approx(3 * bound.lipschitz, rel=1e-9), pytest.approx(3 * bound.tolerance))
    handle = module.register_forward_hook(tripled)
    for chain in (module, nn.Sequential(nn.Identity(), module)):
        assert lipschitz_bound(chain, shape) == thrice
    handle.remove()
    assert lipschitz_bound(module, shape) == bound


@pytest.mark.parametrize("name", ["forward", "before", "replaced"])
def test_every_way_to_change_a_forward_from_outside_counts(name):
    module = nn.ReLU()
    if name == "forward":
        module.register_forward_hook(tripled)
    elif name == "before":
        module.register_forward_pre_hook(lambda module, inputs: (3 * inputs[0],))
    else:
        module.forward = lambda input: 3 * input
    assert float(module(torch.ones(1))) == 3
    assert lipschitz_bound(module, (2,)) == Bound(3.0, 0.0)


def test_a_parametrized_weight_is_no_hook():
    layer = lipflow.cpl_dense(4, 3).eval()
    before = lipschitz_bound(layer, (4,))
    nn.utils.parametrize.register_parametrization(layer.field.weight, "weight", nn.Identity())
    assert lipschitz_bound(layer, (4,)) == before
    linear = nn.Linear(5, 4)
    nn.utils.parametrizations.spectral_norm(linear, n_power_iterations=50)
    assert lipschitz_bound(linear, (5,)).lipschitz == pytest.approx(1, abs=1e-3)
    assert lipschitz_bound(linear, (5,)).lipschitz >= spectral(linear.weight.detach().double()) * (1 - 1e-6)


# Asking changes nothing


def test_modes_are_left_as_they_were():
    chain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Sequential(nn.AvgPool2d(2), nn.BatchNorm2d(2)))
    chain.train()
    chain[2].eval()
    chain[0].eval()
    modes = [module.training for module in chain.modules()]
    before = copy.deepcopy(chain.state_dict())
    lipschitz_bound(chain, (1, 6, 6))
    assert [module.training for module in chain.modules()] == modes
    after = chain.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_modes_are_left_as_they_were_by_a_refusal():
    chain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.GELU()).train()
    before = copy.deepcopy(chain.state_dict())
    with pytest.raises(LoweringError):
        lipschitz_bound(chain, (1, 6, 6))
    assert all(module.training for module in chain.modules())
    assert all(torch.equal(before[key], value) for key, value in chain.state_dict().items())


class Uncopied(nn.Module):
    """It cannot be copied, so that it is lowered itself."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), last
        self.register_buffer("calls", torch.zeros(()))

    def __deepcopy__(self, memo: object) -> nn.Module:
        raise RuntimeError("not to be copied")

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.norm(self.linear(x)))


@pytest.mark.parametrize(
    "last", [lipflow.blocks.Shift(3), lipflow.cpl_dense(3, 2), nn.GELU()], ids=["", "flow", "refused"]
)
def test_a_module_that_cannot_be_copied_is_left_as_it_was(last):
    module = Uncopied(last).train()
    before = {name: t.clone() for name, t in module.state_dict().items()}
    norm = spectral(module.linear.weight.detach().double() / math.sqrt(1 + module.norm.eps))
    if isinstance(last, nn.GELU):
        with pytest.raises(LoweringError, match=r"F\.gelu \(in last; test_bound\.py, line \d+\)"):
            lipschitz_bound(module, (3,))
    else:
        stretch = lipschitz_bound(last, (3,)).lipschitz
        assert lipschitz_bound(module, (3,)).lipschitz == pytest.approx(norm * stretch, rel=1e-6)
    assert all(part.training for part in module.modules())
    assert not any(part._forward_hooks or "forward" in vars(part) for part in module.modules())
    assert all(torch.equal(before[name], t) for name, t in module.state_dict().items())


def test_a_bound_at_another_size_leaves_the_power_iteration_where_it_was():
    layer = lipflow.cpl_conv(2, 3)
    layer(torch.zeros(1, 2, 8, 8))
    before = copy.deepcopy(layer.state_dict())
    for module in (layer, nn.Sequential(layer, nn.ReLU())):
        lipschitz_bound(module, (2, 5, 5))
        after = layer.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_asking_needs_no_gradients_and_leaves_none():
    linear = nn.Linear(3, 2)
    lipschitz_bound(linear, (3,))
    assert linear.weight.requires_grad
    assert linear.weight.grad is None
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


# Refusals


@pytest.mark.parametrize("shape", [4, "8", (3, None, 3), (2.0,), (-1, 2)])
def test_what_is_no_shape_is_refused_and_quoted(shape):
    with pytest.raises(ValueError, match=r"in_shape is the shape of one input.*" + re.escape(f"not {shape!r}")):
        lipschitz_bound(nn.Linear(4, 4), shape)


@pytest.mark.parametrize("shape", [(5, 8, 8), (8, 8), (8,)])
def test_a_shape_that_a_convolution_cannot_take_is_refused_and_quoted(shape):
    with pytest.raises(LoweringError, match=re.escape(", ".join(map(str, shape)))):
        lipschitz_bound(nn.Conv2d(3, 4, 3), shape)


def test_a_linear_layer_on_many_vectors_at_once_is_refused():
    """Its bias would count once for each of them."""
    with pytest.raises(LoweringError, match=r"F\.linear \(in 0\): a matrix takes .*9, 4.*flatten"):
        lipschitz_bound(nn.Sequential(nn.Linear(4, 6)), (9, 4))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused(value):
    for field in ("weight", "bias"):
        linear = nn.Linear(3, 3)
        getattr(linear, field).data.view(-1)[0] = value
        with pytest.raises(LoweringError, match=r"NaN|not finite"):
            lipschitz_bound(nn.Sequential(nn.ReLU(), linear), (3,))


@pytest.mark.parametrize("domain", [(1.0, 0.0), (0.0, 0.0), (math.nan, 1.0), (0.0, math.inf)])
def test_what_is_no_domain_is_refused_and_quoted(domain):
    with pytest.raises(ValueError, match=re.escape(f"domain is (low, high) with finite low < high, not {domain!r}")):
        lipschitz_bound(nn.Linear(4, 4), (4,), domain)
