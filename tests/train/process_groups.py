"""Run on each rank by test_distributed: end commands in every way, and list the threads that they leave."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from lipflow.cli import main
from lipflow.train import distributed
from lipflow.train.learner import Learner
from lipflow.train.signals import NonFiniteLoss
from tests.train.tiny import FLAGS

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


def fail(error: BaseException) -> None:
    raise error


def signalled() -> None:
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGINT)


def fail_on_first() -> None:
    if RANK == 0:
        raise ValueError("only here")


def fail_with_a_collective_begun() -> None:
    """The other process does not join the collective, and waits until torchrun ends it."""
    if RANK == 1:
        signal.pause()
    dist.all_reduce(torch.ones(1), async_op=True)
    raise ValueError("a collective has begun")


def command(words: list[str], in_step: Callable[[], None] | None = None) -> int:
    """The exit code of a command. `in_step` is called in its first training step."""
    update = Learner.update

    def patched(self: Learner, rate: float) -> None:
        Learner.update = update
        if in_step:
            in_step()
        update(self, rate)

    Learner.update = patched
    try:
        return main(words)
    finally:
        Learner.update = update


def every_ending(out: Path) -> dict[str, tuple[int, list[str]]]:
    """For every way in which a command ends, its exit code and the threads that it leaves."""

    def train(name: str, in_step: Callable[[], None] | None = None) -> int:
        return command(
            ["train", "--out", str(out / name), "--epochs", "1", "--certify-validation", "8", *FLAGS], in_step
        )

    endings = {
        "trained": lambda: train("run"),
        "certified": lambda: command(["certify", str(out / "run"), "--limit", "8"]),
        "attacked": lambda: command(["attack", str(out / "run"), "--gallery", "0"]),
        "refused on the first rank": lambda: train("run"),
        "loss not finite": lambda: train("diverged", lambda: fail(NonFiniteLoss("NaN on every rank"))),
        "signal to one rank": lambda: train("signalled", signalled),
        "interrupted": lambda: train("interrupted", lambda: fail(KeyboardInterrupt())),
        "error on the first rank": lambda: train("failed", fail_on_first),
        "trained again": lambda: train("again"),
    }
    return {name: (ending(), gloo_threads()) for name, ending in endings.items()}


if __name__ == "__main__":
    distributed.LEAVE_SECONDS = 0.5
    folder = Path(sys.argv[1])
    if "--collective" in sys.argv:
        sys.exit(command(["train", "--out", str(folder / "run"), *FLAGS], fail_with_a_collective_begun))
    (folder / f"rank-{RANK}.json").write_text(json.dumps(every_ending(folder)))
