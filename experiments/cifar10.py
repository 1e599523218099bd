"""Table 2: clean and certified accuracy on CIFAR-10 of CPL, Cayley, SOC and SOC+ (quoted), without LLN."""

from functools import partial

from experiments.draw import dots
from experiments.experiment import PAPER_SCALE, Claim, Column, Experiment, Rows, Verdict, every, holds, shrinks
from experiments.main_tables import ACCURACIES, CAYLEY, CERTIFIED, SECONDS, SOC, SOC_20, XL, S, beats, in_order
from experiments.main_tables import published as table
from experiments.main_tables import rows as networks
from lipflow.report.published import PAPER

SIZES = (S, "CPL-M", "CPL-L", XL)
ONLY_S = "this scale trains only CPL-S, with fewer layers; the published differences are about one point"
BY_SIZE = Claim("S < M < L < XL in clean accuracy.", lambda r: in_order(r, SIZES, "clean"), PAPER_SCALE, ONLY_S)


def less_at_large_radii(rows: Rows) -> Verdict:
    """The gain of XL over S is smaller at 108/255 than in clean accuracy."""
    return shrinks(rows, XL, S, ACCURACIES[0], ACCURACIES[-1])


def least_seconds(rows: Rows) -> Verdict:
    seconds = {label: min(rows.values(label, *SECONDS.path)) for label in (S, CAYLEY, SOC)}
    return holds(seconds[S] == min(seconds.values()), ", ".join(f"{k} {v:.1f} s" for k, v in seconds.items()))


EXPERIMENTS = (
    Experiment(
        name="cifar10",
        title="Clean and certified accuracy on CIFAR-10",
        source=f"{PAPER}, Table 2",
        claims=(
            Claim("CPL-S is above Cayley, clean and certified at every ε.", lambda r: beats(r, S, CAYLEY)),
            Claim("CPL-S certifies more than SOC-10 at every ε.", lambda r: beats(r, S, SOC, ACCURACIES[1:])),
            Claim(
                "CPL-XL is above SOC-10, SOC-20 and Cayley, clean and certified at every ε.",
                lambda r: every(*(beats(r, XL, other) for other in (SOC, SOC_20, CAYLEY))),
                PAPER_SCALE,
                ONLY_S,
            ),
            BY_SIZE,
            Claim("The gain of larger networks is smaller at large ε.", less_at_large_radii, PAPER_SCALE, ONLY_S),
            Claim(
                "An epoch of CPL-S takes less time than one of Cayley or SOC-10.",
                least_seconds,
                PAPER_SCALE,
                "the sizes at this scale were chosen so that epochs take about the same time",
            ),
            Claim(
                "SOC+ certifies more than CPL-XL at 108/255.",
                lambda r: every(*(beats(r, f"SOC+-{n}", XL, ACCURACIES[-1:]) for n in (10, 20))),
                PAPER_SCALE,
                "SOC+ is not trained at this scale",
            ),
        ),
        columns=(*CERTIFIED, SECONDS, Column("parameters", ("parameters",), percent=False, scales=("small",))),
        draw=dots,
        runs=partial(networks, data="cifar10"),
        measures=("certified",),
        published=table("cifar10"),
    ),
)
