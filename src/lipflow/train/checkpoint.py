"""Weights and checkpoints on disk, as safetensors (tensors) and JSON (numbers): loading a file executes no code.

Note [how a checkpoint is written]
    checkpoints/step-00000120.safetensors is written to a temporary file, synced to the disk and renamed; then
    step-00000120.sha256, which `sha256sum -c` reads too, is written in the same way. A checkpoint exists once its
    digest exists, and is complete if the digest matches. The last two are kept, so a complete one always exists.
"""

import json
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lipflow.files import save_tensors, sha256, write_atomic
from lipflow.models import Network, build

KEPT_CHECKPOINTS = 2
FORMAT = 1
_FIELDS: dict[str, type] = {"format": int, "model": str, "classes": int, "in_shape": list, "sizes": dict}


# A trained network: weights, and the arguments of `lipflow.build`.


def save_model(network: Network, path: Path) -> None:
    """Write weights and buffers as safetensors, with the arguments of `lipflow.build` as metadata."""
    if network.name is None:
        raise ValueError(
            "only a network made by lipflow.build(name, ...) can be saved, as a file is built again by that name"
        )
    spec = {
        "format": FORMAT,
        "model": network.name,
        "classes": network.classes,
        "in_shape": list(network.in_shape),
        "sizes": network.sizes,
    }
    tensors = {name: _plain(tensor) for name, tensor in network.state_dict().items()}
    metadata = {"lipflow": json.dumps(spec, sort_keys=True)}
    write_atomic(path, lambda temporary: save_tensors(tensors, temporary, metadata))


def load_model(path: Path | str) -> Network:
    """The network that `save_model` wrote, in evaluation mode. The metadata is checked, and never executed."""
    tensors, metadata = _read(Path(path))
    try:
        spec = json.loads(metadata.get("lipflow", "null"))
        if isinstance(spec, dict) and "primitives" in spec:
            raise ValueError("it is a frozen network: lipflow.Frozen.load(path)")
        if not isinstance(spec, dict) or {k: type(v) for k, v in spec.items()} != _FIELDS:
            raise ValueError(f"its metadata is not that of a lipflow model: {str(spec)[:200]}")
        if spec["format"] != FORMAT:
            raise ValueError(f"it has format {spec['format']}, and this lipflow reads {FORMAT}")
        with torch.random.fork_rng(devices=[]):  # building draws weights: keep the state of the caller's generator
            network = build(spec["model"], spec["classes"], tuple(spec["in_shape"]), **spec["sizes"])
        network.load_state_dict(tensors)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be loaded: {' '.join(str(error).split())}") from error
    return network.eval()


# Checkpoints of a run in progress.


class Checkpoint(NamedTuple):
    """The state after `step` steps: tensors by name, and the numbers of the training loop."""

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
        """Write a checkpoint, then remove all but the latest."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path, digest = self._paths(checkpoint.step)
        digest.unlink(missing_ok=True)  # of an earlier file of this step, which is replaced now
        tensors = {name: _plain(tensor) for name, tensor in checkpoint.tensors.items()}
        metadata = {"lipflow": json.dumps({"step": checkpoint.step, "numbers": checkpoint.numbers})}
        write_atomic(path, lambda temporary: save_tensors(tensors, temporary, metadata))
        line = f"{sha256(path)}  {path.name}\n"
        write_atomic(digest, lambda temporary: temporary.write_text(line))
        for step in self.steps()[KEPT_CHECKPOINTS:]:
            self._remove(step)

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of a step; a damaged one raises a ValueError."""
        path, digest = self._paths(step)
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        if digest.read_bytes().split() != [sha256(path).encode(), path.name.encode()]:
            raise ValueError(f"{path} does not have the digest in {digest.name}: it is damaged or was changed")
        tensors, metadata = _read(path)
        state = json.loads(metadata["lipflow"])
        if state["step"] != step:
            raise ValueError(f"{path} is of step {state['step']}")
        return Checkpoint(step, tensors, state["numbers"])

    def latest(self) -> Checkpoint | None:
        """The latest complete checkpoint, with a warning for each damaged one; None if there is no checkpoint."""
        wrong = []
        for step in self.steps():
            try:
                checkpoint = self.load(step)
            except (
                ValueError,
                TypeError,
                KeyError,
            ) as error:  # not OSError: a file that cannot be read now may be complete
                wrong.append(str(error))
                continue
            for message in wrong:
                warnings.warn(f"{message}; continuing from step {step} instead", stacklevel=2)
            return checkpoint
        if wrong:
            raise ValueError(f"no checkpoint in {self.folder} is complete: {'; '.join(wrong)}")
        return None

    def tidy(self, step: int) -> None:
        """Before continuing from `step`: remove later checkpoints, which are damaged, and partly written files."""
        for later in self.steps():
            if later > step:
                self._remove(later)
        for part in self.folder.glob(".*.part"):
            part.unlink(missing_ok=True)
        for path in self.folder.glob("step-*.safetensors"):
            if not path.with_suffix(".sha256").exists():
                path.unlink(missing_ok=True)

    def _remove(self, step: int) -> None:
        for path in reversed(self._paths(step)):  # the digest first: without it the checkpoint does not exist
            path.unlink(missing_ok=True)

    def _paths(self, step: int) -> tuple[Path, Path]:
        path = self.folder / f"step-{step:08d}.safetensors"
        return path, path.with_suffix(".sha256")


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous()


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from None
