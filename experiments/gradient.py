"""The gradient norm against depth, which the appendix says is controlled "naturally": neither exploding nor vanishing.

Backwards through a layer with L = 1 a gradient cannot grow. That it does not vanish is no theorem, and is measured: its
norm before each layer over that of the scores, in the networks of the depth experiment, fresh and trained.
"""

from experiments.depth import layers as layers_of
from experiments.depth import trains
from experiments.draw import layers
from experiments.experiment import NOT_JUDGED, SEEN, Claim, Column, Experiment, Rows, Verdict, every, holds
from lipflow.report.published import PAPER

ROOM = 1.01  # a live network's steps come from estimated norms
VANISHED = 0.01  # the paper has no number
STATES = ("fresh", "trained")


def norms(rows: Rows, label: str, *states: str) -> list[float]:
    """All that were measured in a row."""
    return [norm for table in rows.values(label, "gradient") for state in states for norm in table[state]]


def bounded(rows: Rows) -> Verdict:
    worst = {label: max(norms(rows, label, *STATES)) for label in sorted(rows.measured, key=layers_of)}
    return every(*(holds(norm <= ROOM, f"{label} at most {norm:.3g}") for label, norm in worst.items()))


def alive(state: str):
    """A rule: no gradient of networks in this state has vanished. One that has not learned yet is not a trained one."""

    def judge(rows: Rows, label: str) -> Verdict:
        least = min(norms(rows, label, state))
        verdict = holds(least >= VANISHED, f"{label} at least {least:.3g}")
        if state == "trained" and trains(label)(rows).outcome != SEEN:
            return Verdict(NOT_JUDGED, f"{verdict.evidence}, not having learned yet")
        return verdict

    return lambda rows: every(*(judge(rows, label) for label in sorted(rows.measured, key=layers_of)))


EXPERIMENTS = (
    Experiment(
        name="gradient",
        title="The gradient norm against depth",
        source=f"{PAPER}, appendix, training stability",
        claims=(
            Claim("Gradients do not explode: nowhere above the scores' own.", bounded),
            *(
                Claim(
                    f"Gradients of {state} networks do not vanish: nowhere below {VANISHED:g} of the scores' own.", rule
                )
                for state, rule in zip(STATES, map(alive, STATES), strict=True)
            ),
        ),
        columns=(
            Column("trained, first layer", ("first_trained",), percent=False),
            Column("fresh, first layer", ("first_fresh",), percent=False),
        ),
        draw=layers,
        runs=lambda scale: scale.deep(),
        measures=("gradient",),
    ),
)
