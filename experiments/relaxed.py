"""The table of relaxed layers in the appendix: a fixed step h instead of 2/‖W‖², clean and under PGD at 36/255.

The paper does not say which network was relaxed; here it is CPL-S, compared with the CPL-S of the main table. A relaxed
network also has a certified L, the product of max(1, h‖W‖² - 1), but it is large.
"""

from collections.abc import Mapping

from experiments.draw import dots
from experiments.experiment import Claim, Column, Experiment, Rows, Verdict, above, every, holds
from experiments.scale import Scale
from lipflow.report.published import PAPER, RELAXED
from lipflow.train.run import Run

CERTIFIED = "h = 2/‖W‖²"
ATTACK = Column("PGD, 36/255", ("attacked", "36/255"))
LABELS = {h: f"h = {h:g}" for h in RELAXED}
LARGE, MIDDLE, SMALL = (LABELS[h] for h in sorted(RELAXED, reverse=True))


def relaxed(scale: Scale) -> Mapping[str, list[Run]]:
    rows = {label: scale.runs("cpl-s", "cifar10", scale.min_seeds, h=h) for h, label in LABELS.items()}
    return {CERTIFIED: scale.runs("cpl-s", "cifar10", scale.min_seeds), **rows}


def higher_clean_accuracy(rows: Rows) -> Verdict:
    return every(above(rows, (LARGE, "clean"), (MIDDLE, "clean")), above(rows, (MIDDLE, "clean"), (SMALL, "clean")))


def relaxing_helps(rows: Rows) -> Verdict:
    return above(rows, (LARGE, "clean"), (CERTIFIED, "clean"))


def stable(rows: Rows) -> Verdict:
    lost = [label for label in LABELS.values() if any(rows.values(label, "diverged"))]
    return holds(not lost, f"diverged: {', '.join(lost)}" if lost else "every loss and every weight was finite")


EXPERIMENTS = (
    Experiment(
        name="relaxed",
        title="Relaxed layers: a fixed step h",
        source=f"{PAPER}, appendix, relaxing linear layers",
        claims=(
            Claim("A larger h has a higher clean accuracy: 1 > 0.1 > 0.01.", higher_clean_accuracy),
            Claim("h = 1 has a higher clean accuracy than the certified step.", relaxing_helps),
            Claim(
                "Under PGD at 36/255, h = 1 has a lower accuracy than h = 0.1.",
                lambda r: above(r, (MIDDLE, *ATTACK.path), (LARGE, *ATTACK.path)),
            ),
            Claim("Training is stable for every h, without normalization.", stable),
        ),
        columns=(Column("clean", ("clean",)), ATTACK, Column("certified L", ("lipschitz",), percent=False)),
        draw=dots,
        runs=relaxed,
        measures=("live",),
        published={LABELS[h]: {"clean": row[0], ATTACK.title: row[1]} for h, row in RELAXED.items()},
    ),
)
