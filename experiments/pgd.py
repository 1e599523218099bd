"""Figure 2: accuracy under L2-PGD of 10 steps against ε, of CPL, Cayley and SOC on both datasets.

The text of the paper gives two differences: CPL-S is above SOC-10 by more than 10 points at 0.8 on CIFAR-10, and by
about 10 at 0.6 on CIFAR-100.
"""

from functools import partial

from experiments.cifar10 import ONLY_S
from experiments.draw import curves
from experiments.experiment import PAPER_SCALE, Claim, Column, Experiment, Rows, Verdict, above, holds
from experiments.main_tables import CAYLEY, DATA, SOC, XL, S
from experiments.main_tables import rows as networks
from experiments.scale import CURVE_RADII
from lipflow.report.published import PAPER

GAIN = 0.10
ATTACK_RADIUS = {"cifar10": "0.8", "cifar100": "0.6"}


def gain(data: str, over: str, by: float = 0.0, better: str = S):
    """A rule: one network is above another under attack, at the ε of the paper's text."""

    def rule(rows: Rows) -> Verdict:
        at = ("attacked", ATTACK_RADIUS[data])
        return above(rows, (better, *at), (over, *at), by)

    return rule


def sound(rows: Rows) -> Verdict:
    """No attack has changed the label of a certified image, and no certified accuracy is above one under attack."""
    wrong = [text for label in rows.measured for found in rows.values(label, "contradictions") for text in found]
    images = sum(n for label in rows.measured for n in rows.values(label, "attacked_images"))
    return holds(not wrong, wrong[0] if wrong else f"{images} attacks at each ε broke no certified image")


def experiment(data: str) -> Experiment:
    return Experiment(
        name=f"pgd-{data}",
        title=f"Accuracy under PGD against ε on {DATA[data]}",
        source=f"{PAPER}, Figure 2",
        claims=(
            Claim(f"Under PGD at {ATTACK_RADIUS[data]}, CPL-S is above SOC-10.", gain(data, SOC)),
            Claim(f"Under PGD at {ATTACK_RADIUS[data]}, CPL-S is above Cayley.", gain(data, CAYLEY)),
            Claim(
                f"At {ATTACK_RADIUS[data]} CPL-S is above SOC-10 by {100 * GAIN:.0f} points or more.",
                gain(data, SOC, GAIN),
                PAPER_SCALE,
                "the published gain is that of networks of full size",
            ),
            Claim("CPL-XL is above CPL-S under PGD.", gain(data, S, better=XL), PAPER_SCALE, ONLY_S),
            Claim("Certified accuracy is never above accuracy under attack.", sound, ours=True),
        ),
        columns=(
            Column("clean", ("clean",)),
            Column("clean, attacked images", ("attacked_clean",)),
            *(Column(f"PGD, ε = {eps}", ("attacked", eps)) for eps in ("36/255", *CURVE_RADII)),
            *(Column(f"certified, ε = {eps}", ("certified", eps)) for eps in ("36/255", ATTACK_RADIUS[data])),
        ),
        draw=curves("attacked", "certified"),
        runs=partial(networks, data=data),
        measures=("certified", "attacked"),
        data=data,
    )


EXPERIMENTS = tuple(map(experiment, DATA))
