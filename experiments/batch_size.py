"""Tables 4 and 5: batch sizes 64, 128 and 256, on both datasets.

Both captions say that the networks have last-layer normalization. But on CIFAR-10, the rows at 256 agree with Table 2,
whose networks are without it, for S and in part for M, L and XL. So each dataset has the recipe of its main table.
"""

from collections.abc import Mapping
from functools import partial

from experiments.cifar10 import ONLY_S
from experiments.draw import dots
from experiments.experiment import PAPER_SCALE, Claim, Experiment, Rows, Verdict, above, every, shrinks
from experiments.main_tables import ACCURACIES, CERTIFIED, DATA, SECONDS
from experiments.scale import Scale
from lipflow.report.published import BATCH_SIZES_CIFAR10, BATCH_SIZES_CIFAR100, PAPER, TABLES, BatchSizes
from lipflow.train.run import Run

PUBLISHED: Mapping[str, tuple[str, BatchSizes]] = {
    "cifar10": ("Table 4", BATCH_SIZES_CIFAR10),
    "cifar100": ("Table 5", BATCH_SIZES_CIFAR100),
}
SIZES = sorted({size for _, size in BATCH_SIZES_CIFAR10})
STEPS = "the published difference is about one point; in few epochs the number of steps matters more than the batch"


def label(model: str, size: int) -> str:
    return f"{TABLES['cifar10'][model].title}, {size}"


def sizes(scale: Scale, data: str) -> Mapping[str, list[Run]]:
    """One row for each model and batch size; at the recipe's own batch size, the run of the main table."""
    models = [model for model in scale.models if (model, SIZES[0]) in PUBLISHED[data][1]]
    rows = {}
    for model in models:
        own = scale.run(model, data).recipe.batch_size
        for size in SIZES:
            change = {} if size == own else {"batch_size": size}
            rows[label(model, size)] = scale.runs(model, data, scale.min_seeds, **change)
    return rows


def higher_clean_accuracy(models: tuple[str, ...]):
    """A rule: the clean accuracy of the smallest batch is above that of the largest."""

    def rule(rows: Rows) -> Verdict:
        pairs = [(label(m, SIZES[0]), label(m, SIZES[-1])) for m in models]
        return every(*(above(rows, (small, "clean"), (large, "clean")) for small, large in pairs))

    return rule


def less_at_large_radii(rows: Rows) -> Verdict:
    return shrinks(rows, label("cpl-s", SIZES[0]), label("cpl-s", SIZES[-1]), ACCURACIES[0], ACCURACIES[-1])


def experiment(data: str) -> Experiment:
    source, table = PUBLISHED[data]
    titles = [*(column.title for column in CERTIFIED), SECONDS.title]
    return Experiment(
        name=f"batch-size-{data}",
        title=f"Batch sizes on {DATA[data]}",
        source=f"{PAPER}, {source}",
        claims=(
            Claim(
                "CPL-S: a batch of 64 has a higher clean accuracy than one of 256.",
                higher_clean_accuracy(("cpl-s",)),
                PAPER_SCALE,
                STEPS,
            ),
            Claim(
                "A batch of 64 has a higher clean accuracy for CPL-M, L and XL too.",
                higher_clean_accuracy(("cpl-m", "cpl-l", "cpl-xl")),
                PAPER_SCALE,
                ONLY_S,
            ),
            Claim("The gain is smaller at large ε.", less_at_large_radii, PAPER_SCALE, STEPS),
        ),
        columns=(*CERTIFIED, SECONDS),
        draw=dots,
        runs=partial(sizes, data=data),
        measures=("certified",),
        published={label(m, n): dict(zip(titles, map(float, row), strict=True)) for (m, n), row in table.items()},
        data=data,
    )


EXPERIMENTS = tuple(map(experiment, DATA))
