"""`lipflow train`: its flags and their defaults, which need no torch."""

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
    """The optimiser, the schedule and the loss of a recipe, with their parameters, as flat flags."""

    optimiser: Literal["adam", "sgd"] = "adam"
    """The optimiser."""
    lr: float = SGD.lr
    """The largest learning rate."""
    weight_decay: float = SGD.weight_decay
    """Weight decay, for all parameters except those of activations."""
    momentum: float = SGD.momentum
    """Momentum of sgd (adam has its default betas)."""
    nesterov: bool = SGD.nesterov
    """Use Nesterov's momentum, for sgd."""
    schedule: Literal["triangular", "linear", "multistep", "exponential", "constant"] = "triangular"
    """The learning rate over the run; triangular is the paper's (peak at 2/5, lr/20 at 4/5), linear peaks at 1/5."""
    milestones: tuple[float, ...] = MultiStep.milestones
    """The fractions of the run at which multistep decays."""
    decay: float = MultiStep.decay
    """The factor of multistep at a milestone, and of exponential after an epoch."""
    loss: Literal["multi-margin", "cross-entropy", "offset-cross-entropy", "certificate"] = "multi-margin"
    """The loss."""
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
        """Return the flags of a recipe; parameters that it does not use have the defaults above."""
        names = asdict(cls())
        return cls(**{name: value for name, value in recipe.flat().items() if name in names})


@dataclass(frozen=True)
class Train:
    """Train a network by its published recipe; each flag below changes one value of it."""

    run: Run = field(default_factory=Run)
    choices: Choices = field(default_factory=Choices)
    resume: bool = False
    """Resume the run in --out from its last checkpoint, with the same result as without the interruption."""


def chosen(arguments: Train) -> Run:
    """Return the run with the flags that were typed; raise if one does not belong to the chosen loss, schedule, …"""
    recipe = arguments.run.recipe
    before = asdict(Choices.of(recipe))
    changes = {name: value for name, value in asdict(arguments.choices).items() if value != before[name]}
    return replace(arguments.run, recipe=recipe.vary(**changes))


def defaults(words: Sequence[str]) -> Train:
    """Return the defaults of all flags: the recipe of a model, data and budget, or the flags of the resumed run."""
    parser = argparse.ArgumentParser(prog="lipflow train", add_help=False, allow_abbrev=False)
    parser.add_argument("--model")
    parser.add_argument("--data")
    parser.add_argument("--seed", default=Run.seed)
    parser.add_argument("--budget")
    parser.add_argument("--out")
    parser.add_argument("--resume", action="store_true")
    given, _ = parser.parse_known_args(words)
    model, data = given.model or Run.model, given.data or Run.data
    if not given.resume:
        published = Run.of(model, data, None if given.budget == "None" else given.budget)
        if not {"-h", "--help"} & set(words):
            _require_both(given.model, given.data)
        return Train(published, Choices.of(published.recipe))
    from lipflow.train.record import Record

    folder = Path(given.out) if given.out else replace(Run.of(model, data), seed=given.seed).folder
    stored = replace(Record.read(folder).run, out=folder)
    return Train(stored, Choices.of(stored.recipe), resume=True)


def _require_both(model: str | None, data: str | None) -> None:
    """Raise if only one of --model and --data is given: the default of the other is rarely wanted."""
    if data is None and model not in (None, Run.model):
        raise ValueError(f"--model {model} needs --data, such as --data cifar10; the default is {Run.data}")
    if model is None and data not in (None, Run.data):
        from lipflow.data import SOURCES

        if data not in SOURCES:
            raise ValueError(f"no dataset is called {data!r}; use one of {', '.join(SOURCES)}")
        raise ValueError(f"--data {data} needs --model, such as --model cpl-fast; the default is {Run.model}")


def train(arguments: Train) -> int:
    """Train a network, or resume its training."""
    from lipflow.train.loop import train

    train(chosen(arguments), arguments.resume)
    return 0
