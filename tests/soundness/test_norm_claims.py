"""The checker accepts the norms that lipflow claims, and no claim below the true norm, whatever torus is given.

A torus is a side and a twist for each axis; [0, 0] means that the axis is cut into strips instead.
"""

import dataclasses
import random
from itertools import product

import numpy as np
import pytest
import torch

from lipflow import ConvOperator, DenseOperator, check
from lipflow.operators import norm
from lipflow.operators.certified import certified_operator
from tests.operators.geometry import Geometry, draw_geometry, gaussian, matrix_of, svd_norm
from tests.operators.test_norm import WAYS, take
from tests.soundness.graphs import Draw, fourier

EXACT = [0, 0]


def claim_of(op: ConvOperator) -> tuple[check.Linear, dict]:
    """An operator as the checker reads it, and the claim on its norm."""
    held = certified_operator(op)
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
def test_true_claims_are_accepted(monkeypatch, seed, way):
    take(way, monkeypatch)
    assert accepted(*claim_of(case(seed)[1]))


@pytest.mark.parametrize("seed", range(40))
def test_no_torus_proves_a_claim_below_the_norm(seed):
    geometry, op, value, error = case(seed)
    held, claim = claim_of(op)
    assert accepted(held, claim)
    low = (value - error) * (1 - 1e-12)
    if low <= 0:
        return
    rng = random.Random(seed)
    sides = [EXACT, [0, 1], *([rng.randint(1, 20), rng.randint(0, 1)] for _ in range(4)), [geometry.size[0], 0]]
    for torus in [claim["torus"], *([first, second] for first, second in product(sides, repeat=2))]:
        assert not accepted(held, dict(norm=low, torus=torus)), torus


CANCELLING = {  # kernel, input, dilation: taps that share a pixel of the torus, with opposite signs
    "one channel, dilated": ((1, 1, 3, 3), (4, 4), 2),
    "three groups, dilated": ((3, 1, 3, 3), (4, 4), 2),
    "one channel": ((1, 1, 3, 3), (2, 2), 1),
    "wide": ((4, 1, 5, 5), (2, 2), 1),
}


@pytest.mark.parametrize("name", CANCELLING)
def test_norms_of_the_size_of_rounding_are_accepted(name):
    """The symbol is 0 up to rounding, which differs between the two programs."""
    shape, size, dilation = CANCELLING[name]
    for seed in range(20):
        kernel = gaussian(shape, torch.Generator().manual_seed(seed))
        kernel = kernel - kernel.flip(2, 3)
        op = ConvOperator(kernel, size, "same", "circular", dilation=dilation, groups=shape[0])
        held, claim = claim_of(op)
        assert claim["norm"] < 1e-11
        assert accepted(held, claim), seed


def test_strips_prove_a_norm_that_a_torus_cannot_and_nothing_below_it():
    """A 2×2 blur of 6×6 pixels: on the torus of side 7 the bound is 4, its symbol at the frequency 0."""
    op = ConvOperator(torch.ones(1, 1, 2, 2, dtype=torch.float64), (6, 6), padding=((1, 0), (1, 0)))
    held, claim = claim_of(op)
    value, error = svd_norm(Geometry((6, 6), (2, 2), (1, 1), (0, 0)).matrix(op.kernel))
    assert claim["torus"] == [EXACT, EXACT]
    assert claim["norm"] <= value * (1 + 1e-6)
    assert accepted(held, claim)
    assert not accepted(held, dict(claim, torus=[[7, 0], [7, 0]]))
    assert not accepted(held, dict(claim, norm=(value - error) * (1 - 1e-12)))


@pytest.mark.parametrize(
    ("mode", "torus"),
    [
        *(("zeros", torus) for torus in ([EXACT], [EXACT] * 3, [], [[7, 0], EXACT], [EXACT, [6, 0]], [[0], [0]])),
        *(
            ("zeros", torus)
            for torus in ([[2**29, 0], EXACT], [EXACT, [10, 1.0]], [EXACT, [10, True]], [[0, 0.0], EXACT])
        ),
        *(("circular", torus) for torus in ([EXACT, EXACT], [EXACT, [6, 0]])),  # which cannot be cut into strips
    ],
)
def test_a_torus_that_proves_nothing_is_rejected(mode, torus):
    held, claim = claim_of(ConvOperator(torch.ones(1, 1, 3, 3, dtype=torch.float64), (6, 6), padding_mode=mode))
    assert accepted(held, dict(claim, norm=100.0))
    assert mode == "circular" or accepted(held, dict(norm=100.0, torus=[EXACT, [10, 1]]))
    assert not accepted(held, dict(claim, norm=100.0, torus=torus))


@pytest.mark.parametrize("out", [5, 45])
def test_strips_of_large_convolutions_are_verified(out):
    op = ConvOperator(gaussian((out, 45, 3, 3), torch.Generator().manual_seed(3)), (32, 20))
    held, claim = claim_of(op)
    assert claim["torus"][0] == EXACT
    assert claim["torus"][1] != EXACT
    assert norm.norm_bound(op) <= claim["norm"]
    assert accepted(held, claim)
    assert not accepted(held, dict(claim, norm=claim["norm"] * (1 - 1e-4)))


def _described(kind: str, seed: int) -> tuple[dict, dict, dict, float]:
    """(description, tensors, claim, a number just below the norm) of a random operator, as in a file."""
    draw = Draw(torch.Generator().manual_seed(seed))
    op = {
        "matrix": lambda: certified_operator(DenseOperator(draw.normal(4, 3))),
        "convolution": lambda: certified_operator(ConvOperator(draw.normal(2, 3, 3, 2), (4, 5), stride=2)),
        "fourier": lambda: fourier(draw, (3, 4, 5)),
    }[kind]()
    if kind == "fourier":
        tensors = dict(real=op.real.numpy(), imaginary=op.imaginary.numpy())
        norm = float(torch.linalg.matrix_norm(op.op.weight, 2).max())
    else:
        tensors = dict(weight=op.weight.numpy())
        norm = float(torch.linalg.matrix_norm(matrix_of(op), 2))
    described = dict(kind=kind, geometry=op.geometry, adjoint=False, **{name: name for name in tensors})
    return described, tensors, op.proof, norm * (1 - 1e-12)


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("kind", ["matrix", "convolution", "fourier"])
def test_an_operator_verifies_its_claimed_norm(kind, adjoint):
    for seed in range(10):
        described, tensors, claim, low = _described(kind, seed)
        described |= dict(adjoint=adjoint)
        op = check.operator_of(described, tensors, claim, "it")
        op.verify(claim, "it")
        assert op.norm == claim["norm"] > low
        for lie in (low, 0.0, -claim["norm"]):
            lying = dict(claim, norm=lie)
            with pytest.raises(check.Rejected):
                check.operator_of(described, tensors, lying, "it").verify(lying, "it")
        with pytest.raises(check.Rejected, match="unknown kind"):
            check.operator_of(dict(described, kind="identity"), tensors, claim, "it")


@pytest.mark.parametrize("kind", ["matrix", "convolution", "fourier"])
def test_integer_weights_are_rejected(kind):
    """In int32, |-2³¹| = -2³¹, and any claimed norm was once accepted."""
    described, tensors, claim, _ = _described(kind, 0)
    lowest = {name: np.full(t.shape, -(2**31), np.int32) for name, t in tensors.items()}
    with pytest.raises(check.Rejected, match="wrong dtype"):
        check.operator_of(described, lowest, dict(claim, norm=1e300), "it")
