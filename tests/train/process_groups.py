"""Run on each rank by test_distributed: commands that end in every way, and the threads that they leave."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lipflow.cli import main
from lipflow.train import distributed
from lipflow.train.learner import Learner
from lipflow.train.signals import NonFiniteLoss
from tests.train.tiny import FLAGS, before_call, fail

RANK = int(os.environ["RANK"])
TASKS = Path("/proc/self/task")  # the threads of this process, on Linux


def thread_names() -> Iterator[str]:
    for task in TASKS.iterdir():
        with suppress(OSError):  # it has ended since
            yield (task / "comm").read_text().strip()


def gloo_threads() -> list[str]:
    """The names of the threads of a process group that do not end; one that was joined may be listed for a moment."""
    deadline = time.monotonic() + 10
    while (left := [name for name in thread_names() if "gloo" in name]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def signal_second_rank() -> None:
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGINT)


def fail_on_first_rank() -> None:
    if RANK == 0:
        raise ValueError("only here")


def fail_with_a_collective_begun() -> None:
    """The other process does not join the collective, and waits until torchrun ends it."""
    if RANK == 1:
        signal.pause()
    dist.all_reduce(torch.ones(1), async_op=True)
    raise ValueError("a collective has begun")


def train(out: Path, in_first_step: Callable[[], object] = lambda: None) -> int:
    with pytest.MonkeyPatch.context() as patch:
        before_call(patch, Learner, "update", 1, in_first_step)
        return main(["train", "--out", str(out), "--epochs", "1", "--certify-validation", "8", *FLAGS])


def every_ending(out: Path) -> dict[str, tuple[int, list[str]]]:
    """For every way in which a command ends, its exit code and the threads that it leaves."""
    run = str(out / "run")
    endings = {
        "trained": lambda: train(out / "run"),
        "certified": lambda: main(["certify", run, "--limit", "8"]),
        "attacked": lambda: main(["attack", run, "--gallery", "0"]),
        "refused on the first rank": lambda: train(out / "run"),
        "loss not finite": lambda: train(out / "diverged", lambda: fail(NonFiniteLoss("NaN on every rank"))),
        "signal to one rank": lambda: train(out / "signalled", signal_second_rank),
        "interrupted": lambda: train(out / "interrupted", lambda: fail(KeyboardInterrupt())),
        "error on the first rank": lambda: train(out / "failed", fail_on_first_rank),
        "trained again": lambda: train(out / "again"),
    }
    return {name: (ending(), gloo_threads()) for name, ending in endings.items()}


if __name__ == "__main__":
    distributed.LEAVE_SECONDS = 0.5
    folder = Path(sys.argv[1])
    if "--collective" in sys.argv:
        sys.exit(train(folder / "run", fail_with_a_collective_begun))
    (folder / f"rank-{RANK}.json").write_text(json.dumps(every_ending(folder)))
