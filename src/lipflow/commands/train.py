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
    parser.add_argument("--model", default=Run.model)
    parser.add_argument("--data", default=Run.data)
    parser.add_argument("--seed", default=Run.seed)
    parser.add_argument("--budget")
    parser.add_argument("--out")
    parser.add_argument("--resume", action="store_true")
    seen, _ = parser.parse_known_args(words)
    if not seen.resume:
        return Train(Run.of(seen.model, seen.data, seen.budget))
    from lipflow.train.record import Record

    folder = Path(seen.out) if seen.out else replace(Run.of(seen.model, seen.data), seed=seen.seed).folder
    return Train(replace(Record.read(folder).run, out=folder), resume=True)


def train(arguments: Train) -> int:
    """Run it."""
    from lipflow.train.loop import train

    train(arguments.run, arguments.resume)
    return 0
