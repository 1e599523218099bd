"""What torch's own modules promise, and which are refused."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import lipflow
from lipflow import Bound, lipschitz_bound, norm_bound
from lipflow.bound import operator_of, overlap
from tests.operators.geometry import matrix_of

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


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.ReLU(), (3, 4, 4)),
        (nn.Identity(), (3, 4, 4)),
        (nn.Flatten(), (3, 4, 4)),
        (nn.PixelUnshuffle(2), (3, 4, 4)),
        (nn.PixelShuffle(2), (4, 2, 2)),
        (nn.MaxPool2d(2), (3, 4, 4)),
        (nn.MaxPool2d((2, 3), padding=1, ceil_mode=True), (3, 5, 4)),
    ],
    ids=repr,
)
def test_these_modules_are_exactly_1_lipschitz(module, shape):
    assert lipschitz_bound(module) == Bound(1.0, 0.0)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(50, *shape, generator=generator, dtype=torch.float64) for _ in range(2))
    apart, after = (x - y).flatten(1).norm(dim=1), (module(x) - module(y)).flatten(1).norm(dim=1)
    assert bool((after <= apart * (1 + 1e-14)).all())


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("dilation", [1, 2, 3, 6])
def test_overlap_counts_the_windows_that_read_one_position(kernel, stride, dilation):
    reads = [i * stride + j * dilation for i in range(60) for j in range(kernel)]
    assert overlap(kernel, stride, dilation) == max(map(reads.count, set(reads))) ** 2
    assert overlap((kernel, 1), (stride, 1), (dilation, 1)) == max(map(reads.count, set(reads)))


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
    bound = lipschitz_bound(module).lipschitz
    assert bound == pytest.approx(constant, rel=1e-15)
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
    norm, bound = spectral(jacobian(module, 1, 9, 8)), lipschitz_bound(module).lipschitz
    assert norm * (1 - SVD_ERROR) <= bound
    if stride is None and not padding:
        assert bound == pytest.approx(norm, rel=1e-14)


def test_average_pooling_without_overlap_is_exactly_one_over_its_side():
    assert lipschitz_bound(nn.AvgPool2d(2)) == Bound(0.5)
    assert lipschitz_bound(nn.AvgPool2d(4)) == Bound(0.25)


def test_linear_promises_its_certified_norm():
    linear = nn.Linear(7, 5)
    norm = spectral(linear.weight.detach().double())
    assert norm * (1 - SVD_ERROR) <= lipschitz_bound(linear).lipschitz <= norm * (1 + 1e-8)


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


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_conv2d_promises_its_certified_norm(options):
    torch.manual_seed(0)
    module = nn.Conv2d(2, 4, **options)
    matrix = jacobian(module, 2, 6, 5)
    torch.testing.assert_close(matrix_of(operator_of(module.double(), (6, 5))), matrix, rtol=0, atol=1e-12)
    norm = spectral(matrix)
    # Looser by √2 an axis at most, where circular padding makes outputs coincide.
    assert norm * (1 - SVD_ERROR) <= lipschitz_bound(module, (2, 6, 5)).lipschitz <= 2.1 * norm


def test_conv2d_needs_to_know_its_input_size():
    with pytest.raises(ValueError, match=r"Sequential\.1: .*in_shape=\(channels, height, width\)"):
        lipschitz_bound(nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 3)))


def test_a_chain_tells_each_convolution_its_size():
    torch.manual_seed(0)
    chain = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.AvgPool2d(2), nn.Conv2d(2, 3, 2), nn.Flatten())
    first, last = operator_of(chain[0], (11, 9)), operator_of(chain[2], (2, 2))
    bound = lipschitz_bound(chain, (1, 11, 9)).lipschitz
    assert spectral(jacobian(chain, 1, 11, 9)) <= bound * (1 + SVD_ERROR)
    assert bound == pytest.approx(norm_bound(first) * 0.5 * norm_bound(last), rel=1e-14)


# Refusals


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 100 * x


class LouderReLU(nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        return 100 * input


class Loop(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(super().forward(input))


@pytest.mark.parametrize(
    ("module", "name", "advice"),
    [
        (nn.BatchNorm2d(3), r"nn\.BatchNorm2d", "leave it out"),
        (nn.LayerNorm(3), r"nn\.LayerNorm", "leave it out"),
        (nn.AdaptiveAvgPool2d(1), r"nn\.AdaptiveAvgPool2d", r"lipflow\.blocks\.AvgPool"),
        (nn.GELU(), r"nn\.GELU", r"lipflow\.blocks\.MaxMin"),
        (nn.SiLU(), r"nn\.SiLU", r"nn\.ReLU"),
        (nn.Dropout(), r"nn\.Dropout", "leave it out"),
        (nn.ConvTranspose2d(3, 3, 3), r"nn\.ConvTranspose2d", r"lipflow\.cpl_conv"),
        (nn.Softmax(dim=1), r"nn\.Softmax", r"Assume\(module, bound=\.\.\.\)"),
        (Unknown(), "Unknown", r"Assume\(module, bound=\.\.\.\)"),
        (LouderReLU(), "LouderReLU", r"Assume\(module, bound=\.\.\.\)"),
        (Loop(nn.ReLU()), "Loop", r"write it as an nn\.Sequential, .* or Assume\(module, bound=\.\.\.\)"),
        (type("Linear2", (nn.Linear,), {})(2, 2), "Linear2", r"Assume\(module, bound=\.\.\.\)"),
    ],
)
def test_a_module_that_promises_nothing_is_refused_by_name_and_place(module, name, advice):
    with pytest.raises(TypeError, match=f"^{name} declares no Lipschitz bound; .*{advice}"):
        lipschitz_bound(module)
    chain = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Identity(), module))
    with pytest.raises(TypeError, match=rf"^{name} \(at Sequential\.1\.1\) declares no Lipschitz bound"):
        lipschitz_bound(chain)


def test_advice_names_things_that_exist():
    for name in ("AvgPool", "MaxMin"):
        assert hasattr(lipflow.blocks, name)
    assert callable(lipflow.cpl_conv)


@pytest.mark.parametrize(
    ("module", "quoted"),
    [
        (nn.Flatten(0), "start_dim=1"),
        (nn.Flatten(2), "start_dim=1"),
        (nn.MaxPool2d(2, return_indices=True), "return_indices=True"),
        (nn.AvgPool2d(3, padding=1, count_include_pad=False), "AvgPool2d"),
        (nn.AvgPool2d(3, ceil_mode=True), "AvgPool2d"),
        (nn.AvgPool2d(3, divisor_override=1), "AvgPool2d"),
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), "reflect"),
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="replicate"), "replicate"),
        (nn.Conv2d(2, 2, 9), "spans 9 rows"),
    ],
    ids=repr,
)
def test_a_use_that_has_no_bound_is_refused_and_quoted(module, quoted):
    with pytest.raises(ValueError, match=quoted):
        lipschitz_bound(module, (2, 6, 6))


def test_weights_that_are_not_finite_are_refused():
    linear = nn.Linear(3, 3)
    linear.weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        lipschitz_bound(linear)


def tripled(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return 3 * output


def test_a_module_whose_forward_was_changed_from_outside_is_refused():
    """Hooks and a replaced forward compute what no type says: the exact type alone promises nothing then."""
    hooked, replaced = nn.ReLU(), nn.ReLU()
    hooked.register_forward_hook(tripled)
    replaced.forward = lambda input: 3 * input
    before = nn.ReLU()
    before.register_forward_pre_hook(lambda module, inputs: (3 * inputs[0],))
    for module in (hooked, replaced, before):
        assert float(module(torch.ones(1))) == 3
        with pytest.raises(TypeError, match=r"^nn\.ReLU has forward hooks"):
            lipschitz_bound(module)
