"""What the first rank writes during a run: messages and progress, log.jsonl, checkpoints and the best network.

Progress is a bar on a terminal, and one line an epoch elsewhere. The log has a line for each step and each epoch. It is
also written for TensorBoard, if that is installed.
"""

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lipflow.data import Dataset
from lipflow.models import save
from lipflow.train.budget import format_duration, parse_duration
from lipflow.train.checkpoint import Checkpoint, Checkpoints
from lipflow.train.evaluate import Accuracy
from lipflow.train.learner import Learner, diagnosis, require_finite
from lipflow.train.record import BEST, FINAL, Record, environment
from lipflow.train.run import from_json

T = TypeVar("T", bound=Sized)
SECONDS_BETWEEN_LINES = 10.0  # of progress through images
AFFECTS_BITS = ("lipflow", "commit", "torch", "machine", "processor", "device", "threads", "processes")


@dataclass
class State:
    """The numbers of a run in progress: what a checkpoint stores besides tensors."""

    step: int = 0  # steps done
    epoch_loss: float = 0.0  # summed over the images of this epoch so far
    epoch_images: int = 0
    best: float = -1.0  # the greatest validation score so far
    best_epoch: int = 0
    validation: Accuracy | None = None  # the latest
    seconds: float = 0.0  # of the training steps, before and after interruptions
    elapsed: float = 0.0  # since the start, without the time between an interruption and its resumption
    validation_seconds: float | None = None  # of the latest validation
    log_bytes: int = 0  # the length of log.jsonl

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "State":
        """The inverse of `asdict`; raise on other values."""
        accuracy = values.get("validation")
        state = from_json("state", {**values, "validation": None}, cls)
        numbers = [state.step, state.epoch_images, state.best_epoch, state.log_bytes]
        times = [state.epoch_loss, state.best, state.seconds, state.elapsed, state.validation_seconds or 0.0]
        if min(numbers) < 0 or not all(map(math.isfinite, times)):
            raise ValueError(f"a number of its state is negative or not finite: {state}")
        return replace(state, validation=None if accuracy is None else Accuracy.from_json(accuracy))


class Writer:
    """Writes the results of a run as its state changes."""

    def __init__(self, learner: Learner, state: State, record: Record, checkpoints: Checkpoints) -> None:
        self.learner, self.state, self.record, self.checkpoints = learner, state, record, checkpoints
        self.folder: Path = learner.run.folder
        self.log = Log(self.folder, state.log_bytes, state.step)
        self.display = Display(state.step, record.steps)
        self.save_every, self.saved = parse_duration(learner.run.save_every), time.monotonic()

    def plan(self, record: Record) -> None:
        """Store a new plan, before the first step that depends on it."""
        self.record = record
        record.write(self.folder)
        self.display.expect(record.steps)

    def step(self, epoch: int, loss: float, accuracy: float, rate: float) -> None:
        """Log a step: the loss of its batch, and the fraction of the batch that was classified correctly."""
        self.log.write("step", self.state.step, epoch=epoch + 1, loss=loss, accuracy=accuracy, lr=rate)
        self.display.advance(self.state.step, loss)

    def epoch(self, epoch: int, loss: float, validation: Accuracy | None) -> None:
        """Log an epoch, and save the network if it has the best estimated validation score so far."""
        epochs = -(-self.record.steps // self.learner.steps_per_epoch)
        line, values = f"epoch {epoch + 1}/{epochs}  loss {loss:.4f}", {}
        if validation is not None:
            line += f"  {validation.describe('estimated')}"
            values = {"validation": {"clean": validation.clean, "certified_estimated": validation.certified}}
            if validation.score >= self.state.best:  # prefer the later epoch on ties
                self.state.best, self.state.best_epoch = validation.score, epoch + 1
                save(self.learner.network, self.folder / BEST)
        seconds = round(self.state.seconds, 3)
        self.log.write("epoch", self.state.step, epoch=epoch + 1, loss=loss, seconds=seconds, **values)
        self.display.epoch(line)

    def exact(self, found: Accuracy) -> None:
        """Log the exact accuracy on validation images."""
        self.log.write("exact", self.state.step, images=found.images, clean=found.clean, certified=found.certified)

    @property
    def due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return time.monotonic() - self.saved >= self.save_every

    def save(self) -> None:
        """Write a checkpoint; raise on NaN or infinite weights."""
        require_finite(self.learner.network, self.state.step)
        self.state.log_bytes = self.log.sync()
        self.checkpoints.save(Checkpoint(self.state.step, self.learner.tensors(), asdict(self.state)))
        self.saved = time.monotonic()

    def say(self, text: str) -> None:
        """Print a message."""
        self.display.say(text)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *error: object) -> None:
        self.display.close()
        self.log.close()


class Log:
    """log.jsonl from byte `position` on. Lines that a killed process wrote after its last checkpoint are removed."""

    def __init__(self, folder: Path, position: int, step: int) -> None:
        self._file = (folder / "log.jsonl").open("ab")
        self._file.truncate(min(position, self._file.tell()))
        self._file.seek(0, os.SEEK_END)
        self._board = _tensorboard(folder, step)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Write one line and flush it."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}).encode() + b"\n")
        self._file.flush()
        if self._board is not None:
            for name, value in _scalars(kind, values):
                self._board.add_scalar(name, value, step)

    def sync(self) -> int:
        """Force the log to the disk, and return its length in bytes."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _scalars(path: str, values: dict[str, Any]) -> list[tuple[str, float]]:
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _scalars(f"{path}/{name}", value)
        elif isinstance(value, int | float):
            found.append((f"{path}/{name}", value))
    return found


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # it is not installed
        return None
    except Exception as error:  # it is installed, but does not work with other installed packages
        warnings.warn(f"TensorBoard cannot be imported and is not used: {error}", stacklevel=2)
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)


# Progress


class Display:
    """Messages and the progress of a run: a bar on a terminal, lines elsewhere."""

    def __init__(self, done: int, steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self.console = Console(soft_wrap=True, markup=False, emoji=False, highlight=False)
        columns = BarColumn(), TextColumn("{task.description}", markup=False)
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=steps, completed=done)
        self.first, self.done, self.steps, self.began = done, done, steps, time.monotonic()
        self.bar.start()

    @property
    def pace(self) -> str:
        """The steps per second of this process, and the time that the remaining steps take at that speed."""
        rate = (self.done - self.first) / max(time.monotonic() - self.began, 1e-9)
        left = format_duration((self.steps - self.done) / max(rate, 1e-9))
        return f"step {self.done}/{self.steps}  {rate:.3g} steps/s  {left} left"

    def say(self, text: str) -> None:
        """Print a message."""
        self.console.print(text)

    def epoch(self, text: str) -> None:
        """Print the line of an epoch."""
        self.say(text if self.console.is_terminal else f"{text}  [{self.pace}]")

    def advance(self, step: int, loss: float) -> None:
        """Show that `step` steps are done."""
        self.done = step
        if not self.bar.disable:
            self.bar.update(self.task, completed=step, description=f"loss {loss:.4f}  {self.pace}")

    def expect(self, steps: int) -> None:
        """Change the number of steps."""
        self.steps = steps
        self.bar.update(self.task, total=steps)

    def close(self) -> None:
        """Restore the terminal."""
        self.bar.stop()


def with_progress(
    parts: Sequence[T], verb: str, say: Callable[[str], object], seconds: float | None = None
) -> Iterator[T]:
    """Iterate over parts of some images; call `say` with the progress at intervals of `seconds`."""
    total, done, began = sum(map(len, parts)), 0, time.monotonic()
    last, seconds = began, SECONDS_BETWEEN_LINES if seconds is None else seconds
    for part in parts:
        yield part
        done += len(part)
        if (now := time.monotonic()) - last >= seconds and done < total:
            rate = done / max(now - began, 1e-9)
            say(f"{verb} {done}/{total} images  {rate:.3g} images/s  {format_duration((total - done) / rate)} left")
            last = now


# Messages


def opening_message(record: Record, learner: Learner, data: Dataset, state: State) -> str:
    """The model, the data and the device; for a resumed run also how its environment has changed."""
    run, steps, parameters = learner.run, record.steps, sum(p.numel() for p in learner.network.parameters())
    epochs = steps / learner.steps_per_epoch
    where = f"{learner.ranks.device}" + (f" × {learner.ranks.world}" if learner.ranks.world > 1 else "")
    lines = [
        f"{run.model} on {data.name}: {parameters:,} parameters; {len(data.train)} training and "
        f"{len(data.validation)} validation images; "
        f"{steps} steps ({epochs:.4g} epoch{'' if epochs == 1 else 's'}) on {where}"
    ]
    if run.budget:
        lines.append(f"the number of steps is adapted to the budget of {run.budget} during the run")
    if state.step:
        lines.append(f"continuing after step {state.step}")
    now = environment(learner.ranks)
    changed = [f"{k} {v} → {now[k]}" for k, v in record.environment.items() if k in AFFECTS_BITS and now[k] != v]
    if changed:
        lines.append(f"the result may differ from that of an uninterrupted run: {', '.join(changed)}")
    return "\n".join(lines)


def closing_message(learner: Learner, state: State, found: Accuracy | None) -> str:
    """The time that the run took, and its accuracy on validation images."""
    folder = learner.run.folder
    lines = [f"{state.step} steps in {format_duration(state.seconds)}; {folder / FINAL} is the final network"]
    if learner.run.budget:
        took = format_duration(state.elapsed)
        lines.append(f"the schedule ended after {took}, with a budget of {learner.run.budget}")
    if state.validation:
        lines.append(f"on validation images: {state.validation.describe('estimated')}")
        lines.append(f"{folder / BEST} is the best by that estimate, of epoch {state.best_epoch}")
    if found is not None:
        lines.append(f"on {found.images} validation images, by the frozen final network: {found.describe('exact')}")
    lines.append(f"next: lipflow certify {folder}")
    return "\n".join(lines)


def divergence_message(loss: float, step: int, rate: float, record: Record, learner: Learner, saved: list[int]) -> str:
    """The step at which the loss became NaN or infinite, the weights at that step, and the last checkpoint."""
    last = f"the last checkpoint is of step {saved[0]}" if saved else "there is no checkpoint yet"
    return (
        f"the loss is {loss} at step {step + 1} of {record.steps} (learning rate {rate:.3g}).\n"
        f"{diagnosis(learner.network)}\n{last}; train again with a lower --lr"
    )
