"""`lipflow train`: its flags, and what they start from. Without torch until it runs."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lipflow.train.run import Run


@dataclass(frozen=True)
class Train:
    """Train a network by its published recipe; every flag below is a way to differ from it."""

    run: Run
    resume: bool = False
    """Go on with the run in --out after its last checkpoint, as if it had never stopped."""


def defaults(words: Sequence[str]) -> Train:
    """What flags that are not typed stand for: the recipe for a model, data and budget, or the run that is resumed."""
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
        return Train(published)
    from lipflow.train.record import Record

    folder = Path(seen.out) if seen.out else replace(Run.of(model, data), seed=seen.seed).folder
    return Train(replace(Record.read(folder).run, out=folder), resume=True)


def _require_both(model: str | None, data: str | None) -> None:
    """Refuse a model for the data that are ours by default, and data for the model that is: few would mean it."""
    if data is None and model not in (None, Run.model):
        raise ValueError(f"--model {model} needs --data, such as --data cifar10; without it, it would be {Run.data}")
    if model is None and data not in (None, Run.data):
        raise ValueError(f"--data {data} needs --model, such as --model cpl-fast; without it, it would be {Run.model}")


def train(arguments: Train) -> int:
    """Run it."""
    from lipflow.train.loop import train
    from lipflow.train.recipe import recipe_for, require_used

    run = arguments.run
    if not arguments.resume:
        require_used(run.recipe, recipe_for(run.model, run.data, run.budget))
    train(run, arguments.resume)
    return 0
