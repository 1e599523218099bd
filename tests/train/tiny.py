"""Runs that take a second: a network of a few hundred parameters, on a few digits; and how tests interrupt them."""

import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lipflow.train import Run

ARGS = dict(depth=1, channels=2, inner=2, depth_linear=1, features=8)
SGD = dict(optimiser="sgd", lr=0.1)
FLAGS = ["--model-args", *(f"{name}={value}" for name, value in ARGS.items())]


def tiny(out: Path, epochs: int = 2, images: int = 60, batch_size: int = 20, **recipe) -> Run:
    """A run on `images` training images; the other 1497 - `images` are for validation."""
    base = Run()
    changed = base.recipe.vary(epochs=epochs, batch_size=batch_size, **recipe)
    return replace(base, out=out, model_args=ARGS, validation_images=1497 - images, recipe=changed)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def log(folder: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def before_call(patch, owner, name: str, number: int, action: Callable[[], object]) -> None:
    """Run `action` before call `number` of a function, counted from 1."""
    usual, calls = getattr(owner, name), itertools.count(1)

    def patched(*arguments, **options):
        if next(calls) == number:
            action()
        return usual(*arguments, **options)

    patch.setattr(owner, name, patched)


def fail(error: BaseException) -> None:
    raise error
