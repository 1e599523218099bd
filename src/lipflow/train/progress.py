"""What a person sees while a run goes on: a bar on a terminal, one line an epoch anywhere else."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, TypeVar

from lipflow.train.duration import format_duration

T = TypeVar("T", bound=Sized)
EVERY = 10.0  # seconds between two lines on images


class Progress(ABC):
    """How far a run is: its rate and the time that remains."""

    @abstractmethod
    def say(self, text: str) -> None:
        """A line that stays."""

    @abstractmethod
    def epoch(self, text: str) -> None:
        """The line of an epoch."""

    @abstractmethod
    def advance(self, step: int, loss: float) -> None:
        """`step` steps are done."""

    @abstractmethod
    def expect(self, steps: int) -> None:
        """There will be so many steps, after all."""

    @abstractmethod
    def close(self) -> None:
        """Leave the terminal as it was."""


class Lines(Progress):
    """Plain lines, for a file, a pipe or a job's output."""

    def __init__(self, done: int, steps: int) -> None:
        self.pace = Pace(done, steps)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def epoch(self, text: str) -> None:
        self.say(f"{text}  [{self.pace}]")

    def advance(self, step: int, loss: float) -> None:
        self.pace.at(step)

    def expect(self, steps: int) -> None:
        self.pace.steps = steps

    def close(self) -> None: ...


class Bar(Progress):
    """A bar that is redrawn, below lines that stay."""

    def __init__(self, console: Any, done: int, steps: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self.pace = Pace(done, steps)
        self.bar = Progress(BarColumn(), TextColumn("{task.description}"), console=console)
        self.task = self.bar.add_task("", total=steps, completed=done)
        self.bar.start()

    def say(self, text: str) -> None:
        self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def epoch(self, text: str) -> None:
        self.say(text)

    def advance(self, step: int, loss: float) -> None:
        self.pace.at(step)
        self.bar.update(self.task, completed=step, description=f"loss {loss:.4f}  {self.pace}")

    def expect(self, steps: int) -> None:
        self.pace.steps = steps
        self.bar.update(self.task, total=steps)

    def close(self) -> None:
        self.bar.stop()


class Pace:
    """Steps a second since this process began, and what that means for the rest."""

    def __init__(self, done: int, steps: int) -> None:
        self.first, self.done, self.steps, self.began = done, done, steps, time.monotonic()

    @property
    def rate(self) -> float:
        return (self.done - self.first) / max(time.monotonic() - self.began, 1e-9)

    def at(self, step: int) -> None:
        self.done = step

    def __str__(self) -> str:
        left = format_duration((self.steps - self.done) / max(self.rate, 1e-9))
        return f"step {self.done}/{self.steps}  {self.rate:.3g} steps/s  {left} left"


def told(parts: Sequence[T], verb: str, say: Callable[[str], object], every: float | None = None) -> Iterator[T]:
    """The parts of some images, one after the other; `say` is told every so many seconds how far that is."""
    total, done, began = sum(map(len, parts)), 0, time.monotonic()
    said, every = began, EVERY if every is None else every
    for part in parts:
        yield part
        done += len(part)
        if (now := time.monotonic()) - said >= every and done < total:
            say(images_pace(verb, done, total, now - began))
            said = now


def images_pace(verb: str, done: int, total: int, seconds: float) -> str:
    """A line such as: attacking 200/1000 images  12.3 images/s  1m05s left."""
    rate = done / max(seconds, 1e-9)
    return f"{verb} {done}/{total} images  {rate:.3g} images/s  {format_duration((total - done) / rate)} left"


def make_progress(done: int, steps: int) -> Progress:
    """A bar on a terminal, lines elsewhere."""
    from rich.console import Console

    console = Console()
    return Bar(console, done, steps) if console.is_terminal else Lines(done, steps)
