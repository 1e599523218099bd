"""Figures 4 and 5: certified accuracy and accuracy under PGD for margins of the loss, CPL-S on both datasets.

The paper prints neither the margins nor the accuracies as numbers. Here the margins range from a seventh of the
published 0.7 to four times it.
"""

from collections.abc import Mapping
from functools import partial

from experiments.draw import curves
from experiments.experiment import Claim, Column, Experiment, Rows, Verdict, above
from experiments.main_tables import DATA
from experiments.scale import Scale
from lipflow.report.published import PAPER
from lipflow.train.recipe import CPL
from lipflow.train.run import Run

PUBLISHED = CPL.flat()["margin"]
MARGINS = (0.1, 0.3, PUBLISHED, 1.5, 3.0)
LEAST, MIDDLE, MOST = (f"m = {m:g}" for m in (MARGINS[0], PUBLISHED, MARGINS[-1]))
LARGE = "0.8"


def margins(scale: Scale, data: str) -> Mapping[str, list[Run]]:
    """CPL-S at each margin; at the published margin, the run of the main table."""
    changes = {m: {} if m == PUBLISHED else {"margin": m} for m in MARGINS}
    return {f"m = {m:g}": scale.runs("cpl-s", data, scale.min_seeds, **change) for m, change in changes.items()}


def clean(rows: Rows) -> Verdict:
    return _beside_the_published(above(rows, (LEAST, "clean"), (MOST, "clean")), rows, "clean")


def robust(key: str):
    """A rule: at a large ε the largest margin is better than the smallest."""

    def rule(rows: Rows) -> Verdict:
        return _beside_the_published(above(rows, (MOST, key, LARGE), (LEAST, key, LARGE)), rows, key, LARGE)

    return rule


def _beside_the_published(verdict: Verdict, rows: Rows, *path: str) -> Verdict:
    """A verdict about the ends of the range, with the accuracy at the published margin as further evidence."""
    return Verdict(verdict.outcome, f"{verdict.evidence}; in between, {MIDDLE} {rows.accuracy(MIDDLE, *path)}")


def experiment(data: str) -> Experiment:
    return Experiment(
        name=f"margin-{data}",
        title=f"The margin parameter on {DATA[data]}",
        source=f"{PAPER}, Figures 4 and 5",
        claims=(
            Claim("A small margin has a higher clean accuracy than a large one.", clean),
            Claim(f"At ε = {LARGE} a large margin certifies more than a small one.", robust("certified")),
            Claim(f"At ε = {LARGE} a large margin is above a small one under PGD.", robust("attacked")),
        ),
        columns=(
            Column("clean", ("clean",)),
            *(Column(f"certified, ε = {eps}", ("certified", eps)) for eps in ("36/255", LARGE)),
            Column("clean, attacked images", ("attacked_clean",)),
            *(Column(f"PGD, ε = {eps}", ("attacked", eps)) for eps in ("36/255", LARGE)),
        ),
        draw=curves("certified", "attacked"),
        runs=partial(margins, data=data),
        measures=("certified", "attacked"),
        data=data,
    )


EXPERIMENTS = tuple(map(experiment, DATA))
