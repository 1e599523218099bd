"""Parts of the main tables of both datasets, for several experiments: networks, columns and published numbers."""

from collections.abc import Mapping

from experiments.experiment import Column, Rows, Verdict, above, every
from experiments.scale import Scale
from lipflow.report.published import EPSILONS, TABLES, Published
from lipflow.train.recipe import RECIPES
from lipflow.train.run import Run

DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
S, CAYLEY, SOC = (TABLES["cifar10"][model].title for model in ("cpl-s", "cayley-kw3", "soc-10"))
XL, SOC_20 = (TABLES["cifar10"][model].title for model in ("cpl-xl", "soc-20"))
CERTIFIED = (Column("clean", ("clean",)), *(Column(eps, ("certified", eps)) for eps in EPSILONS))
ACCURACIES: tuple[tuple[str, ...], ...] = tuple(column.path for column in CERTIFIED)
SECONDS = Column("s/epoch", ("seconds_per_epoch",), percent=False, scales=("paper",))  # elsewhere runs share a machine


def rows(scale: Scale, data: str) -> Mapping[str, list[Run]]:
    """The runs of a main table at a scale: label of a network → one run for each seed."""
    return {TABLES[data][model].title: scale.runs(model, data) for model in scale.models if model in RECIPES}


def published(data: str) -> dict[str, dict[str, float]]:
    """The published table: row → column → number."""

    def columns(row: Published) -> dict[str, float]:
        seconds = {} if row.seconds is None else {SECONDS.title: row.seconds}
        return {"clean": row.clean, **dict(zip(EPSILONS, row.certified, strict=True)), **seconds}

    return {row.title: columns(row) for row in TABLES[data].values()}


def beats(found: Rows, first: str, second: str, paths: tuple[tuple[str, ...], ...] = ACCURACIES) -> Verdict:
    """One row is above another at each of the paths."""
    return every(*(above(found, (first, *path), (second, *path)) for path in paths))


def in_order(found: Rows, labels: tuple[str, ...], *path: str) -> Verdict:
    """Each row is above the one before it."""
    pairs = zip(labels[1:], labels[:-1], strict=True)
    return every(*(above(found, (larger, *path), (smaller, *path)) for larger, smaller in pairs))
