"""The gradient norm against depth. The paper's appendix says that it is controlled "naturally".

Backpropagation through a layer with L = 1 does not increase the norm of a gradient, so it cannot explode. That it does
not vanish is not proved. It is measured: the norm before each layer divided by that at the scores, in the networks of
the depth experiment, before and after training.
"""

from experiments.depth import layers as layers_of
from experiments.depth import trains
from experiments.draw import gradients
from experiments.experiment import NOT_JUDGED, SEEN, Claim, Column, Experiment, Rows, Verdict, every, holds
from lipflow.report.published import PAPER

MAX_GROWTH = 1.01  # above 1, as the steps of a live network are computed from estimated norms
VANISHED = 0.01  # the paper has no number
BELOW = f"{VANISHED:g} times that at the scores"
STATES = ("fresh", "trained")


def norms(rows: Rows, label: str, *states: str) -> list[float]:
    """All measured norms of a row."""
    return [norm for table in rows.values(label, "gradient") for state in states for norm in table[state]]


def bounded(rows: Rows) -> Verdict:
    worst = {label: max(norms(rows, label, *STATES)) for label in sorted(rows.measured, key=layers_of)}
    return every(*(holds(norm <= MAX_GROWTH, f"{label} at most {norm:.3g}") for label, norm in worst.items()))


def alive(state: str):
    """A rule: no gradient of networks in this state has vanished. A trained network at chance level is not judged."""

    def judge(rows: Rows, label: str) -> Verdict:
        least = min(norms(rows, label, state))
        verdict = holds(least >= VANISHED, f"{label} at least {least:.3g}")
        if state == "trained" and trains(label)(rows).outcome != SEEN:
            return Verdict(NOT_JUDGED, f"{verdict.evidence}, at chance level")
        return verdict

    return lambda rows: every(*(judge(rows, label) for label in sorted(rows.measured, key=layers_of)))


EXPERIMENTS = (
    Experiment(
        name="gradient",
        title="The gradient norm against depth",
        source=f"{PAPER}, appendix, training stability",
        claims=(
            Claim("Gradients do not explode: no norm is above that at the scores.", bounded),
            *(
                Claim(f"Gradients of {state} networks do not vanish: no norm is below {BELOW}.", alive(state))
                for state in STATES
            ),
        ),
        columns=(
            Column("trained, first layer", ("first_trained",), percent=False),
            Column("fresh, first layer", ("first_fresh",), percent=False),
        ),
        draw=gradients,
        runs=lambda scale: scale.deep(),
        measures=("gradient", "course"),
    ),
)
