"""Table 3: clean and certified accuracy on CIFAR-100 of CPL, Cayley, SOC and SOC+ (quoted), all with LLN."""

from functools import partial

from experiments.cifar10 import BY_SIZE, ONLY_S
from experiments.draw import dots
from experiments.experiment import PAPER_SCALE, Claim, Experiment
from experiments.main_tables import CAYLEY, CERTIFIED, SECONDS, SOC, XL, S, beats
from experiments.main_tables import published as table
from experiments.main_tables import rows as networks
from lipflow.report.published import PAPER

NEAR = (("clean",), ("certified", "36/255"))

EXPERIMENTS = (
    Experiment(
        name="cifar100",
        title="Clean and certified accuracy on CIFAR-100",
        source=f"{PAPER}, Table 3",
        claims=(
            Claim("CPL-S is above Cayley, clean and at 36/255.", lambda r: beats(r, S, CAYLEY, NEAR)),
            Claim("SOC-10 is above CPL-S, clean and certified at every ε.", lambda r: beats(r, SOC, S)),
            Claim(
                "SOC-10 certifies more than CPL-XL at 36/255.",
                lambda r: beats(r, SOC, XL, NEAR[1:]),
                PAPER_SCALE,
                ONLY_S,
            ),
            BY_SIZE,
        ),
        columns=(*CERTIFIED, SECONDS),
        draw=dots,
        runs=partial(networks, data="cifar100"),
        measures=("certified",),
        published=table("cifar100"),
        data="cifar100",
    ),
)
