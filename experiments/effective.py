"""The effective Lipschitz constant and the certified one: the paper's reason for the accuracy of CPL under PGD.

The paper says that CPL layers only have an upper bound while Cayley and SOC preserve norms, so that the effective
constant of CPL is smaller than its certified one. The effective constant is estimated from below: the greatest slope of
a margin f_y - f_j at a test image, divided by its certified bound, is the part of the bound that is used. Claims are
judged by the mean over images, which is also drawn.
"""

from functools import partial

from experiments.draw import bars
from experiments.experiment import (
    NOT_JUDGED,
    Claim,
    Column,
    Experiment,
    Quantity,
    Rows,
    Verdict,
    holds,
    judge,
    noise_of,
)
from experiments.main_tables import CAYLEY, SOC, S
from experiments.main_tables import rows as networks
from lipflow.report.published import PAPER

USED = Column("most used", ("used",))
AVERAGE = Column("used on average", ("used_mean",))


def less(than: str):
    """A rule: CPL-S uses less on average than another network. The images are the same, so only seeds cause noise."""

    def rule(rows: Rows) -> Verdict:
        ours, theirs = (Quantity.of(rows.values(label, *AVERAGE.path)) for label in (S, than))
        noise = noise_of(ours, theirs)
        text = f"used on average: {S} {ours}, {than} {theirs} (noise of seeds ±{100 * noise:.1f})"
        if min(ours.seeds, theirs.seeds) < 2:
            return Verdict(NOT_JUDGED, f"{text}: the noise of one seed is unknown")
        return judge(theirs.value - ours.value, noise, text)

    return rule


def below(rows: Rows) -> Verdict:
    most = {label: max(rows.values(label, *USED.path)) for label in rows.measured}
    return holds(all(value <= 1 for value in most.values()), ", ".join(f"{k} {v:.1%}" for k, v in most.items()))


EXPERIMENTS = (
    Experiment(
        name="effective",
        title="The effective Lipschitz constant beside the certified one",
        source=f"{PAPER}, section 5.3, empirical adversarial robustness",
        claims=(
            Claim("CPL-S uses less of its certified constant than SOC-10.", less(SOC)),
            Claim("CPL-S uses less of its certified constant than Cayley.", less(CAYLEY)),
            Claim("No measured slope is above its certified bound.", below, ours=True),
        ),
        columns=(
            Column("certified L", ("certified_lipschitz",), percent=False),
            Column("effective L, at least", ("effective_lipschitz",), percent=False),
            USED,
            AVERAGE,
        ),
        draw=bars(AVERAGE.title, "part of the certified constant that is used (%)"),
        runs=partial(networks, data="cifar10"),
        measures=("effective",),
    ),
)
