"""Read the folder of a run.

A folder may come from a stranger: see `lipflow.untrusted`. A file that is missing gives None; a damaged one raises a
ValueError that names the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lipflow import attack, certificate
from lipflow.attack import OUTCOME, Outcome
from lipflow.certificate import CLAIMS, ROWS, CertificateFile
from lipflow.train.record import FINAL, Record
from lipflow.untrusted import json_object, mapping, number, read_text, require


@dataclass(frozen=True)
class Epoch:
    """The accuracy on validation images after an epoch: clean, and certified by estimate."""

    number: float
    clean: float | None
    certified: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class RunResults:
    """What the folder of a run contains: its record, log, certificate and attack."""

    name: str
    folder: Path
    record: Record
    ended: bool
    losses: tuple[tuple[float, float], ...]  # (step, training loss)
    epochs: tuple[Epoch, ...]
    certificate: CertificateFile | None
    outcome: Outcome | None
    stale: bool = False  # there is an attack, but on another certificate

    @property
    def part(self) -> int:
        """The number of images that were attacked, if only the first of the certified images were; otherwise 0."""
        if self.certificate is None or self.outcome is None or len(self.outcome) == len(self.certificate.truth):
            return 0
        return len(self.outcome)

    @property
    def missing(self) -> list[str]:
        """What the run does not have yet, each with the command that adds it."""
        missing = []
        if not self.ended:
            missing.append(f"training has not ended: lipflow train --out {self.folder} --resume")
        if self.certificate is None:
            missing.append(f"no certificate yet: lipflow certify {self.folder}")
        if self.stale:
            missing.append(f"{OUTCOME} is of another certificate and is not shown: lipflow attack {self.folder}")
        elif self.outcome is None:
            missing.append(f"not attacked yet: lipflow attack {self.folder}")
        return missing


def read_all(folders: tuple[Path, ...], names: tuple[str, ...] = ()) -> list[RunResults]:
    """Read runs, in the order given. A run has the name of its folder, unless names are given."""
    if not folders:
        raise ValueError("give the folders of one or more runs, such as runs/demo")
    if names and len(names) != len(folders):
        raise ValueError(f"--names takes one name per run: {len(folders)} runs, {len(names)} names")
    by_name: dict[str, Path] = {}
    for folder, name in zip(folders, names or [f.resolve().name for f in folders], strict=True):
        if name in by_name:
            both = f"{by_name[name]} and {folder}"
            raise ValueError(f"two runs are called {name!r}: {both}; give each its own name with --names")
        by_name[name] = folder
    return [read(folder, name) for name, folder in by_name.items()]


def read(folder: Path, name: str) -> RunResults:
    """Read one run, and check that its files belong together."""
    record = Record.read(folder)
    certified, outcome, stale = None, None, False
    if (folder / CLAIMS).exists():
        certified = certificate.load(folder)
        require(certified.images.ndim == 4, folder / ROWS, "images are not (n, channels, height, width)")
        require(certified.domain == (0.0, 1.0), folder / CLAIMS, "its domain is not [0, 1], the range of pixels")
        if (folder / OUTCOME).exists():
            outcome = attack.load(folder, certified)
            stale = outcome is None
    losses, epochs = _log(folder / "log.jsonl")
    return RunResults(name, folder, record, (folder / FINAL).is_file(), losses, epochs, certified, outcome, stale)


def _log(path: Path) -> tuple[tuple[tuple[float, float], ...], tuple[Epoch, ...]]:
    """Read the losses of steps and the validations of epochs. An incomplete last line is left out."""
    texts = read_text(path).split(b"\n")[:-1] if path.exists() else []
    lines = [json_object(path, text) for text in texts]
    steps = [line for line in lines if line.get("kind") == "step"]
    losses = tuple((number(s.get("step"), path, "step"), number(s.get("loss"), path, "loss")) for s in steps)
    return losses, tuple(_epoch(line, path) for line in lines if line.get("kind") == "epoch")


def _epoch(line: Mapping[str, Any], path: Path) -> Epoch:
    epoch, validation = number(line.get("epoch"), path, "epoch"), line.get("validation")
    if validation is None:
        return Epoch(epoch, None, {})
    validation = mapping(validation, path, "validation")
    certified = mapping(validation.get("certified_estimated", {}), path, "certified_estimated")
    values = {str(key): number(value, path, key) for key, value in certified.items()}
    return Epoch(epoch, number(validation.get("clean"), path, "clean"), values)
