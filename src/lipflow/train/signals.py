"""How a run ends early: asked to stop by a signal, or stopped by a loss that is no number. Without torch."""

import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType


class EndedEarly(Exception):
    """A run that did not come to the end of its schedule, and the exit code of the process that ran it."""

    exit_code = 1


class NonFiniteLoss(EndedEarly):
    """A run whose loss, or whose weights, are no longer numbers."""


class ProcessLost(EndedEarly):
    """A run on several processes, one of which has ended."""


class Interrupted(EndedEarly):
    """A run that was asked to stop, and has saved where it was. Its exit code is 128 + the signal's number."""

    def __init__(self, number: int, step: int, folder: Path) -> None:
        self.exit_code = 128 + number
        name = signal.Signals(number).name
        super().__init__(f"{name}: saved after step {step}; go on with `lipflow train --out {folder} --resume`")


class Signals:
    """Within it, SIGINT and SIGTERM are noted and not obeyed; the second one is obeyed at once.

    Signals are handled in the main thread only; elsewhere nothing is changed.
    """

    def __init__(self) -> None:
        self.received = 0
        self._before = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
