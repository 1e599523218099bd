"""The checker and `Frozen.load` agree: what the checker accepts can be loaded, and is what it says.

The description of a network is changed, one field at a time, and signed again.
"""

import copy
import json
import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import lipflow
from lipflow.certificate import file as certificate_file
from lipflow.graph.file import describe
from lipflow.operators import ConvOperator, DenseOperator, FourierMultiplier
from lipflow.operators.certified import certified_operator
from lipflow.primitives import (
    KINDS,
    NONLINEARITIES,
    Affine,
    AvgPool,
    Constant,
    Descent,
    Gather,
    GroupSort,
    Householder,
    MaxPool,
    Pointwise,
    Proximal,
    Scale,
    Sum,
    TruncatedExponential,
)
from tests.soundness.forging import certificate, claims_of, rejected, sign
from tests.soundness.graphs import Draw, matrix, points, random_graph, wired

WEIGHTS = certificate_file.WEIGHTS
LAST = (Gather(torch.arange(6), [6]), (1,)), (matrix(torch.eye(3, 6, dtype=torch.float64)), (2,))
Steps = tuple[Any, ...]  # to a value in nested dicts and lists


def _every_kind() -> lipflow.Frozen:
    """A network with every kind of primitive and operator."""
    draw, relu, hardtanh = Draw(torch.Generator().manual_seed(0)), NONLINEARITIES["relu"], NONLINEARITIES["hardtanh"]
    conv = certified_operator(ConvOperator(draw.normal(4, 2, 3, 3), (4, 4), ((1, 0), (1, 1)), "circular"))
    down = certified_operator(ConvOperator(draw.normal(2, 2, 2, 2), (2, 2), 0, groups=2)).certified_adjoint()
    spectrum = torch.complex(draw.normal(2, 2, 2, 4), draw.normal(2, 2, 2, 4))
    dense, skew = certified_operator(DenseOperator(draw.normal(5, 8) / 4)), draw.normal(8, 8)
    skew = certified_operator(DenseOperator(skew - skew.T))
    angle = draw.normal(2)
    one_by_one = certified_operator(ConvOperator(draw.normal(3, 4, 1, 1), (2, 2), 0))
    return wired(
        (2, 4, 4),
        (Affine(conv, draw.normal(4)), (0,)),
        (Householder(angle.sin(), angle.cos()), (1,)),
        (MaxPool((2, 1), (1, 1), (1, 0), (1, 1)), (2,)),
        (AvgPool((2, 2), 2.0), (3,)),
        (Descent(one_by_one, draw.normal(3), hardtanh, 2 / one_by_one.norm**2), (4,)),
        (Pointwise("abs"), (5,)),
        (Affine(certified_operator(FourierMultiplier(spectrum, (2, 2))), None), (6,)),
        (GroupSort(2), (7,)),
        (Gather(torch.arange(8), [8]), (8,)),
        (Proximal(dense, draw.normal(5), relu, 0.5, 1 / (1 + dense.norm**2), 60, True), (9,)),
        (TruncatedExponential(skew, 0.3, 4), (10,)),
        (Scale(draw.normal(8)), (11,)),
        (Constant(draw.normal(8)), ()),
        (Sum([1.0, -0.5]), (12, 13)),
        (Gather(torch.arange(2).reshape(2, 1, 1), [8]), (14,)),
        (Affine(down, None), (15,)),
        (Gather(torch.arange(8), [16]), (16,)),
        (matrix(draw.normal(3, 8)), (17,)),
    )


def _paths(value: Any, path: Steps = ()) -> Iterator[Steps]:
    """The path of every value, dicts and lists too."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from _paths(value[key], (*path, key))


def _fields(description: Any) -> list[Steps]:
    """One path for every field of every kind of primitive and operator, and of the network."""
    known: dict[Any, Steps] = {}
    for path in _paths(description):
        value, kind = description, ""
        for step in path:
            kind = value.get("kind", kind) if isinstance(value, dict) else kind
            value = value[step]
        names = tuple(step for step in path if isinstance(step, str))
        known.setdefault((kind, names[-2:], len(path)), path)
    return list(known.values())


def _others(value: Any) -> list[Any]:
    """Values of other types, other lengths, and out of range."""
    others: list[Any] = [None, True, "x", -1, 0, 1.5, 2**70, math.nan, [], {}]
    if type(value) in (int, float):
        others += [float(value), int(value), -value, str(value)]
    if isinstance(value, list):
        others += [[*value, *value[-1:]], value[:-1], [float(n) if type(n) is int else n for n in value]]
    if isinstance(value, dict):
        others += [{**value, "x": 1}, *({k: v for k, v in value.items() if k != key} for key in value)]
    return others


def _replaced(values: Any, path: Steps, value: Any) -> Any:
    if not path:
        return value
    values = inner = copy.deepcopy(values)
    *way, key = path
    for step in way:
        inner = inner[step]
    inner[key] = value
    return values


class Agreement:
    """A folder with the certificate of a network, whose description can be replaced."""

    def __init__(self, folder: Path, frozen: lipflow.Frozen) -> None:
        self.folder, self.images = folder, points(frozen, 2)
        certificate(folder, frozen, self.images)
        self.claims, self.tensors = claims_of(folder), load_file(folder / WEIGHTS)
        self.description = json.loads(json.dumps(describe(frozen.graph, frozen.domain)[0]))

    def holds(self, description: Any, tensors: dict[str, np.ndarray] | None = None) -> bool:
        """Whether the checker accepts a description; assert that `load` agrees."""
        text = json.dumps(description)
        save_file(tensors or self.tensors, self.folder / WEIGHTS, {"lipflow": text})
        domain = description.get("domain", 0) if isinstance(description, dict) else 0
        sign(self.folder, dict(self.claims, domain=domain))
        reason = rejected(self.folder)
        try:
            loaded = lipflow.Frozen.load(self.folder / WEIGHTS)
        except ValueError:
            if not reason:  # accepted by the checker
                raise
            return False
        again = json.dumps(describe(loaded.graph, loaded.domain)[0], sort_keys=True)
        assert again == json.dumps(description, sort_keys=True), "loaded, and not what is written"
        if not reason:
            self._is_as_claimed(loaded)
        return not reason

    def _is_as_claimed(self, loaded: lipflow.Frozen) -> None:
        """It computes the stored scores, and its constants are at most the claimed ones, up to the slack of its own."""
        with np.load(self.folder / certificate_file.ROWS) as rows:
            off = (loaded(self.images) - torch.from_numpy(rows["logits"])).norm(dim=1)
        assert bool((off <= 2 * loaded.rounding).all())
        columns = "lipschitz", "rounding", "reach"
        found = [loaded.lipschitz, loaded.rounding, *loaded.pair_bounds.flatten().tolist()]
        found += [getattr(row, name) for row in loaded.ledger for name in columns]
        claimed = [self.claims["lipschitz"], self.claims["rounding"]]
        claimed += [bound for bounds in self.claims["pair_bounds"] for bound in bounds]
        claimed += [row[name] for row in self.claims["vertices"] for name in columns]
        for ours, stated in zip(found, claimed, strict=True):
            assert ours <= stated * (1 + 2.0**-30) + 1e-12


def _changed(description: Any, paths: Iterable[Steps]) -> Iterator[Any]:
    """Copies of a description in which one value is replaced, by another one of `_others`."""
    for path in paths:
        value = description
        for step in path:
            value = value[step]
        for other in _others(value):
            if json.dumps(other) != json.dumps(value):
                yield _replaced(description, path, other)


def test_the_checker_and_load_agree(tmp_path):
    frozen = _every_kind()
    assert {v.primitive.kind for v in frozen.graph.vertices} == KINDS.keys()
    agreement = Agreement(tmp_path, frozen)
    assert agreement.holds(agreement.description)
    fields = _fields(agreement.description)
    assert sum(map(agreement.holds, _changed(agreement.description, fields))) >= 2  # other names, another note


def test_both_refuse_what_is_not_used(tmp_path):
    agreement = Agreement(tmp_path, _every_kind())
    description, more = agreement.description, dict(kind="constant", value="t0")
    assert not agreement.holds(dict(description, primitives=[*description["primitives"], more]))
    with pytest.raises(ValueError, match="no vertex uses the primitives"):
        lipflow.Frozen.load(tmp_path / WEIGHTS)
    assert not agreement.holds(description, {**agreement.tensors, "more": np.ones(3)})
    with pytest.raises(ValueError, match="no primitive uses the tensors"):
        lipflow.Frozen.load(tmp_path / WEIGHTS)


def test_sizes_inside_of_a_step_are_limited(tmp_path):
    """The output of its operator is the value of no vertex, so nothing else has this size."""
    op = certified_operator(ConvOperator(torch.ones(1, 1, 2, 2, dtype=torch.float64), (2, 3), 1, "circular"))
    agreement = Agreement(tmp_path, wired((1, 2, 3), (Descent(op, None, NONLINEARITIES["relu"], 0.1), (0,)), *LAST))
    path = "primitives", 1, "op", "geometry", "padding", 0, 0
    assert not agreement.holds(_replaced(agreement.description, path, 2**70))
    with pytest.raises(ValueError, match="the values up to vertex 1 are"):
        lipflow.Frozen.load(tmp_path / WEIGHTS)


@pytest.mark.campaign
def test_the_checker_and_load_agree_on_random_descriptions(tmp_path):
    """Every value of every field of random graphs is replaced once by a random value."""
    tried, accepted = 0, 0
    for seed in range(60):
        agreement, choose = Agreement(tmp_path / str(seed), random_graph(seed)), random.Random(seed)
        assert agreement.holds(agreement.description)
        for path in _paths(agreement.description):
            changed = choose.choice(list(_changed(agreement.description, [path])))
            accepted += agreement.holds(changed)
            tried += 1
    print(f"\n{tried} changed descriptions, of which the checker accepted {accepted}, and load all of these")
