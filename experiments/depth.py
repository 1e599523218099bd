"""Figure 3: accuracy against epochs of networks of 100 to 1000 convolutional CPLs with 30 channels, no normalization.

The paper plots test accuracy and prints no numbers. Here it is the accuracy on held-out images, as test images are used
once, at the end. The small scale has images of 8×8. The paper's axis is epochs; here it is steps, as the networks start
within the first epochs, and the curves are the accuracy on training batches, with that on held-out images as marks.
"""

import math

from experiments.draw import course
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
MIN_EPOCHS = 3  # a deep network that has not learned after fewer epochs may still do so, as the paper says
DEPTHS = (100, 300, 500, 700, 1000)


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
    """The deepest network takes more steps than the shallowest to rise above chance, on training batches."""
    shallow, *_, deep = sorted(rows.measured, key=layers)

    def start(label: str) -> float:
        """The first step with an accuracy above chance; the latest one over the seeds."""
        reached = [[n for n, value in seed if value > CHANCE + LEARNED] for seed in rows.values(label, "accuracies")]
        return max(min(steps, default=math.inf) for steps in reached)

    first, last = start(shallow), start(deep)
    if math.isinf(last):
        return holds(False, f"{deep} were never above {100 * (CHANCE + LEARNED):.0f}%")
    return holds(last > first, f"above {100 * (CHANCE + LEARNED):.0f}% at step {first} and {last}")


EXPERIMENTS = (
    Experiment(
        name="depth",
        title="Networks of 100 to 1000 layers",
        source=f"{PAPER}, Figure 3",
        claims=(
            *(
                Claim(f"{label} train without normalization or gradient clipping.", trains(label))
                for label in (f"{depth} layers" for depth in DEPTHS)
            ),
            Claim("Very deep networks are not more accurate.", no_gain),
            Claim("The deepest networks take some epochs to start learning.", late_start),
        ),
        columns=(
            Column("held-out accuracy", ("validation",)),
            Column("epochs", ("epochs",), percent=False),
            Column("loss", ("loss",), percent=False),
        ),
        draw=course,
        runs=lambda scale: scale.deep(),
        measures=("course",),
    ),
)
