import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipflow import Dense
from tests.operators.geometry import matrix_of

LAWS = settings(max_examples=100, deadline=None, derandomize=True)


def integers(*shape: int, seed: int) -> torch.Tensor:
    """Small integers in float64: sums of their products are exact, so laws hold without a tolerance."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).double()


@LAWS
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 3), st.integers(0, 10**6))
def test_the_adjoint_is_the_transpose_exactly(rows, columns, batch, seed):
    op = Dense(integers(rows, columns, seed=seed))
    x, y = integers(batch, columns, seed=seed + 1), integers(batch, rows, seed=seed + 2)
    assert torch.equal((op(x) * y).sum(1), (x * op.adjoint(y)).sum(1))


@LAWS
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 10**6))
def test_the_operator_is_its_matrix(rows, columns, seed):
    weight = integers(rows, columns, seed=seed)
    op = Dense(weight)
    assert torch.equal(matrix_of(op), weight)
    assert op.in_shape == (columns,)
    assert op.out_shape == (rows,)
    assert op.weight is weight


def test_inputs_may_have_any_number_of_leading_axes():
    op = Dense(integers(3, 4, seed=0))
    x = integers(2, 5, 4, seed=1)
    assert torch.equal(op(x), torch.nn.functional.linear(x, op.weight))
    assert op.adjoint(op(x)).shape == x.shape
    assert torch.equal(op(x[0, 0]), op.weight @ x[0, 0])


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (), (0, 3), (3, 0)])
def test_a_weight_that_is_no_matrix_is_refused_with_its_shape(shape):
    with pytest.raises(ValueError, match=r"matrix \(out, in\)") as error:
        Dense(torch.ones(shape))
    assert str(tuple(shape)) in str(error.value)


@pytest.mark.parametrize(
    ("weight", "given_as"),
    [
        (torch.ones(2, 2, dtype=torch.int64), "torch.int64"),
        (torch.ones(2, 2, dtype=torch.bool), "torch.bool"),
        (torch.ones(2, 2, dtype=torch.complex64), "torch.complex64"),
        ([[1.0]], "list"),
    ],
)
def test_a_weight_that_is_not_real_is_refused_with_its_type(weight, given_as):
    with pytest.raises(TypeError, match=given_as):
        Dense(weight)


def test_inputs_of_another_width_are_refused_with_both_widths():
    op = Dense(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"\(\.\.\., 3\), not \(5, 4\)"):
        op(torch.ones(5, 4))
    with pytest.raises(ValueError, match=r"\(\.\.\., 2\), not \(5, 3\)"):
        op.adjoint(torch.ones(5, 3))
    with pytest.raises(ValueError, match=r"not \(\)"):
        op(torch.tensor(1.0))


def test_the_repr_shows_the_sizes():
    assert repr(Dense(torch.ones(2, 3))) == "Dense(3 → 2)"
