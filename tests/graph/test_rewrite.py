"""`rewrite`: joined vertices have a tight bound, and rewrites that would change the map are not made.

`lower` compares every rewritten graph with its function on random images.
"""

import math

import pytest
import torch
from torch.nn import functional as F

import lipflow
from lipflow import lipschitz_bound
from lipflow.graph import lower
from tests.graph.test_rules import constant, kinds
from tests.operators.geometry import affine_matrix
from tests.soundness.graphs import Calls

SHAPE = (4, 5, 6)


def kinds_of(function) -> list[str]:
    return kinds(lower(Calls(function), SHAPE))[1:]


def exact_norm(function) -> float:
    """The norm of the matrix of an affine function, by SVD."""
    return float(torch.linalg.matrix_norm(affine_matrix(function, SHAPE), 2))


def bound(function) -> float:
    return lipschitz_bound(Calls(function), SHAPE).lipschitz


def assert_tight(function, slack: float = 1e-6) -> None:
    exact = exact_norm(function)
    assert exact * (1 - 1e-12) <= bound(function) <= exact * (1 + slack)


# Padding

KERNEL = constant(3, 4, 3, 3) / 8


def circular(x, *sides):
    return F.pad(x, sides, mode="circular")


def framed(x):
    out = x.new_zeros(len(x), 4, 7, 8)
    out[:, :, 1:-1, 1:-1] = x
    return out


PADDED = {
    "zeros before": lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1)), KERNEL),
    "zeros, uneven": lambda x: F.conv2d(F.pad(x, (0, 2, 1, 0)), KERNEL, stride=2),
    "circular": lambda x: F.conv2d(circular(x, 1, 1, 1, 1), KERNEL),
    "circular after a mirror image": lambda x: F.conv2d(circular(x.flip(3), 1, 1, 1, 1), KERNEL),
    "circular, loose": lambda x: F.conv2d(circular(x, 1, 0, 2, 1), constant(3, 4, 4, 2)),
    "circular, loose, strided": lambda x: F.conv2d(circular(x, 1, 1, 1, 1), constant(3, 4, 2, 2), stride=2),
    "written into zeros": lambda x: F.conv2d(framed(x), KERNEL),
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_joins_the_convolution_after_it(name):
    op = lower(Calls(PADDED[name]), SHAPE).output.primitive.op
    assert op.in_shape == SHAPE
    assert op.padding_mode == ("circular" if "circular" in name else "zeros")
    # Circular padding that makes outputs coincide costs at most √2 for each axis.
    assert_tight(PADDED[name], 1 if "loose" in name else 1e-6)


# Scales, shifts and matrices beside a matrix or a convolution

SCALE, SHIFT = constant(3, 1, 1), constant(3, 1, 1) + 1
INTO = constant(4, 1, 1) + 2
STATISTICS = constant(3), constant(3).square(), constant(3), constant(3)
TURNED = constant(4, 3, 3, 3)
WIDE, NARROW = constant(9, 120), constant(4, 9)

JOINED = {
    "scale and shift after": lambda x: SCALE * F.conv2d(x, KERNEL, padding=1) + SHIFT,
    "batch norm after": lambda x: F.batch_norm(F.conv2d(x, KERNEL, padding=1), *STATISTICS),
    "scale before": lambda x: F.conv2d(INTO * x, KERNEL, padding=1),
    "scale before, groups": lambda x: F.conv2d(INTO * x, constant(6, 2, 3, 3), padding=1, groups=2),
    "scale after a transposed convolution": lambda x: SCALE * F.conv_transpose2d(x, TURNED, padding=1),
    "scale before a transposed convolution": lambda x: F.conv_transpose2d(INTO * x, TURNED, padding=1),
    "scale and shift before, no border": lambda x: F.conv2d(INTO * x + INTO, KERNEL),
    "scale before a matrix": lambda x: F.linear(constant(120) * x.flatten(1), constant(3, 120)),
    "a number": lambda x: 3 * F.conv2d(x, KERNEL, padding=1) - 1,
    "a matrix after a matrix": lambda x: F.linear(F.linear(x.flatten(1), WIDE, constant(9)), NARROW),
    "x + Wx": lambda x: x + F.conv2d(x, constant(4, 4, 3, 3) / 9, padding=1),
    "x - Wx, groups": lambda x: x - 0.5 * F.conv2d(x, constant(4, 2, 3, 5) / 9, padding=(1, 2), groups=2),
    "x + Wx, matrix": lambda x: x.flatten(1) + F.linear(x.flatten(1), constant(120, 120) / 20, constant(120)),
}


@pytest.mark.parametrize("name", JOINED)
def test_scales_shifts_and_matrices_join_to_one_operator(name):
    found = kinds_of(JOINED[name])
    assert found.count("affine") == 1
    assert not {"scale", "sum"} & {*found}
    assert_tight(JOINED[name])


SECOND, UP, DOWN, SQUARE = constant(2, 3, 3, 3), constant(120, 2), constant(2, 120), constant(4, 4, 3, 3)

NOT_JOINED = {
    "reflect": (lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), KERNEL), "gather affine"),
    "replicate": (lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), KERNEL), "gather affine"),
    "a border sees a shift": (lambda x: F.conv2d(INTO * x + INTO, KERNEL, padding=1), "constant scale sum affine"),
    "two padded": (lambda x: F.conv2d(F.conv2d(x, KERNEL, padding=1), SECOND, padding=1), "affine affine"),
    "a larger product": (lambda x: F.linear(F.linear(x.flatten(1), DOWN), UP), "gather affine affine"),
    "no middle tap": (lambda x: x + F.conv2d(F.pad(x, (0, 2, 0, 2)), SQUARE), "affine sum"),
}


@pytest.mark.parametrize("name", NOT_JOINED)
def test_rewrites_that_would_change_or_loosen_the_map_are_not_made(name):
    function, expected = NOT_JOINED[name]
    assert kinds_of(function) == expected.split()
    assert exact_norm(function) <= bound(function) * (1 + 1e-12)


def test_averages_times_a_number_are_averages():
    assert kinds_of(lambda x: 2 * F.avg_pool2d(x, 2)) == ["avg_pool"]
    assert bound(lambda x: 2 * F.avg_pool2d(x, 2)) == bound(lambda x: 3 * F.avg_pool2d(x, 3)) == 1


# MaxMin


def both(first, second):
    return torch.maximum(first, second), torch.minimum(first, second)


MAXMIN = {
    "cat": lambda x: torch.cat(both(x[:, :2], x[:, 2:]), 1),
    "stack": lambda x: torch.stack(both(x[:, :2], x[:, 2:]), 2).flatten(1, 2),
    "neighbours": lambda x: torch.cat(both(x[:, ::2], x[:, 1::2]), 1),
    "sort": lambda x: x.unflatten(1, (2, 2)).sort(1).values.flatten(1, 2),
    "sort of the last": lambda x: x.permute(0, 2, 3, 1).unflatten(3, (2, 2)).sort(-1).values,
}


@pytest.mark.parametrize("name", MAXMIN)
def test_maximum_and_minimum_side_by_side_are_one_group_sort(name):
    assert bound(MAXMIN[name]) == 1
    assert kinds_of(MAXMIN[name]).count("group_sort") == 1


def test_the_maximum_of_dependent_values_is_not_1_lipschitz():
    assert bound(lambda x: torch.maximum(x, 2 * x)) >= 2
    assert bound(lambda x: torch.cat(both(x, x.flip(1)), 1)) >= math.sqrt(2)


# A step down a convex potential

W, B, T = constant(7, 120) / 20, constant(7), constant(7).abs() + 0.1
K, C, TK = constant(6, 4, 3, 3) / 9, constant(6), constant(6, 1, 1).abs() + 0.1


def dense(back, sigma=torch.relu):
    """x ↦ x - back(σ(Wx + b))."""
    return lambda x: x.flatten(1) - back(sigma(F.linear(x.flatten(1), W, B)))


def images(back, sigma=torch.relu):
    """x ↦ x - back(σ(K*x + c))."""
    return lambda x: x - back(sigma(F.conv2d(x, K, C, padding=1)))


def adjoint(r):
    return F.conv_transpose2d(r, K, padding=1)


DESCENTS = {
    "matrix": dense(lambda r: 0.3 * F.linear(r, W.T)),
    "matrix, matmul": dense(lambda r: (r * 0.3) @ W),
    "matrix, by unit": dense(lambda r: 0.3 * ((r * T) @ W)),
    "matrix, divided by unit": dense(lambda r: 2 * F.linear(r / T, W.T)),
    "factor in the weight": dense(lambda r: F.linear(r, 0.3 * W.T)),
    "bias after": dense(lambda r: F.linear(r, 0.3 * W.T, constant(120))),
    "convolution": images(lambda r: 0.3 * adjoint(r)),
    "convolution, by unit": images(lambda r: adjoint(TK * r)),
    "convolution, turned": images(lambda r: 0.3 * F.conv2d(r, K.transpose(0, 1).flip(2, 3), padding=1)),
    "padded before": lambda x: x - 0.3 * adjoint(torch.relu(F.conv2d(F.pad(x, (1, 1, 1, 1)), K, C))),
    "hardtanh": images(lambda r: 0.3 * adjoint(r), F.hardtanh),
    "the other way round": lambda x: -0.3 * adjoint(torch.relu(F.conv2d(x, K, C, padding=1))) + x,
}


@pytest.mark.parametrize("name", DESCENTS)
def test_a_step_down_a_convex_potential_is_a_descent(name):
    found = {*kinds_of(DESCENTS[name])}
    assert "descent" in found
    assert not {"affine", "pointwise"} & found


NO_DESCENTS = {
    "upwards": dense(lambda r: -0.3 * F.linear(r, W.T)),
    "another matrix": dense(lambda r: 0.3 * F.linear(r, W.T + 0.01)),
    "a unit upwards": dense(lambda r: 0.3 * ((r * (T - 0.5)) @ W)),
    "abs": dense(lambda r: 0.3 * F.linear(r, W.T), torch.abs),
    "hardtanh by unit": dense(lambda r: 0.3 * ((r * T) @ W), F.hardtanh),
    "of another input": lambda x: x.flatten(1) - 0.3 * F.linear(torch.relu(F.linear(x.flip(1).flatten(1), W, B)), W.T),
    "twice x": lambda x: 2 * x.flatten(1) - 0.3 * F.linear(torch.relu(F.linear(x.flatten(1), W, B)), W.T),
    "other padding": images(lambda r: 0.3 * adjoint(F.pad(r[:, :, 1:], (0, 0, 0, 1)))),
    "other dilation": images(lambda r: 0.3 * F.conv_transpose2d(r, K, padding=2, dilation=2)),
    "turned, other padding": images(lambda r: 0.3 * F.conv2d(F.pad(r, (2, 0, 1, 1)), K.transpose(0, 1).flip(2, 3))),
}


@pytest.mark.parametrize("name", NO_DESCENTS)
def test_other_residual_steps_are_no_descent(name):
    assert "descent" not in kinds_of(NO_DESCENTS[name])


def test_a_recognised_step_of_two_over_the_norm_does_not_expand():
    h = 2 / float(torch.linalg.matrix_norm(W, 2)) ** 2
    function = dense(lambda r: h * F.linear(r, W.T))
    assert 1 <= bound(function) <= 1 + 1e-8
    assert lipflow.freeze(Calls(function), in_shape=SHAPE).lipschitz <= 1 + 1e-8
