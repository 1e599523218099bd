"""The pair (L, ε): of torch's own modules against their matrices, through chains, and that asking changes nothing."""

import copy
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import lipflow
from lipflow import Assume, Bound, LoweringError, lipschitz_bound, norm_bound
from lipflow.graph import lower
from lipflow.primitives import Affine, Gather, Input
from lipflow.primitives.rearrange import overlap
from tests.operators.geometry import matrix_of
from tests.soundness.graphs import Of

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


AFFINE = {
    "linear": nn.Linear(7, 5),
    "conv": nn.Conv2d(2, 4, 3),
    "conv, padded": nn.Conv2d(2, 4, 3, padding=1),
    "conv, same": nn.Conv2d(2, 4, (2, 3), padding="same"),
    "conv, valid": nn.Conv2d(2, 4, 3, padding="valid", stride=2),
    "conv, uneven": nn.Conv2d(2, 4, 2, padding=(1, 2), stride=(2, 1), dilation=(1, 2)),
    "conv, circular": nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"),
    "conv, same, circular": nn.Conv2d(2, 4, (4, 2), padding="same", padding_mode="circular"),
    "conv, strided, circular": nn.Conv2d(2, 4, 2, padding=1, padding_mode="circular", stride=2),
    "conv, groups": nn.Conv2d(2, 4, 3, padding=1, groups=2),
    "conv, reflect": nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
    "conv, replicate": nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"),
    "transposed": nn.ConvTranspose2d(2, 4, 3),
    "transposed, strided": nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1),
    "transposed, groups": nn.ConvTranspose2d(2, 4, (2, 3), stride=(1, 2), dilation=2, groups=2),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", AFFINE)
def test_affine_modules_promise_their_certified_norm(name):
    """A convolution is lowered to its matrix: to one with the same singular values after a roll of the image."""
    module, shape = AFFINE[name], (7,) if name == "linear" else (2, 6, 5)
    matrix = jacobian(module, *shape)
    norm, bound = spectral(matrix), lipschitz_bound(module, shape).lipschitz
    # Looser by √2 an axis at most, where circular padding makes outputs coincide.
    assert norm * (1 - SVD_ERROR) <= bound <= (1 + 1e-8 if name == "linear" else 2.1) * norm
    if "reflect" in name or "replicate" in name:
        return
    found = matrix_of(only_operator(module, shape))
    if "circular" in name:
        found, matrix = torch.linalg.svdvals(found), torch.linalg.svdvals(matrix)
    torch.testing.assert_close(found, matrix, rtol=0, atol=1e-12)


def only_operator(module: nn.Module, shape: tuple[int, ...]) -> lipflow.LinearOperator:
    """The operator of a module that is lowered to one affine vertex, after moves of numbers at most."""
    *first, last = lower(module, shape).vertices
    assert all(isinstance(v.primitive, Input | Gather) for v in first)
    assert isinstance(last.primitive, Affine)
    return last.primitive.op


@pytest.mark.parametrize("of", [lipschitz_bound, lipflow.freeze])
def test_a_shape_is_needed_unless_a_module_has_one(of):
    with pytest.raises(ValueError, match=r"give the shape of one input: in_shape=\(channels, height, width\)"):
        of(nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 3)))
    network = lipflow.build("cpl-digits", in_shape=(1, 4, 4))
    assert of(network).lipschitz == of(network, (1, 4, 4)).lipschitz
    with pytest.raises(ValueError, match=r"was built for \(1, 4, 4\), not \(1, 8, 8\)"):
        of(network, (1, 8, 8))
    with pytest.raises(LoweringError, match="5, 8, 8"):
        of(nn.Conv2d(3, 4, 3), (5, 8, 8))
    with pytest.raises(LoweringError, match=r"F\.linear \(in 0\): a matrix takes .*9, 4.*flatten"):
        of(nn.Sequential(nn.Linear(4, 6)), (9, 4))  # its bias would count once for each vector


def test_a_chain_tells_each_convolution_its_size():
    torch.manual_seed(0)
    chain = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.AvgPool2d(2), nn.Conv2d(2, 3, 2), nn.Flatten())
    first, last = only_operator(chain[0], (1, 11, 9)), only_operator(chain[2], (2, 2, 2))
    bound = lipschitz_bound(chain, (1, 11, 9)).lipschitz
    assert spectral(jacobian(chain, 1, 11, 9)) <= bound * (1 + SVD_ERROR)
    assert bound == pytest.approx(norm_bound(first) * 0.5 * norm_bound(last), rel=1e-9)


# Folding


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_a_chain_folds_to_the_product_and_the_weighted_sum(pairs):
    """L = Π Lᵢ and ε = Σ εᵢ Π_{j>i} Lⱼ: small integers are exact in float64."""
    total = math.prod(factor for factor, _ in pairs)
    error = sum(e * math.prod(factor for factor, _ in pairs[i + 1 :]) for i, (_, e) in enumerate(pairs))
    assert lipschitz_bound(nn.Sequential(*(declared(*pair) for pair in pairs)), (3,)) == Bound(total, error)


def declared(lipschitz: float, tolerance: float = 0.0) -> Assume:
    return Assume(nn.Identity(), lipschitz, tolerance)


def hooked() -> nn.Module:
    """What is inside of a declared bound does not count."""
    inside = nn.Linear(2, 2)
    inside.register_forward_hook(lambda module, inputs, output: 100 * output)
    return inside


TWICE = declared(2, 1)
FOLDED = {
    "nothing": (nn.Sequential(), Bound(1, 0)),
    "chains in chains": (nn.Sequential(nn.Sequential(declared(3, 1), nn.Sequential()), declared(2)), Bound(6, 2)),
    "a module twice": (nn.Sequential(TWICE, TWICE), Bound(4, 3)),
    "a module three times": (nn.Sequential(TWICE, nn.ReLU(), nn.Sequential(TWICE, TWICE)), Bound(8, 7)),
    "branches": (Of(lambda x, a, b: a(x) + 2 * b(x), declared(3, 0.5), declared(5, 0.25)), Bound(13, 1)),
    "a branch without tolerance": (Of(lambda x, a, b: a(x) + 2 * b(x), declared(3, 0.5), nn.ReLU()), Bound(5, 0.5)),
    "a zero map after tolerances": (nn.Sequential(declared(2, 7), declared(0, 1)), Bound(0, 1)),
    "beyond float64": (nn.Sequential(declared(1e200), declared(1e200)), Bound(math.inf, 0)),
    "an average": (nn.Sequential(nn.Unflatten(1, (1, 2, 1)), nn.AvgPool2d((2, 1))), Bound(pytest.approx(0.5**0.5), 0)),
    "declared": (Assume(hooked(), 1.0), Bound(1, 0)),
    "a declared potential": (lipflow.Flow(lipflow.Potential(hooked(), 1.0), lipflow.ExplicitEuler(1.0)), Bound(1, 0)),
}


@pytest.mark.parametrize("name", FOLDED)
def test_constants_and_tolerances_fold(name):
    module, expected = FOLDED[name]
    assert lipschitz_bound(module, (2,)) == expected


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
    assert float((layer(x) - solved(x)).detach().norm(dim=1).max()) <= one.tolerance


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


@pytest.mark.parametrize("numbers", [(-1.0, 0.0), (math.nan, 0.0), (math.inf, 0.0), (1.0, -1.0), (1.0, math.nan)])
def test_assume_refuses_numbers_that_promise_nothing(numbers):
    with pytest.raises(ValueError, match="finite") as error:
        Assume(nn.Identity(), *numbers)
    assert str(numbers[0]) in str(error.value)
    assert str(numbers[1]) in str(error.value)


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
    "last", [lipflow.blocks.Bias(3), lipflow.cpl_dense(3, 2), nn.GELU()], ids=["shift", "flow", "refused"]
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
        assert "its own float32" in lower(module, (3,)).note
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


# Refusals


@pytest.mark.parametrize("of", [lipschitz_bound, lipflow.freeze])
@pytest.mark.parametrize("shape", [4, "8", (3, None, 3), (2.0,), (-1, 2)], ids=str)
def test_what_is_no_shape_is_refused_and_quoted(of, shape):
    with pytest.raises(ValueError, match=r"in_shape is the shape of one input.*" + re.escape(f"not {shape!r}")):
        of(nn.Linear(4, 4), shape)


@pytest.mark.parametrize("of", [lipschitz_bound, lipflow.freeze])
@pytest.mark.parametrize("domain", [(1.0, 0.0), (0.0, 0.0), (math.nan, 1.0), (0.0, math.inf)])
def test_what_is_no_domain_is_refused_and_quoted(of, domain):
    with pytest.raises(ValueError, match=re.escape(f"domain is (low, high) with finite low < high, not {domain!r}")):
        of(nn.Linear(4, 4), (4,), domain)
