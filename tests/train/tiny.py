"""Runs that take a second: a network of a few hundred parameters, on a few digits."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from lipflow.train import Run

PATIENCE = 600  # seconds after which a process hangs; on a busy machine one may take a minute
REPOSITORY = Path(__file__).parents[2]
SIZES = dict(depth=1, channels=2, inner=2, depth_linear=1, features=8)
SGD = dict(optimiser="sgd", lr=0.1)
FLAGS = ["--sizes", *(f"{name}={value}" for name, value in SIZES.items())]


def tiny(out: Path, epochs: int = 2, images: int = 60, batch_size: int = 20, **recipe) -> Run:
    """A run on `images` training images; the rest of the 1497 that are no test images are for validation."""
    base = Run()
    recipe = {"epochs": epochs, "batch_size": batch_size, **recipe}
    return replace(base, out=out, sizes=SIZES, validation=1497 - images, recipe=replace(base.recipe, **recipe))


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def start(*words: str) -> subprocess.Popen[str]:
    """`lipflow …` in a process of its own."""
    command = [sys.executable, "-m", "lipflow", *words]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lipflow(*words: str) -> str:
    """`lipflow …` to its end, which must be a good one."""
    process = start(*words)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    return output


def torchrun(*words: str, fails: bool = False) -> str:
    """`python …` in two processes that know of each other, to a good end; or, if it `fails`, all that it said."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words]
    path = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        command, env={**environment(), **path}, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr if fails else done.stdout


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def log(folder: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]
