"""Rewrites: the graph computes the same, is better known, and a rewrite that would change the map is not made."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lipflow
from lipflow import lipschitz_bound
from lipflow.graph import lower
from tests.graph.test_rules import Calls, constant

SHAPE = (4, 5, 6)


def kinds(function, shape=SHAPE) -> list[str]:
    return [v.primitive.kind for v in lower(Calls(function), shape).vertices[1:]]


def exact_norm(function, shape=SHAPE) -> float:
    """The norm of the matrix of an affine function, by SVD."""
    entries = math.prod(shape)
    basis = torch.eye(entries, dtype=torch.float64).reshape(entries, *shape)
    images = function(basis) - function(torch.zeros(1, *shape, dtype=torch.float64))
    return float(torch.linalg.matrix_norm(images.flatten(1), 2))


def bound(function, shape=SHAPE) -> float:
    return lipschitz_bound(Calls(function), shape).lipschitz


def is_tight(function, shape=SHAPE) -> bool:
    exact, found = exact_norm(function, shape), bound(function, shape)
    assert exact <= found * (1 + 1e-12)
    return found <= exact * (1 + 1e-6)


# Padding

KERNEL = constant(3, 4, 3, 3) / 8

PADDED = {
    "zeros before": lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1)), KERNEL),
    "zeros, uneven": lambda x: F.conv2d(F.pad(x, (0, 2, 1, 0)), KERNEL, stride=2),
    "circular": lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), KERNEL),
    "circular after a mirror image": lambda x: F.conv2d(F.pad(x.flip(3), (1, 1, 1, 1), mode="circular"), KERNEL),
    "written into zeros": lambda x: F.conv2d(_framed(x), KERNEL),
}


def _framed(x):
    out = x.new_zeros(len(x), 4, 7, 8)
    out[:, :, 1:-1, 1:-1] = x
    return out


@pytest.mark.parametrize("name", PADDED)
def test_padding_before_a_convolution_is_part_of_it(name):
    graph = lower(Calls(PADDED[name]), SHAPE)
    op = graph.output.primitive.op
    assert op.in_shape == SHAPE
    assert op.padding_mode == ("circular" if "circular" in name else "zeros")
    assert is_tight(PADDED[name])


# Scales and shifts beside a matrix or a convolution

SCALE, SHIFT = constant(3, 1, 1), constant(3, 1, 1) + 1
INTO = constant(4, 1, 1) + 2

JOINED = {
    "scale and shift after": lambda x: SCALE * F.conv2d(x, KERNEL, padding=1) + SHIFT,
    "batch norm after": lambda x: F.batch_norm(
        F.conv2d(x, KERNEL, padding=1), constant(3), constant(3).square(), constant(3), constant(3)
    ),
    "scale before": lambda x: F.conv2d(INTO * x, KERNEL, padding=1),
    "scale before, groups": lambda x: F.conv2d(INTO * x, constant(6, 2, 3, 3), padding=1, groups=2),
    "scale after a transposed convolution": lambda x: SCALE * F.conv_transpose2d(x, constant(4, 3, 3, 3), padding=1),
    "scale before a transposed convolution": lambda x: F.conv_transpose2d(INTO * x, constant(4, 3, 3, 3), padding=1),
    "scale and shift before, no border": lambda x: F.conv2d(INTO * x + INTO, KERNEL),
    "scale before a matrix": lambda x: F.linear(constant(120) * x.flatten(1), constant(3, 120)),
    "a number": lambda x: 3 * F.conv2d(x, KERNEL, padding=1) - 1,
    "a matrix after a matrix": lambda x: F.linear(
        F.linear(x.flatten(1), constant(9, 120), constant(9)), constant(4, 9)
    ),
    "x + Wx": lambda x: x + F.conv2d(x, constant(4, 4, 3, 3) / 9, padding=1),
    "x - Wx, groups": lambda x: x - 0.5 * F.conv2d(x, constant(4, 2, 3, 5) / 9, padding=(1, 2), groups=2),
    "x + Wx, matrix": lambda x: x.flatten(1) + F.linear(x.flatten(1), constant(120, 120) / 20, constant(120)),
}


@pytest.mark.parametrize("name", JOINED)
def test_scales_shifts_and_matrices_join_to_one_operator(name):
    assert kinds(JOINED[name]).count("affine") == 1
    assert not {"scale", "sum"} & {*kinds(JOINED[name])}
    assert is_tight(JOINED[name])


NOT_JOINED = {
    "reflecting padding": (lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), KERNEL), ["gather", "affine"]),
    "a shift that a padded border sees": (
        lambda x: F.conv2d(INTO * x + INTO, KERNEL, padding=1),
        ["constant", "scale", "sum", "affine"],
    ),
    "two padded convolutions": (
        lambda x: F.conv2d(F.conv2d(x, KERNEL, padding=1), constant(2, 3, 3, 3), padding=1),
        ["affine", "affine"],
    ),
    "a product larger than its factors": (
        lambda x: F.linear(F.linear(x.flatten(1), constant(2, 120)), constant(120, 2)),
        ["gather", "affine", "affine"],
    ),
    "the identity and the middle of a window that is not symmetric": (
        lambda x: x + F.conv2d(F.pad(x, (0, 2, 0, 2)), constant(4, 4, 3, 3)),
        ["affine", "sum"],
    ),
}


@pytest.mark.parametrize("name", NOT_JOINED)
def test_rewrites_that_would_change_the_map_or_loosen_it_are_not_made(name):
    function, expected = NOT_JOINED[name]
    assert kinds(function) == expected
    assert exact_norm(function) <= bound(function) * (1 + 1e-12)


def test_averages_times_a_number_are_averages():
    assert kinds(lambda x: 2 * F.avg_pool2d(x, 2)) == ["avg_pool"]
    assert bound(lambda x: 2 * F.avg_pool2d(x, 2)) == bound(lambda x: 3 * F.avg_pool2d(x, 3)) == 1


# MaxMin in anybody's code


def _halves(x):
    return x[:, :2], x[:, 2:]


MAXMIN = {
    "cat": lambda x: torch.cat([torch.maximum(*_halves(x)), torch.minimum(*_halves(x))], 1),
    "stack": lambda x: torch.stack([torch.maximum(*_halves(x)), torch.minimum(*_halves(x))], 2).flatten(1, 2),
    "neighbours": lambda x: torch.cat([torch.maximum(x[:, ::2], x[:, 1::2]), torch.minimum(x[:, ::2], x[:, 1::2])], 1),
    "sort": lambda x: x.unflatten(1, (2, 2)).sort(1).values.flatten(1, 2),
    "sort of the last": lambda x: x.permute(0, 2, 3, 1).unflatten(3, (2, 2)).sort(-1).values,
}


@pytest.mark.parametrize("name", MAXMIN)
def test_maximum_and_minimum_side_by_side_stretch_by_1(name):
    assert bound(MAXMIN[name]) == 1
    assert kinds(MAXMIN[name]).count("group_sort") == 1


def test_the_maximum_of_dependent_values_is_not_taken_for_one():
    assert bound(lambda x: torch.maximum(x, 2 * x)) >= 2
    assert bound(lambda x: torch.cat([torch.maximum(x, x.flip(1)), torch.minimum(x, x.flip(1))], 1)) >= math.sqrt(2)


# A step down a convex potential, in anybody's code

W, B = constant(7, 120) / 20, constant(7)
K, C = constant(6, 4, 3, 3) / 9, constant(6)
T = constant(7).abs() + 0.1
TK = constant(6, 1, 1).abs() + 0.1


def _dense(x, step):
    y = x.flatten(1)
    return y - step(torch.relu(F.linear(y, W, B)))


DESCENTS = {
    "matrix": lambda x: _dense(x, lambda r: 0.3 * F.linear(r, W.T)),
    "matrix, matmul": lambda x: _dense(x, lambda r: (r * 0.3) @ W),
    "matrix, by unit": lambda x: _dense(x, lambda r: 0.3 * ((r * T) @ W)),
    "matrix, divided by unit": lambda x: _dense(x, lambda r: 2 * F.linear(r / T, W.T)),
    "factor in the weight": lambda x: _dense(x, lambda r: F.linear(r, 0.3 * W.T)),
    "bias after": lambda x: _dense(x, lambda r: F.linear(r, 0.3 * W.T, constant(120))),
    "convolution": lambda x: x - 0.3 * F.conv_transpose2d(torch.relu(F.conv2d(x, K, C, padding=1)), K, padding=1),
    "convolution, by unit": lambda x: (
        x - F.conv_transpose2d(TK * torch.relu(F.conv2d(x, K, C, padding=1)), K, padding=1)
    ),
    "convolution, turned": lambda x: (
        x - 0.3 * F.conv2d(torch.relu(F.conv2d(x, K, C, padding=1)), K.transpose(0, 1).flip(2, 3), padding=1)
    ),
    "convolution, padded before": lambda x: (
        x - 0.3 * F.conv_transpose2d(torch.relu(F.conv2d(F.pad(x, (1, 1, 1, 1)), K, C)), K, padding=1)
    ),
    "hardtanh": lambda x: x - 0.3 * F.conv_transpose2d(F.hardtanh(F.conv2d(x, K, C, padding=1)), K, padding=1),
    "the other way round": lambda x: (
        -0.3 * F.conv_transpose2d(torch.relu(F.conv2d(x, K, C, padding=1)), K, padding=1) + x
    ),
}


@pytest.mark.parametrize("name", DESCENTS)
def test_a_step_down_a_convex_potential_is_recognised(name):
    function = DESCENTS[name]
    assert "descent" in kinds(function)
    assert not {"affine", "pointwise"} & {*kinds(function)}
    x = torch.randn(3, *SHAPE, dtype=torch.float64)
    torch.testing.assert_close(lower(Calls(function), SHAPE).run(x), function(x), rtol=1e-11, atol=1e-11)


NO_DESCENTS = {
    "upwards": lambda x: _dense(x, lambda r: -0.3 * F.linear(r, W.T)),
    "another matrix": lambda x: _dense(x, lambda r: 0.3 * F.linear(r, W.T + 0.01)),
    "a unit upwards": lambda x: _dense(x, lambda r: 0.3 * ((r * (T - 0.5)) @ W)),
    "abs": lambda x: x.flatten(1) - 0.3 * F.linear(F.linear(x.flatten(1), W, B).abs(), W.T),
    "hardtanh by unit": lambda x: x.flatten(1) - 0.3 * ((F.hardtanh(F.linear(x.flatten(1), W, B)) * T) @ W),
    "of another input": lambda x: x.flatten(1) - 0.3 * F.linear(torch.relu(F.linear(x.flip(1).flatten(1), W, B)), W.T),
    "twice x": lambda x: 2 * x.flatten(1) - 0.3 * F.linear(torch.relu(F.linear(x.flatten(1), W, B)), W.T),
    "other padding": lambda x: (
        x
        - 0.3
        * F.conv_transpose2d(F.pad(torch.relu(F.conv2d(x, K, C, padding=1))[:, :, 1:], (0, 0, 0, 1)), K, padding=1)
    ),
}


@pytest.mark.parametrize("name", NO_DESCENTS)
def test_what_is_no_descent_is_not_taken_for_one(name):
    assert "descent" not in kinds(NO_DESCENTS[name])


def test_a_recognised_step_of_two_over_the_norm_does_not_stretch():
    norm = float(torch.linalg.matrix_norm(W, 2))

    def function(x):
        return _dense(x, lambda r: 2 / norm**2 * F.linear(r, W.T))

    assert 1 <= bound(function) <= 1 + 1e-8
    frozen = lipflow.freeze(nn.Sequential(Calls(function)), in_shape=SHAPE)
    assert frozen.lipschitz <= 1 + 1e-8
