import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lipflow import DenseOperator
from tests.operators.geometry import matrix_of
from tests.operators.test_conv import LAWS, integers


@LAWS
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 3), st.integers(0, 10**6))
def test_dense_operator_is_its_matrix_and_the_adjoint_the_transpose(rows, columns, batch, seed):
    weight = integers(rows, columns, seed=seed)
    op = DenseOperator(weight)
    assert torch.equal(matrix_of(op), weight)
    assert (op.in_shape, op.out_shape) == ((columns,), (rows,))
    x, y = integers(batch, 2, columns, seed=seed + 1), integers(batch, 2, rows, seed=seed + 2)
    assert torch.equal(op(x), torch.nn.functional.linear(x, weight))
    assert torch.equal((op(x) * y).sum(2), (x * op.adjoint(y)).sum(2))


@pytest.mark.parametrize(
    ("weight", "quoted"),
    [
        *((torch.ones(shape), re.escape(str(shape))) for shape in [(3,), (2, 3, 4), (), (0, 3)]),
        *((torch.ones(2, 2, dtype=dtype), str(dtype)) for dtype in (torch.int64, torch.complex64)),
        ([[1.0]], "list"),
    ],
)
def test_dense_operator_rejects_other_weights(weight, quoted):
    with pytest.raises((ValueError, TypeError), match=quoted):
        DenseOperator(weight)


@pytest.mark.parametrize("shape", [(5, 4), ()])
def test_dense_operator_rejects_inputs_of_another_width(shape):
    op = DenseOperator(torch.ones(2, 3))
    for call, width in ((op, 3), (op.adjoint, 2)):
        with pytest.raises(ValueError, match=re.escape(f"(..., {width}), not {shape}")):
            call(torch.ones(shape))
