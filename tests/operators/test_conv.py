import re
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from lipflow import ConvOperator
from lipflow.rounding import gamma
from tests.operators.geometry import Geometry, draw_geometry, matrix_of

LAWS = settings(max_examples=200, deadline=None, derandomize=True)


def integers(*shape: int, seed: int) -> torch.Tensor:
    """Small integers in float64: sums of their products are exact, so laws hold without a tolerance."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).double()


@st.composite
def geometries(draw) -> Geometry:
    return draw_geometry(lambda low, high: draw(st.integers(low, high)))


# The operator and its adjoint


@LAWS
@given(geometries(), st.integers(0, 2), st.integers(0, 10**6))
def test_the_operator_is_its_matrix_and_the_adjoint_the_transpose(geometry, batch, seed):
    kernel = integers(*geometry.kernel_shape, seed=seed)
    op, expected = geometry.conv(torch.zeros_like(kernel)).with_kernel(kernel), geometry.matrix(kernel)
    assert op.in_shape == (geometry.grouped * geometry.groups, *geometry.size)
    assert op.out_shape == (geometry.out * geometry.groups, *geometry.outputs)
    assert torch.equal(matrix_of(op), expected)
    basis = torch.eye(len(expected), dtype=torch.float64).reshape(-1, *op.out_shape)
    assert torch.equal(op.adjoint(basis).flatten(1), expected)
    x, y = integers(batch, *op.in_shape, seed=seed + 1), integers(batch, *op.out_shape, seed=seed + 2)
    assert torch.equal((op(x) * y).sum((1, 2, 3)), (x * op.adjoint(y)).sum((1, 2, 3)))


@LAWS
@given(geometries(), st.integers(0, 10**6))
def test_the_adjoint_identity_holds_to_rounding_on_reals(geometry, seed):
    generator = torch.Generator().manual_seed(seed)
    op = geometry.conv(torch.randn(geometry.kernel_shape, generator=generator, dtype=torch.float64))
    x = torch.randn(1, *op.in_shape, generator=generator, dtype=torch.float64)
    y = torch.randn(1, *op.out_shape, generator=generator, dtype=torch.float64)
    # Each side is a sum of at most (in + out + k²·channels) roundings a term, and its terms add to |y|·|W||x|.
    terms = x.numel() + y.numel() + op.weight[0].numel() * op.weight.shape[0] + 8
    magnitude = float((op.with_kernel(op.kernel.abs())(x.abs()) * y.abs()).sum())
    difference = abs(Fraction(float((op(x) * y).sum())) - Fraction(float((x * op.adjoint(y)).sum())))
    assert difference <= 2 * gamma(terms) * Fraction(magnitude) * (1 + gamma(terms))


# torch's own


@LAWS
@given(geometries(), st.integers(0, 10**6))
def test_zero_padding_agrees_with_torch(geometry, seed):
    kernel = integers(*geometry.kernel_shape, seed=seed)
    rows, columns = (max(pads) for pads in zip(geometry.before, geometry.after, strict=True))
    stride, dilation, groups = geometry.stride, geometry.dilation, geometry.groups
    op = ConvOperator(kernel, geometry.size, (rows, columns), stride=stride, dilation=dilation, groups=groups)
    x = integers(2, *op.in_shape, seed=seed + 1)
    assert torch.equal(op(x), F.conv2d(x, kernel, None, stride, (rows, columns), dilation, groups))


PADDINGS = [
    *(dict(padding="same", padding_mode=m, dilation=d) for m in ("zeros", "circular") for d in (1, (2, 1))),
    *(dict(padding=p, padding_mode="circular", stride=s) for p in (0, 1, (2, 3), 4) for s in (1, 2, (3, 1))),
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("options", PADDINGS, ids=str)
def test_padding_agrees_with_torch(options):
    for size, kernel, groups in product([(4, 7), (9, 4)], [(1, 1), (3, 3), (2, 4), (4, 3), (1, 2)], [1, 2]):
        module = nn.Conv2d(4, 2, kernel, groups=groups, bias=False, dtype=torch.float64, **options)
        module.weight.data = integers(*module.weight.shape, seed=3)
        x, op = integers(2, 4, *size, seed=4), ConvOperator(module.weight, size, groups=groups, **options)
        assert torch.equal(op(x), module(x))
        assert options["padding"] != "same" or op.out_shape == (2, *size)


def test_circular_padding_may_wrap_around_more_than_once():
    """torch refuses to pad by more than the input; a torus has no such limit."""
    op = ConvOperator(torch.ones(1, 1, 1, 1, dtype=torch.float64), (1, 3), ((2, 1), (7, 4)), "circular")
    x = torch.tensor([[[[0.0, 1.0, 2.0]]]], dtype=torch.float64)
    row = torch.tensor([(i - 7) % 3 for i in range(14)], dtype=torch.float64)
    assert torch.equal(op(x)[0, 0], row.expand(4, 14))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_values_follow_the_dtype_of_the_kernel(dtype):
    op = ConvOperator(torch.ones(2, 3, 3, 3, dtype=dtype), (4, 5))
    assert op(torch.ones(1, 3, 4, 5, dtype=dtype)).dtype == dtype
    assert op.adjoint(torch.ones(1, 2, 4, 5, dtype=dtype)).dtype == dtype


def test_channels_last_and_strided_inputs_give_the_same_values():
    op = ConvOperator(integers(3, 2, 3, 2, seed=0), (5, 6), padding="same", padding_mode="circular")
    x = integers(2, 2, 5, 6, seed=1)
    assert torch.equal(op(x.to(memory_format=torch.channels_last)), op(x))
    assert torch.equal(op(x.mT.contiguous().mT), op(x))


@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("padding", [1, "same", ((0, 2), (1, 0))])
def test_both_maps_are_differentiable_in_input_and_kernel(mode, padding):
    kernel = integers(4, 1, 2, 3, seed=0).requires_grad_()
    x = integers(1, 2, 3, 4, seed=1).requires_grad_()

    def there_and_back(x, kernel):
        op = ConvOperator(kernel, (3, 4), padding, mode, stride=(2, 1), groups=2)
        return op.adjoint(op(x))

    assert torch.autograd.gradcheck(there_and_back, (x, kernel))


# Refusals quote what was given


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


@pytest.mark.parametrize(
    ("arguments", "error", "quoted"),
    [
        (dict(kernel=ones(2, 3, 3)), ValueError, r"\(2, 3, 3\)"),
        (dict(kernel=ones(2, 3, 3, 3, 3)), ValueError, r"\(2, 3, 3, 3, 3\)"),
        (dict(kernel=ones(0, 3, 3, 3)), ValueError, r"\(0, 3, 3, 3\)"),
        (dict(kernel=ones(2, 3, 0, 3)), ValueError, r"\(2, 3, 0, 3\)"),
        (dict(kernel=torch.ones(2, 3, 3, 3, dtype=torch.int32)), TypeError, r"torch\.int32"),
        (dict(kernel=torch.ones(2, 3, 3, 3, dtype=torch.complex128)), TypeError, r"torch\.complex128"),
        (dict(kernel=[[1.0]]), TypeError, "list"),
        (dict(groups=3), ValueError, "2 output channels, not be 3"),
        (dict(groups=0), ValueError, "not be 0"),
        (dict(groups=-1), ValueError, "not be -1"),
        (dict(padding_mode="reflect"), ValueError, "'reflect'"),
        (dict(padding_mode=None), ValueError, "None"),
        (dict(padding=-1), ValueError, "at least 0, not -1"),
        (dict(padding=(1, -2)), ValueError, r"at least 0, not \(1, -2\)"),
        (dict(padding=((0, -1), (0, 0))), ValueError, r"not \(\(0, -1\), \(0, 0\)\)"),
        (dict(padding="valid"), ValueError, "'valid'"),
        (dict(padding=1.5), ValueError, r"1\.5"),
        (dict(padding=(1, 2, 3)), ValueError, r"\(1, 2, 3\)"),
        (dict(padding=((1, 1, 9), (1, 1))), ValueError, r"\(1, 1, 9\)"),
        (dict(padding=((1.7, 1), (1, 1))), ValueError, r"1\.7"),
        (dict(padding=None), ValueError, "None"),
        (dict(stride=None), TypeError, "stride .* not None"),
        (dict(stride=2.0), TypeError, r"stride .* not 2\.0"),
        (dict(in_size=None), TypeError, "in_size .* not None"),
        (dict(groups="2"), TypeError, "groups .* not be '?2"),
        (dict(stride=0), ValueError, "stride .* at least 1, not 0"),
        (dict(stride=(1, 0)), ValueError, r"stride .* not \(1, 0\)"),
        (dict(stride=(1, 1, 1)), ValueError, r"stride .* not \(1, 1, 1\)"),
        (dict(dilation=-2), ValueError, "dilation .* not -2"),
        (dict(dilation=(1.5, 1)), ValueError, r"dilation .* not \(1\.5, 1\)"),
        (dict(in_size=(0, 4)), ValueError, r"in_size .* not \(0, 4\)"),
        (dict(in_size=(3, 4, 4)), ValueError, r"in_size .* not \(3, 4, 4\)"),
        (dict(kernel=ones(2, 3, 7, 3)), ValueError, "spans 7 rows .* input of 4 padded by 1 and 1"),
        (dict(dilation=(1, 3)), ValueError, "spans 7 columns .* input of 4 padded by 1 and 1"),
    ],
)
def test_a_bad_argument_is_refused_and_quoted(arguments, error, quoted):
    good = dict(kernel=ones(2, 3, 3, 3), in_size=(4, 4))
    with pytest.raises((error, ValueError), match=quoted):
        ConvOperator(**{**good, **arguments})


@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 2, 4, 5), (1, 3, 5, 4), (1, 3, 4), (1, 1, 3, 4, 5)])
def test_inputs_of_another_shape_are_refused_with_both_shapes(shape):
    op = ConvOperator(ones(2, 3, 3, 3), (4, 5), stride=2)
    for call, expected in ((op, "3, 4, 5"), (op.adjoint, "2, 2, 3")):
        with pytest.raises(ValueError, match=re.escape(f"(batch, {expected}), not {shape}")):
            call(ones(*shape))
