"""The paper's numbers: complete, and as a reader of its tables finds them."""

from dataclasses import replace

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


def test_rows_are_found_by_model_and_data():
    row = published("cpl-xl", "cifar10")
    assert row is not None
    assert (row.title, row.clean, row.certified, row.seconds) == ("CPL-XL", 78.5, (64.4, 48.0, 33.0), 163.0)
    assert row.source == "Meunier et al. 2022, Table 2"
    assert EPSILONS == ("36/255", "72/255", "108/255")
    assert published("cpl-digits", "digits") is None
    assert published("bcop-large", "cifar10") is None
    one, other = Run.of("cpl-s", "cifar10"), Run.of("cpl-s", "cifar100")
    found = references([one, replace(one, seed=3, model_args={"depth": 2}), other, Run.of("cpl-digits", "digits"), one])
    assert [row.title for row in found] == ["CPL-S on cifar10, certified", "CPL-S on cifar100, certified"]


def test_a_fixed_step_has_no_certified_row():
    """What the paper certifies has the step of the proof; a run with another h goes with its relaxed networks."""
    run = Run.of("cpl-s", "cifar10")
    own = reference(run)
    assert own is not None
    assert (own.title, own.clean, dict(own.at)) == (
        "CPL-S on cifar10, certified",
        75.6,
        dict(zip(EPSILONS, (62.3, 46.9, 32.2), strict=True)),
    )
    for h, (clean, standing) in RELAXED.items():
        found = reference(replace(run, model_args={"h": h, "depth": 3}))
        assert found is not None
        assert "under PGD" in found.title
        assert (found.clean, found.at) == (clean, (("36/255", standing),))
    for changed in (
        replace(run, model_args={"h": 0.5}),
        replace(run, model_args={"h": [1.0]}),
        replace(run, model_args={"h": "1.0"}),
        replace(run, model_args={"h": 1.0}, data="cifar100"),
        Run.of("cpl-digits", "digits"),
    ):
        assert reference(changed) is None
    assert reference(replace(run, model_args={"h": 1})) == reference(replace(run, model_args={"h": 1.0}))


def test_tables_are_complete_and_consistent():
    """Accuracy falls as ε grows; every published model is one that we build and train."""
    for table in TABLES.values():
        assert set(table) <= set(RECIPES)
        assert len(table) == 9
    for name, shape in ARCHITECTURES.items():
        assert shape == tuple(SIZES[name][key] for key in ("depth", "channels", "depth_linear", "features"))
    assert sorted(EPSILONS, key=parse_radius) == list(EPSILONS)
    rows = [(r.clean, *r.certified) for table in TABLES.values() for r in table.values()]
    rows += [row[:4] for sizes in (BATCH_SIZES_CIFAR10, BATCH_SIZES_CIFAR100) for row in sizes.values()]
    assert len(rows) == 18 + 24
    assert all(row[0] < 100 and list(row) == sorted(row, reverse=True) and row[-1] > 0 for row in rows)
    main = TABLES["cifar10"]["cpl-s"]
    assert BATCH_SIZES_CIFAR10["cpl-s", 256][:4] == (main.clean, *main.certified)
    assert sorted(RELAXED) == [0.01, 0.1, 1.0]
