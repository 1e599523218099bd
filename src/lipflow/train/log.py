"""log.jsonl: a line for every step and every epoch, as they happen; and TensorBoard, if it is installed."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

Value = float | int | str | dict[str, Any]


class Log:
    """The log of a run, from byte `position` on: what a killed process wrote after its checkpoint is cut off."""

    def __init__(self, folder: Path, position: int = 0, step: int = 0) -> None:
        self._file = (folder / "log.jsonl").open("ab")
        self._file.truncate(min(position, self._file.tell()))
        self._file.seek(0, os.SEEK_END)
        self._board = _tensorboard(folder, step)

    def write(self, kind: str, step: int, **values: Value) -> None:
        """One line, flushed at once."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}).encode() + b"\n")
        self._file.flush()
        if self._board is not None:
            for name, value in _numbers(kind, values):
                self._board.add_scalar(name, value, step)

    def position(self) -> int:
        """How many bytes are written, and safe on the disk."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _numbers(path: str, values: dict[str, Any]) -> list[tuple[str, float]]:
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _numbers(f"{path}/{name}", value)
        elif isinstance(value, int | float):
            found.append((f"{path}/{name}", value))
    return found


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # it is not installed
        return None
    except Exception as error:  # it is, and does not fit the versions of what it needs
        warnings.warn(f"TensorBoard cannot be imported, and is left out: {error}", stacklevel=2)
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
