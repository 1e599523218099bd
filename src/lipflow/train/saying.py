"""What a run says when it begins, when it ends, and when it is lost."""

from lipflow.data import Dataset
from lipflow.train.accuracy import Accuracy
from lipflow.train.checkpoint import Checkpoints
from lipflow.train.diagnosis import diagnosis
from lipflow.train.duration import format_duration
from lipflow.train.learner import Learner
from lipflow.train.record import BEST, FINAL, Record, environment
from lipflow.train.scribe import Standing

# What the bits of a run depend on, besides its flags.
MATTERS = ("lipflow", "commit", "torch", "machine", "processor", "device", "threads", "processes")


def opening(record: Record, learner: Learner, data: Dataset, standing: Standing) -> str:
    """What is trained, on what, where; and, of a run that goes on, what is not as it was."""
    run, steps, parameters = learner.run, record.steps, sum(p.numel() for p in learner.network.parameters())
    epochs = steps / learner.steps_per_epoch
    where = f"{learner.ranks.device}" + (f" × {learner.ranks.world}" if learner.ranks.world > 1 else "")
    lines = [
        f"{run.model} on {data.name}: {parameters:,} parameters; {len(data.train)} training and "
        f"{len(data.validation)} validation images; "
        f"{steps} steps ({epochs:.4g} epoch{'' if epochs == 1 else 's'}) on {where}"
    ]
    if run.budget:
        lines.append(f"the number of steps is fitted to the budget of {run.budget} as the run goes on")
    if standing.step:
        lines.append(f"going on after step {standing.step}")
    now = environment(learner.ranks)
    changed = [f"{k} {v} → {now[k]}" for k, v in record.environment.items() if k in MATTERS and now[k] != v]
    if changed:
        lines.append(f"this may differ from the uninterrupted run: {', '.join(changed)}")
    return "\n".join(lines)


def closing(learner: Learner, standing: Standing, found: Accuracy | None) -> str:
    """How long it took, and what validation images say of the network."""
    folder = learner.run.folder
    lines = [f"{standing.step} steps in {format_duration(standing.seconds)}; {folder / FINAL} is the final network"]
    if learner.run.budget:
        took = format_duration(standing.elapsed)
        lines.append(f"the schedule ended after {took}, with a budget of {learner.run.budget}")
    if standing.validation:
        lines.append(f"on validation images: {standing.validation.told('estimated')}")
        lines.append(f"{folder / BEST} is the best by that estimate, of epoch {standing.best_epoch}")
    if found is not None:
        lines.append(f"on {found.images} validation images, by the frozen final network: {found.told('exact')}")
    lines.append(f"next: lipflow certify {folder}")
    return "\n".join(lines)


def lost(loss: float, step: int, steps: int, rate: float, learner: Learner, checkpoints: Checkpoints) -> str:
    """Where the loss is no number, what the weights are then, and where the last good ones are."""
    kept = checkpoints.steps()
    good = f"the last good state is of step {kept[0]}, in {checkpoints.folder}" if kept else "no checkpoint was due yet"
    return (
        f"the loss is {loss} at step {step + 1} of {steps} (learning rate {rate:.3g}).\n{diagnosis(learner.network)}\n"
        f"{good}; start again with a lower --lr"
    )
