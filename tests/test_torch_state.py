"""Functions that a certificate rests on run as they are written, whatever the compiler and the default device."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import lipflow
from lipflow.certificate import from_logits


class Case(NamedTuple):
    """A network, the same frozen, and as a module; its file; images and their certificates."""

    live: nn.Module
    frozen: lipflow.Frozen
    module: nn.Module
    path: Path
    images: Tensor
    found: lipflow.Certificates


@pytest.fixture
def case(tmp_path: Path) -> Case:
    live, path, images = nn.Sequential(lipflow.cpl_dense(4, 3), nn.Linear(4, 2)), tmp_path / "f", torch.rand(3, 4)
    frozen = lipflow.freeze(live, (4,))
    frozen.save(path)
    return Case(live, frozen, frozen.module(), path, images, lipflow.certify(frozen, images))


PROGRAMS: dict[str, Callable[[Case], Tensor | float]] = {
    "a call": lambda case: case.frozen(case.images),
    "module": lambda case: case.module(case.images),
    "certify": lambda case: lipflow.certify(case.frozen, case.images).radius,
    "from_logits": lambda case: from_logits(case.found.logits, case.frozen.pair_bounds, case.frozen.rounding).radius,
    "certified": lambda case: case.found.certified("1/100"),
    "freeze": lambda case: lipflow.freeze(case.live, (4,)).pair_bounds,
    "Frozen.of": lambda case: lipflow.Frozen.of(case.frozen.graph).pair_bounds,
    "Frozen.load": lambda case: lipflow.Frozen.load(case.path).pair_bounds,
    "lipschitz_bound": lambda case: lipflow.lipschitz_bound(case.live, (4,)).lipschitz,
    "norm_bound": lambda case: lipflow.norm_bound(lipflow.DenseOperator(case.images)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_compiler_sees_what_a_certificate_rests_on(name, case):
    program, graphs = PROGRAMS[name], []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    found, expected = torch.compile(program, backend=backend)(case), program(case)
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
    assert graphs == []


def test_only_a_compiled_program_imports_the_compiler():
    """The import takes seconds. A network that was frozen and called before it is not compiled either."""
    code = """
import sys, torch, lipflow
frozen, x, graphs = lipflow.freeze(torch.nn.Linear(4, 2), (4,)), torch.rand(3, 4), []
expected = lipflow.certify(frozen, x)
assert "torch._dynamo" not in sys.modules
found = torch.compile(lambda x: lipflow.certify(frozen, x), backend=lambda graph, inputs: graphs.append(graph))(x)
assert torch.equal(found.radius, expected.radius) and graphs == []
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_another_default_device_changes_nothing(name, case):
    expected = PROGRAMS[name](case)
    with torch.device("meta"):
        found = PROGRAMS[name](case)
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
