"""What the checker accepts as the proof of a norm: every honest claim, and no claim below the norm, whatever the hint.

A hint is the torus of a convolution: a side and a twist for each axis, or [0, 0] where the axis is taken as it is.
"""

import dataclasses
import random
from itertools import product

import numpy as np
import pytest
import torch

from lipflow import ConvOperator, DenseOperator, check
from lipflow.operators import norm
from lipflow.operators.certified import certify
from tests.operators.geometry import Geometry, draw_geometry, gaussian, svd_norm
from tests.operators.test_norm import WAYS, take
from tests.soundness.graphs import Draw, fourier

EXACT = [0, 0]


def claim_of(op: ConvOperator) -> tuple[check.Linear, dict]:
    """An operator as the checker holds it, and what its certificate says of its norm."""
    held = certify(op)
    return check.Linear(held.weight.numpy(), held.geometry), held.proof


def accepted(held: check.Linear, claim: dict) -> bool:
    try:
        check.verify_norm(held, claim, "a convolution")
    except (check.Rejected, ValueError, TypeError):
        return False
    return True


def case(seed: int) -> tuple[Geometry, ConvOperator, float, float]:
    geometry = draw_geometry(random.Random(seed).randint)
    geometry = dataclasses.replace(geometry, mode="circular" if seed % 5 == 0 else "zeros")
    kernel = gaussian(geometry.kernel_shape, torch.Generator().manual_seed(seed))
    return geometry, geometry.conv(kernel), *svd_norm(geometry.matrix(kernel))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(40))
def test_an_honest_claim_is_accepted(monkeypatch, seed, way):
    take(way, monkeypatch)
    assert accepted(*claim_of(case(seed)[1]))


@pytest.mark.parametrize("seed", range(40))
def test_no_hint_proves_a_norm_that_is_too_low(seed):
    geometry, op, value, error = case(seed)
    held, claim = claim_of(op)
    assert accepted(held, claim)
    low = (value - error) * (1 - 1e-12)
    if low <= 0:
        return
    rng = random.Random(seed)
    sides = [EXACT, [0, 1], *([rng.randint(1, 20), rng.randint(0, 1)] for _ in range(4)), [geometry.size[0], 0]]
    for hint in [claim["torus"], *([first, second] for first, second in product(sides, repeat=2))]:
        assert not accepted(held, dict(norm=low, torus=hint)), hint


CANCELLING = {  # kernel, input, dilation: taps that meet on one pixel of the torus, with opposite signs
    "one channel, dilated": ((1, 1, 3, 3), (4, 4), 2),
    "three groups, dilated": ((3, 1, 3, 3), (4, 4), 2),
    "one channel": ((1, 1, 3, 3), (2, 2), 1),
    "wide": ((4, 1, 5, 5), (2, 2), 1),
}


@pytest.mark.parametrize("name", CANCELLING)
def test_a_norm_of_nothing_but_rounding_is_accepted(name):
    """Two programs compute a symbol that is 0 or nearly, each with its own rounding: all of what they compare."""
    shape, size, dilation = CANCELLING[name]
    for seed in range(20):
        kernel = gaussian(shape, torch.Generator().manual_seed(seed))
        kernel = kernel - kernel.flip(2, 3)
        op = ConvOperator(kernel, size, "same", "circular", dilation=dilation, groups=shape[0])
        held, claim = claim_of(op)
        assert claim["norm"] < 1e-11
        assert accepted(held, claim), seed


def test_strips_prove_what_a_torus_cannot_and_nothing_below_the_norm():
    """A 2×2 blur of 6×6 pixels: the plain torus of side 7 says 4, its value at the frequency 0."""
    op = ConvOperator(torch.ones(1, 1, 2, 2, dtype=torch.float64), (6, 6), padding=((1, 0), (1, 0)))
    held, claim = claim_of(op)
    value, error = svd_norm(Geometry((6, 6), (2, 2), (1, 1), (0, 0)).matrix(op.kernel))
    assert claim["torus"] == [EXACT, EXACT]
    assert claim["norm"] <= value * (1 + 1e-6)
    assert accepted(held, claim)
    assert not accepted(held, dict(claim, torus=[[7, 0], [7, 0]]))
    assert not accepted(held, dict(claim, norm=(value - error) * (1 - 1e-12)))


@pytest.mark.parametrize("hint", [[EXACT], [EXACT, EXACT, EXACT], [], [[7, 0], EXACT], [EXACT, [6, 0]], [[0], [0]]])
def test_a_hint_that_is_no_proof_is_rejected(hint):
    held, claim = claim_of(ConvOperator(torch.ones(1, 1, 3, 3, dtype=torch.float64), (6, 6)))
    assert not accepted(held, dict(claim, norm=100.0, torus=hint))


def test_circular_padding_cannot_be_cut_into_strips():
    op = ConvOperator(torch.ones(1, 1, 3, 3, dtype=torch.float64), (6, 6), padding_mode="circular")
    held, claim = claim_of(op)
    assert accepted(held, claim)
    assert not accepted(held, dict(claim, norm=100.0, torus=[EXACT, EXACT]))
    assert not accepted(held, dict(claim, norm=100.0, torus=[EXACT, claim["torus"][1]]))


@pytest.mark.parametrize("out", [5, 45])
def test_the_strips_of_a_large_convolution_are_verified(out):
    op = ConvOperator(gaussian((out, 45, 3, 3), torch.Generator().manual_seed(3)), (32, 20))
    held, claim = claim_of(op)
    assert claim["torus"][0] == EXACT
    assert claim["torus"][1] != EXACT
    assert norm.norm_bound(op) <= claim["norm"]
    assert accepted(held, claim)
    assert not accepted(held, dict(claim, norm=claim["norm"] * (1 - 1e-4)))


# Operators as a file describes them


def _described(kind: str, seed: int) -> tuple[dict, dict, dict, float]:
    """(description, tensors, claim, a number just below the norm) of a random operator of a kind."""
    draw = Draw(torch.Generator().manual_seed(seed))
    op = {
        "matrix": lambda: certify(DenseOperator(draw.normal(4, 3))),
        "convolution": lambda: certify(ConvOperator(draw.normal(2, 3, 3, 2), (4, 5), stride=2)),
        "fourier": lambda: fourier(draw, (3, 4, 5)),
    }[kind]()
    if kind == "fourier":
        tensors = dict(real=op.real.numpy(), imaginary=op.imaginary.numpy())
        norm = float(torch.linalg.matrix_norm(op.op.matrices, 2).max())
    else:
        tensors = dict(weight=op.weight.numpy())
        basis = torch.eye(int(torch.Size(op.in_shape).numel()), dtype=torch.float64).unflatten(1, op.in_shape)
        norm = float(torch.linalg.matrix_norm(op(basis).flatten(1), 2))
    described = dict(kind=kind, geometry=op.geometry, adjoint=False, **{name: name for name in tensors})
    return described, tensors, op.proof, norm * (1 - 1e-12)


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("kind", ["matrix", "convolution", "fourier"])
def test_operators_of_a_file_have_the_norms_that_are_claimed(kind, adjoint):
    for seed in range(10):
        described, tensors, claim, low = _described(kind, seed)
        described |= dict(adjoint=adjoint)
        op = check.operator_of(described, tensors, claim, "it")
        assert op.norm == claim["norm"] > low
        for lie in (low, 0.0, -claim["norm"]):
            with pytest.raises(check.Rejected):
                check.operator_of(described, tensors, dict(claim, norm=lie), "it")
        with pytest.raises(check.Rejected, match="no known kind"):
            check.operator_of(dict(described, kind="identity"), tensors, claim, "it")


@pytest.mark.parametrize("kind", ["matrix", "convolution", "fourier"])
def test_weights_of_a_file_are_floats(kind):
    """Of 32-bit integers -2³¹ is its own absolute value, and a matrix of them once had any norm that was claimed."""
    described, tensors, claim, _ = _described(kind, 0)
    lowest = {name: np.full(t.shape, -(2**31), np.int32) for name, t in tensors.items()}
    with pytest.raises(check.Rejected, match="another type"):
        check.operator_of(described, lowest, dict(claim, norm=1e300), "it")
