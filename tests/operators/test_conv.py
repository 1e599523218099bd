import re
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lipflow import ConvOperator
from tests.operators.geometry import Geometry, draw_geometry, matrix_of

LAWS = settings(max_examples=200)


def integers(*shape: int, seed: int) -> torch.Tensor:
    """Small integers in float64: sums of their products are exact, so laws hold without a tolerance."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).double()


@st.composite
def geometries(draw) -> Geometry:
    return draw_geometry(lambda low, high: draw(st.integers(low, high)))


@LAWS
@given(geometries(), st.integers(0, 2), st.integers(0, 10**6))
def test_conv_operator_is_its_matrix_and_the_adjoint_the_transpose(geometry, batch, seed):
    kernel = integers(*geometry.kernel_shape, seed=seed)
    op, expected = geometry.conv(torch.zeros_like(kernel)).with_weight(kernel), geometry.matrix(kernel)
    assert op.in_shape == (geometry.grouped * geometry.groups, *geometry.size)
    assert op.out_shape == (geometry.out * geometry.groups, *geometry.outputs)
    assert torch.equal(matrix_of(op), expected)
    basis = torch.eye(len(expected), dtype=torch.float64).reshape(-1, *op.out_shape)
    assert torch.equal(op.adjoint(basis).flatten(1), expected)
    x, y = integers(batch, *op.in_shape, seed=seed + 1), integers(batch, *op.out_shape, seed=seed + 2)
    assert torch.equal((op(x) * y).sum((1, 2, 3)), (x * op.adjoint(y)).sum((1, 2, 3)))
    (gradient,) = torch.autograd.grad((op.with_weight(kernel.requires_grad_())(x) * y).sum(), kernel)
    assert torch.equal(op.outer(y, x), gradient)


PADDINGS = [
    *(dict(padding="same", padding_mode=m, dilation=d) for m in ("zeros", "circular") for d in (1, (2, 1))),
    *(
        dict(padding=p, padding_mode=m, stride=s)
        for m in ("zeros", "circular")
        for p in (0, 1, (2, 3), 4)
        for s in (1, 2, (3, 1))
    ),
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("options", PADDINGS, ids=str)
def test_conv_operator_takes_the_padding_of_torch(options):
    for size, kernel, groups in product([(4, 7), (9, 4)], [(1, 1), (3, 3), (2, 4), (4, 3), (1, 2)], [1, 2]):
        module = nn.Conv2d(4, 2, kernel, groups=groups, bias=False, dtype=torch.float64, **options)
        module.weight.data = integers(*module.weight.shape, seed=3)
        x, op = integers(2, 4, *size, seed=4), ConvOperator(module.weight, size, groups=groups, **options)
        assert torch.equal(op(x), module(x))
        assert torch.equal(op(x.to(memory_format=torch.channels_last)), module(x))


@pytest.mark.parametrize(
    ("arguments", "quoted"),
    [
        *((dict(kernel=torch.ones(shape)), re.escape(str(shape))) for shape in ((2, 3, 3), (0, 3, 3, 3), (2, 3, 0, 3))),
        (dict(kernel=torch.ones(2, 3, 3, 3, dtype=torch.int32)), r"torch\.int32"),
        (dict(kernel=torch.ones(2, 3, 3, 3, dtype=torch.complex128)), r"torch\.complex128"),
        (dict(kernel=[[1.0]]), "list"),
        *((dict(groups=groups), f"not be {groups!r}") for groups in (3, 0, -1, "2")),
        *((dict(padding_mode=mode), f"not {mode!r}") for mode in ("reflect", None)),
        *(
            (dict(padding=padding), re.escape(f"not {padding!r}"))
            for padding in (-1, (1, -2), ((0, -1), (0, 0)), "valid", None, 1.5, (1, 2, 3), ((1, 1, 9), (1, 1)))
        ),
        *((dict(stride=s), re.escape(f"at least 1, not {s}")) for s in (None, 2.0, 0, (1, 0), (1, 1, 1))),
        (dict(dilation=-2), "dilation .* not -2"),
        *((dict(in_size=n), re.escape(f"not {n}")) for n in (None, (0, 4), (3, 4, 4))),
        (dict(kernel=torch.ones(2, 3, 7, 3)), "spans 7 rows .* input of 4 padded by 1 and 1"),
        (dict(dilation=(1, 3)), "spans 7 columns .* input of 4 padded by 1 and 1"),
    ],
)
def test_conv_operator_rejects_and_quotes_wrong_arguments(arguments, quoted):
    with pytest.raises((TypeError, ValueError), match=quoted):
        ConvOperator(**{"kernel": torch.ones(2, 3, 3, 3), "in_size": (4, 4), **arguments})


@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 2, 4, 5), (1, 3, 5, 4), (1, 3, 4), (1, 1, 3, 4, 5)])
def test_conv_operator_rejects_inputs_of_another_shape(shape):
    op = ConvOperator(torch.ones(2, 3, 3, 3), (4, 5), stride=2)
    for call, expected in ((op, "3, 4, 5"), (op.adjoint, "2, 2, 3")):
        with pytest.raises(ValueError, match=re.escape(f"(batch, {expected}), not {shape}")):
            call(torch.ones(shape))
