"""Figure 3: accuracy against epochs of networks of 100 to 1000 convolutional CPLs with 30 channels, no normalization.

The paper plots test accuracy and prints no numbers. Here it is the accuracy on held-out images, as test images are used
once, at the end. At the small scale images are 8×8, and the deepest network is trained for one epoch.
"""

import math

from experiments.draw import epochs
from experiments.experiment import (
    NOT_JUDGED,
    NOT_SEEN,
    PAPER_SCALE,
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
MIN_EPOCHS = 3  # a deep network that has not learned after fewer epochs may still do so, as the paper says
UNEQUAL = "the networks of this scale are trained for different, small numbers of epochs"


def layers(label: str) -> int:
    return int(label.split()[0])


def trains(label: str):
    """A rule: the final accuracy of a network of this depth is above chance by more than LEARNED."""

    def rule(rows: Rows) -> Verdict:
        if any(rows.values(label, "diverged")):
            return holds(False, "diverged")
        reached, epochs = rows.accuracy(label, "validation"), min(rows.values(label, "epochs"))
        learned = reached.value - noise_of(reached) > CHANCE + LEARNED
        outcome = SEEN if learned else NOT_SEEN if epochs >= MIN_EPOCHS else NOT_JUDGED
        return Verdict(outcome, f"{reached} after {epochs} epoch{'s' * (epochs > 1)}")

    return rule


def no_gain(rows: Rows) -> Verdict:
    """The accuracy of the deepest network is not above that of the shallowest."""
    shallow, *_, deep = sorted(rows.measured, key=layers)
    gain = above(rows, (deep, "validation"), (shallow, "validation"))
    return gain._replace(outcome={SEEN: NOT_SEEN, NOT_SEEN: SEEN}.get(gain.outcome, gain.outcome))


def late_start(rows: Rows) -> Verdict:
    """The deepest network takes more epochs than the shallowest to rise above chance."""
    shallow, *_, deep = sorted(rows.measured, key=layers)

    def start(label: str) -> float:
        """The first epoch with an accuracy above chance; the latest one over the seeds."""
        reached = [[n for n, value in seed if value > CHANCE + LEARNED] for seed in rows.values(label, "validations")]
        return max(min(epochs, default=math.inf) for epochs in reached)

    first, last = start(shallow), start(deep)
    if math.isinf(last):
        return holds(False, f"{deep} were never above {100 * (CHANCE + LEARNED):.0f}%")
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
            Claim("Very deep networks are not more accurate.", no_gain, PAPER_SCALE, UNEQUAL),
            Claim("The deepest networks take some epochs to start learning.", late_start, PAPER_SCALE, UNEQUAL),
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
