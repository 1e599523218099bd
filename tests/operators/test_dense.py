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
def test_the_operator_is_its_matrix_and_the_adjoint_the_transpose(rows, columns, batch, seed):
    weight = integers(rows, columns, seed=seed)
    op = DenseOperator(weight)
    assert torch.equal(matrix_of(op), weight)
    assert (op.in_shape, op.out_shape) == ((columns,), (rows,))
    assert op.weight is weight
    x, y = integers(batch, columns, seed=seed + 1), integers(batch, rows, seed=seed + 2)
    assert torch.equal((op(x) * y).sum(1), (x * op.adjoint(y)).sum(1))


def test_inputs_may_have_any_number_of_leading_axes():
    op = DenseOperator(integers(3, 4, seed=0))
    x = integers(2, 5, 4, seed=1)
    assert torch.equal(op(x), torch.nn.functional.linear(x, op.weight))
    assert op.adjoint(op(x)).shape == x.shape
    assert torch.equal(op(x[0, 0]), op.weight @ x[0, 0])


SHAPES = [(3,), (2, 3, 4), (), (0, 3), (3, 0)]  # of no matrix


@pytest.mark.parametrize(
    ("weight", "quoted"),
    [
        *(
            (torch.ones(shape), f"matrix \\(out, in\\).*{re.escape(str(shape))}")
            for shape in [(3,), (2, 3, 4), (), (0, 3)]
        ),
        *((torch.ones(2, 2, dtype=dtype), str(dtype)) for dtype in (torch.int64, torch.bool, torch.complex64)),
        ([[1.0]], "list"),
    ],
)
def test_a_weight_that_is_no_real_matrix_is_refused_and_quoted(weight, quoted):
    with pytest.raises((ValueError, TypeError), match=quoted):
        DenseOperator(weight)


def test_inputs_of_another_width_are_refused_with_both_widths():
    op = DenseOperator(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"\(\.\.\., 3\), not \(5, 4\)"):
        op(torch.ones(5, 4))
    with pytest.raises(ValueError, match=r"\(\.\.\., 2\), not \(5, 3\)"):
        op.adjoint(torch.ones(5, 3))
    with pytest.raises(ValueError, match=r"not \(\)"):
        op(torch.tensor(1.0))
