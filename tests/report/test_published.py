"""The paper's numbers: complete, consistent, and found by model and data."""

from dataclasses import replace

import pytest

from lipflow.models.cpl import SIZES
from lipflow.radius import parse_radius
from lipflow.report.published import (
    ARCHITECTURES,
    BATCH_SIZES_CIFAR10,
    BATCH_SIZES_CIFAR100,
    EPSILONS,
    RELAXED,
    TABLES,
    published,
    reference,
    references,
)
from lipflow.train.recipe import RECIPES
from lipflow.train.run import Run

CPL_S = Run.of("cpl-s", "cifar10")


def test_rows_are_found_by_model_and_data():
    row = published("cpl-xl", "cifar10")
    assert row is not None
    assert (row.title, row.clean, row.certified, row.seconds) == ("CPL-XL", 78.5, (64.4, 48.0, 33.0), 163.0)
    assert row.source == "Meunier et al. 2022, Table 2"
    assert published("cpl-digits", "digits") is published("bcop-large", "cifar10") is None
    own = reference(CPL_S)
    assert own is not None
    assert (own.clean, own.at) == (75.6, tuple(zip(EPSILONS, (62.3, 46.9, 32.2), strict=True)))
    varied = replace(CPL_S, seed=3, model_args={"depth": 2})
    found = references([CPL_S, varied, Run.of("cpl-s", "cifar100"), Run.of("cpl-digits", "digits"), CPL_S])
    assert [row.title for row in found] == ["CPL-S on cifar10, certified", "CPL-S on cifar100, certified"]


@pytest.mark.parametrize("h", [*RELAXED, 1])
def test_a_fixed_step_has_the_row_of_the_relaxed_network(h):
    found = reference(replace(CPL_S, model_args={"h": h, "depth": 3}))
    assert found is not None
    assert "under PGD" in found.title
    assert (found.clean, found.at) == (RELAXED[h][0], (("36/255", RELAXED[h][1]),))
    assert reference(replace(CPL_S, model_args={"h": h}, data="cifar100")) is None
    for other in (0.5, [1.0], "1.0"):
        assert reference(replace(CPL_S, model_args={"h": other})) is None


def test_tables_are_complete_and_consistent():
    """Accuracy falls as ε grows; every published model can be built and trained."""
    for table in TABLES.values():
        assert set(table) <= set(RECIPES)
        assert len(table) == 9
    for name, shape in ARCHITECTURES.items():
        assert shape == tuple(SIZES[name][key] for key in ("depth", "channels", "depth_linear", "features"))
    assert sorted(EPSILONS, key=parse_radius) == list(EPSILONS)
    rows = [(r.clean, *r.certified) for table in TABLES.values() for r in table.values()]
    rows += [row[:4] for sizes in (BATCH_SIZES_CIFAR10, BATCH_SIZES_CIFAR100) for row in sizes.values()]
    assert len(rows) == 18 + 24
    assert all(100 > row[0] > row[1] > row[2] > row[3] > 0 for row in rows)
    assert BATCH_SIZES_CIFAR10["cpl-s", 256][:4] == (
        TABLES["cifar10"]["cpl-s"].clean,
        *TABLES["cifar10"]["cpl-s"].certified,
    )
    assert sorted(RELAXED) == [0.01, 0.1, 1.0]
