"""Figure 3: accuracy against epochs of networks of 100 to 1000 convolutional CPLs with 30 channels, no normalization.

The paper plots test accuracy; here it is that of held-out images, as the test images are looked at once, at the end. It
prints no number. At the small scale images are 8×8 and epochs few: one, for the deepest.
"""

import math

from experiments.draw import epochs
from experiments.experiment import (
    NOT_JUDGED,
    NOT_SEEN,
    SEEN,
    Claim,
    Column,
    Experiment,
    Rows,
    Verdict,
    above,
    holds,
    noise_of,
)
from lipflow.report.published import PAPER

CHANCE, LEARNED = 0.1, 0.05
FEW = 3  # epochs; a deep network that has not started after fewer may still do so, as the paper says
UNEQUAL = "the networks of this scale are given different numbers of epochs, and few"


def layers(label: str) -> int:
    return int(label.split()[0])


def trains(label: str):
    """A rule: a network of this depth ends at least so far above chance."""

    def rule(rows: Rows) -> Verdict:
        if any(rows.values(label, "diverged")):
            return holds(False, "diverged")
        reached, epochs = rows.accuracy(label, "validation"), min(rows.values(label, "epochs"))
        learned = reached.value - noise_of(reached) > CHANCE + LEARNED
        outcome = SEEN if learned else NOT_SEEN if epochs >= FEW else NOT_JUDGED
        return Verdict(outcome, f"{reached} after {epochs} epoch{'s' * (epochs > 1)}")

    return rule


def no_gain(rows: Rows) -> Verdict:
    """The deepest is not above the shallowest."""
    shallow, *_, deep = sorted(rows.measured, key=layers)
    gain = above(rows, (deep, "validation"), (shallow, "validation"))
    return gain._replace(outcome={SEEN: NOT_SEEN, NOT_SEEN: SEEN}.get(gain.outcome, gain.outcome))


def late_start(rows: Rows) -> Verdict:
    """The deepest takes more epochs than the shallowest to leave chance."""
    shallow, *_, deep = sorted(rows.measured, key=layers)

    def start(label: str) -> float:
        """The first epoch above chance, of the last seed to get there."""
        reached = [[n for n, value in seed if value > CHANCE + LEARNED] for seed in rows.values(label, "validations")]
        return max(min(epochs, default=math.inf) for epochs in reached)

    first, last = start(shallow), start(deep)
    if math.isinf(last):
        return holds(False, f"{deep} never came above {100 * (CHANCE + LEARNED):.0f}%")
    return holds(last > first, f"above {100 * (CHANCE + LEARNED):.0f}% at epoch {first} and {last}")


EXPERIMENTS = (
    Experiment(
        name="depth",
        title="Networks of 100 to 1000 layers",
        source=f"{PAPER}, Figure 3",
        claims=(
            *(
                Claim(f"{label} train without normalization or gradient clipping.", trains(label))
                for label in ("100 layers", "300 layers", "1000 layers")
            ),
            Claim("There is no gain in very deep networks.", no_gain, scales=("paper",), otherwise=UNEQUAL),
            Claim("The deepest take some epochs to start.", late_start, scales=("paper",), otherwise=UNEQUAL),
        ),
        columns=(
            Column("held-out accuracy", ("validation",)),
            Column("epochs", ("epochs",), percent=False),
            Column("loss", ("loss",), percent=False),
        ),
        draw=epochs,
        runs=lambda scale: scale.deep(),
    ),
)
