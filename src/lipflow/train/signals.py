"""How a run stops before its end: the exceptions, and the handler of SIGINT and SIGTERM. Without torch."""

import signal
import threading
from pathlib import Path
from types import FrameType


class EndedEarly(Exception):
    """A run stopped before the end of its schedule; `exit_code` is the exit code of its process."""

    exit_code = 1


class NonFiniteLoss(EndedEarly):
    """The loss or the weights of a run are NaN or infinite."""


class ProcessLost(EndedEarly):
    """One of the processes of a distributed run has ended."""


class Interrupted(EndedEarly):
    """A run received a signal and saved its state. The exit code is 128 plus the number of the signal."""

    def __init__(self, number: int, step: int, folder: Path) -> None:
        self.exit_code = 128 + number
        name = signal.Signals(number).name
        super().__init__(f"{name}: saved after step {step}; continue with `lipflow train --out {folder} --resume`")


class Signals:
    """A context that records the first SIGINT or SIGTERM in `received`; a second one takes effect at once.

    Python handles signals in the main thread only; in another thread this context does nothing.
    """

    def __init__(self) -> None:
        self.received = 0
        self._before = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._record) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.__exit__()

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
