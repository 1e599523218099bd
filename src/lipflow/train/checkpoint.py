"""Checkpoints on disk, as safetensors (tensors) and JSON (numbers): loading a file executes no code.

Note [how a checkpoint is written]
    checkpoints/step-00000120.safetensors is written to a temporary file, synced to the disk and renamed; then
    step-00000120.sha256, which `sha256sum -c` reads too, is written in the same way. A checkpoint exists once its
    digest exists, and is complete if the digest matches. The last two are kept, so there is always a complete one.
"""

import json
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lipflow.files import read_tensors, save_tensors, sha256, write_text
from lipflow.untrusted import json_object, mapping, read_text

KEPT_CHECKPOINTS = 2


class Checkpoint(NamedTuple):
    """The state after `step` steps: tensors by name, and the `State` of the training loop as JSON values."""

    step: int
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]


class Checkpoints:
    """The checkpoints in a folder: see Note [how a checkpoint is written]."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        """The steps of the checkpoints that have a digest, the latest first."""
        names = (re.fullmatch(r"step-(\d+)\.sha256", path.name) for path in self.folder.glob("step-*.sha256"))
        return sorted((int(name[1]) for name in names if name), reverse=True)

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then remove all but the latest two."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path, digest = self._paths(checkpoint.step)
        digest.unlink(missing_ok=True)  # of an earlier file of this step, which is replaced now
        save_tensors(checkpoint.tensors, path, {"lipflow": json.dumps({"numbers": checkpoint.numbers})})
        write_text(digest, f"{sha256(path)}  {path.name}\n")
        for step in self.steps()[KEPT_CHECKPOINTS:]:
            self._remove(step)

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of a step; ValueError if it is damaged."""
        path, digest = self._paths(step)
        if not path.exists():
            raise ValueError(f"{path} is missing")
        if read_text(digest).split() != [sha256(path).encode(), path.name.encode()]:
            raise ValueError(f"{path} does not have the digest in {digest.name}: it is damaged or was changed")
        tensors, metadata = read_tensors(path)
        stored = json_object(path, metadata.get("lipflow", "").encode())
        return Checkpoint(step, tensors, mapping(stored.get("numbers"), path, "numbers"))

    def latest(self) -> Checkpoint | None:
        """The latest complete checkpoint, with a warning for each damaged one; None if there is no checkpoint."""
        damaged = []
        for step in self.steps():
            try:
                checkpoint = self.load(step)
            except ValueError as error:  # not OSError: a file that cannot be read now may be complete
                damaged.append(str(error))
                continue
            for message in damaged:
                warnings.warn(f"{message}; continuing from step {step} instead", stacklevel=2)
            return checkpoint
        if damaged:
            raise ValueError(f"no checkpoint in {self.folder} is complete: {'; '.join(damaged)}")
        return None

    def tidy(self, step: int) -> None:
        """Remove the checkpoints after `step`, which are damaged, and incomplete files."""
        for later in self.steps():
            if later > step:
                self._remove(later)
        for part in self.folder.glob(".*.part"):
            part.unlink(missing_ok=True)
        for path in self.folder.glob("step-*.safetensors"):
            if not path.with_suffix(".sha256").exists():
                path.unlink(missing_ok=True)

    def path(self, step: int) -> Path:
        """The file of a checkpoint."""
        return self._paths(step)[0]

    def _remove(self, step: int) -> None:
        for path in reversed(self._paths(step)):  # the digest first: without it the checkpoint does not exist
            path.unlink(missing_ok=True)

    def _paths(self, step: int) -> tuple[Path, Path]:
        path = self.folder / f"step-{step:08d}.safetensors"
        return path, path.with_suffix(".sha256")
