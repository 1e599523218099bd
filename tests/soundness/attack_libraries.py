"""Attack libraries, if they are installed, and an exact test of what they return."""

import importlib
import os
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import lipflow


def library(name: str) -> Any:
    """Import a library, or skip the test; with LIPFLOW_CLIENTS=1, as in `make test`, raise instead."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if os.environ.get("LIPFLOW_CLIENTS") == "1":
            raise
        pytest.skip(f"{name} is not installed ({error}): `make venv` installs the attack libraries")


def exact_square(x: Tensor, z: Tensor) -> Fraction:
    """‖z - x‖² in rationals."""
    pairs = zip(x.flatten().tolist(), z.flatten().tolist(), strict=True)
    return sum(((Fraction(a) - Fraction(b)) ** 2 for a, b in pairs), Fraction(0))


def broken_inside(frozen: lipflow.Frozen, x: Tensor, found: Tensor, label: Tensor, radius: Tensor) -> tuple[int, int]:
    """How many images have another label for the frozen network, and how many of these lie within their radius."""
    assert bool(((found >= 0) & (found <= 1)).all()), "an attack left [0, 1]"
    other = torch.cat([frozen(one[None]).argmax(1) for one in found.detach()])
    flipped = (other != label).nonzero().flatten().tolist()
    inside = [i for i in flipped if exact_square(x[i], found[i]) < Fraction(float(radius[i])) ** 2]
    return len(flipped), len(inside)
