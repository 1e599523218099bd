"""Figure 1: certified accuracy against ε, of CPL, Cayley and SOC on both datasets.

Tables 2 and 3 of the paper have the numbers of these curves at three ε.
"""

from functools import partial

from experiments.draw import curves
from experiments.experiment import Claim, Column, Experiment, Rows, Verdict
from experiments.main_tables import CAYLEY, CERTIFIED, DATA, SOC, S, beats
from experiments.main_tables import published as table
from experiments.main_tables import rows as networks
from experiments.scale import CURVE_RADII
from lipflow.report.published import PAPER


def above_on_the_curve(first: str, second: str):
    """A rule: one curve is above another, at ε from 0.2 to 0.6."""

    def rule(rows: Rows) -> Verdict:
        return beats(rows, first, second, tuple(("certified", eps) for eps in CURVE_RADII[:3]))

    return rule


def experiment(data: str) -> Experiment:
    claims = {
        "cifar10": (
            Claim("CPL-S certifies more than Cayley, at ε from 0.2 to 0.6.", above_on_the_curve(S, CAYLEY)),
            Claim("CPL-S certifies more than SOC-10, at ε from 0.2 to 0.6.", above_on_the_curve(S, SOC)),
        ),
        "cifar100": (Claim("SOC-10 certifies more than CPL-S, at ε from 0.2 to 0.6.", above_on_the_curve(SOC, S)),),
    }
    return Experiment(
        name=f"certified-{data}",
        title=f"Certified accuracy against ε on {DATA[data]}",
        source=f"{PAPER}, Figure 1",
        claims=claims[data],
        columns=(*CERTIFIED, *(Column(f"ε = {eps}", ("certified", eps)) for eps in CURVE_RADII)),
        draw=curves("certified"),
        runs=partial(networks, data=data),
        measures=("certified",),
        published=table(data),
        data=data,
    )


EXPERIMENTS = tuple(map(experiment, DATA))
