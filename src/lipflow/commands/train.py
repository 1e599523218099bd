"""`lipflow train`: its flags and their defaults. Without torch until it runs."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from lipflow.losses import CertificateRegularisation, MultiMargin, OffsetCrossEntropy
from lipflow.train.recipe import SGD, Recipe
from lipflow.train.run import Run
from lipflow.train.schedule import MultiStep


@dataclass(frozen=True)
class Choices:
    """The optimiser, the schedule and the loss of a recipe, with the numbers of each, as flat flags."""

    optimiser: Literal["adam", "sgd"] = "adam"
    """How weights are updated."""
    lr: float = SGD.lr
    """The greatest learning rate."""
    weight_decay: float = SGD.weight_decay
    """Weight decay, on all but the parameters of activations."""
    momentum: float = SGD.momentum
    """Momentum of sgd (adam has its usual betas)."""
    nesterov: bool = SGD.nesterov
    """Nesterov's form of momentum, for sgd."""
    schedule: Literal["triangular", "linear", "multistep", "exponential", "constant"] = "triangular"
    """The learning rate over the run: triangular (the paper's: peak at 2/5, lr/20 at 4/5), linear (peak at 1/5), …"""
    milestones: tuple[float, ...] = MultiStep.milestones
    """Where multistep decays, as fractions of the run."""
    decay: float = MultiStep.decay
    """The factor of multistep at a milestone, and of exponential after an epoch."""
    loss: Literal["multi-margin", "cross-entropy", "offset-cross-entropy", "certificate"] = "multi-margin"
    """What is minimised."""
    margin: float = MultiMargin.margin
    """The margin of multi-margin."""
    offset: float = OffsetCrossEntropy.offset
    """The amount by which offset-cross-entropy lowers the logit of the true class."""
    temperature: float = OffsetCrossEntropy.temperature
    """The divisor of the logits in offset-cross-entropy."""
    gamma: float = CertificateRegularisation.gamma
    """The weight of the certificate in the loss `certificate`."""

    @classmethod
    def of(cls, recipe: Recipe) -> "Choices":
        """The flags of a recipe; numbers that it does not use have the defaults above."""
        names = asdict(cls())
        return cls(**{name: value for name, value in recipe.flat().items() if name in names})


@dataclass(frozen=True)
class Train:
    """Train a network by its published recipe; each flag below changes one value of it."""

    run: Run = field(default_factory=Run)
    choices: Choices = field(default_factory=Choices)
    resume: bool = False
    """Resume the run in --out after its last checkpoint, as if it had not stopped."""


def chosen(arguments: Train) -> Run:
    """The run of the flags that were typed. A number that the chosen loss, schedule or optimiser lacks is refused."""
    run = arguments.run
    before, after = asdict(Choices.of(run.recipe)), asdict(arguments.choices)
    changes = {name: value for name, value in after.items() if value != before[name]}
    return replace(run, recipe=run.recipe.vary(**changes))


def defaults(words: Sequence[str]) -> Train:
    """The defaults of all flags: the recipe for a model, data and budget, or the flags of the run that is resumed."""
    parser = argparse.ArgumentParser(prog="lipflow train", add_help=False, allow_abbrev=False)
    parser.add_argument("--model")
    parser.add_argument("--data")
    parser.add_argument("--seed", default=Run.seed)
    parser.add_argument("--budget")
    parser.add_argument("--out")
    parser.add_argument("--resume", action="store_true")
    seen, _ = parser.parse_known_args(words)
    model, data = seen.model or Run.model, seen.data or Run.data
    if not seen.resume:
        published = Run.of(model, data, None if seen.budget == "None" else seen.budget)
        if not {"-h", "--help"} & set(words):
            _require_both(seen.model, seen.data)
        return Train(published, Choices.of(published.recipe))
    from lipflow.train.record import Record

    folder = Path(seen.out) if seen.out else replace(Run.of(model, data), seed=seen.seed).folder
    stored = replace(Record.read(folder).run, out=folder)
    return Train(stored, Choices.of(stored.recipe), resume=True)


def _require_both(model: str | None, data: str | None) -> None:
    """Refuse --model without --data and --data without --model: the default of the other one is rarely meant."""
    if data is None and model not in (None, Run.model):
        raise ValueError(f"--model {model} needs --data, such as --data cifar10; without it, it would be {Run.data}")
    if model is None and data not in (None, Run.data):
        raise ValueError(f"--data {data} needs --model, such as --model cpl-fast; without it, it would be {Run.model}")


def train(arguments: Train) -> int:
    """Train, or resume."""
    from lipflow.train.loop import train

    train(chosen(arguments), arguments.resume)
    return 0
