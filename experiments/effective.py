"""How much of the certified Lipschitz constant is used: the paper's explanation of why CPL does well under PGD.

It says that CPL layers only have an upper bound, while Cayley and SOC preserve norms, so that CPL's effective constant
is smaller than its certified one. Measured from below: the greatest slope of a margin f_y - f_j at a test image, over
its certified bound. 1 would be all of it. What is judged and drawn is the mean over images.
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
from experiments.rivals import CAYLEY, SOC, S
from experiments.rivals import rows as rivals
from lipflow.report.published import PAPER

USED = Column("most used", ("used",))
AVERAGE = Column("used on average", ("used_mean",))


def less(than: str):
    """A rule: CPL-S uses less on average than a rival. All are probed at the same images, so the noise is of seeds."""

    def rule(rows: Rows) -> Verdict:
        ours, theirs = (Quantity.of(rows.values(label, *AVERAGE.path)) for label in (S, than))
        noise = noise_of(ours, theirs)
        text = f"used on average: {S} {ours}, {than} {theirs} (noise of seeds ±{100 * noise:.1f})"
        if min(ours.seeds, theirs.seeds) < 2:
            return Verdict(NOT_JUDGED, f"{text}: of one seed there is no noise to know")
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
        runs=partial(rivals, data="cifar10"),
        measures=("effective",),
    ),
)
