"""A convolution by columns is the convolution: exactly, on small integers."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from lipflow.operators import columns as module
from lipflow.operators.columns import Columns, convolve, matrix_of
from tests.operators.test_conv import LAWS, geometries, integers


@LAWS
@given(geometries(), st.integers(0, 4), st.sampled_from([1, 2000, 2**21]), st.integers(0, 10**6))
def test_columns_give_the_convolution_its_adjoint_and_its_gradient(geometry, batch, cache, seed):
    assume(geometry.mode == "zeros")
    kernel = integers(*geometry.kernel_shape, seed=seed).requires_grad_()
    op = geometry.conv(kernel)
    x, y = integers(batch, *op.in_shape, seed=seed + 1), integers(batch, *op.out_shape, seed=seed + 2)
    narrow, wide = (y, x) if (columns := Columns(geometry.conv(kernel.detach()))).out_is_narrow else (x, y)
    to_wide, to_narrow, total = torch.empty_like(wide), torch.empty_like(narrow), columns.gradient()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CACHE_BYTES", cache)
        for part in columns.chunks(batch):
            unfolded = columns.unfold(narrow[part])
            columns.widen(unfolded, to_wide[part], onto=wide[part])
            columns.add_gradient(total, unfolded, wide[part])
            to_narrow[part] = columns.narrow(wide[part])
    forward, backward = op(x).detach(), op.adjoint(y).detach()
    expected_narrow, expected_wide = (forward, backward) if columns.out_is_narrow else (backward, forward)
    assert torch.equal(to_narrow, expected_narrow)
    assert torch.equal(to_wide, wide + expected_wide)
    (expected,) = torch.autograd.grad((op(x) * y).sum(), kernel)
    assert torch.equal(columns.weight_of(total), expected)


@LAWS
@given(geometries(), st.integers(0, 5), st.sampled_from([1, 2000, 2**21]), st.booleans(), st.integers(0, 99))
def test_run_is_the_convolution_and_its_adjoint(geometry, batch, cache, many, seed):
    """Image by image, and many as one."""
    op = geometry.conv(integers(*geometry.kernel_shape, seed=seed))
    x, y = integers(batch, *op.in_shape, seed=seed + 1), integers(batch, *op.out_shape, seed=seed + 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CACHE_BYTES", cache)
        patch.setattr(module, "MANY_BYTES", cache)
        patch.setattr(Columns, "many_channels", many)
        for matrix in (None, matrix_of(op)):
            assert torch.equal(convolve(op, x, matrix=matrix), op(x))
            assert torch.equal(convolve(op, y, forward=False, matrix=matrix), op.adjoint(y))
    if geometry.mode == "circular":
        with pytest.raises(ValueError, match="only zero-padded"):
            Columns(op)
