"""run.json: the flags of a run, its plan, its environment, the digests of its images, and its exact accuracy."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

import lipflow
from lipflow.data import Dataset
from lipflow.data.dataset import SplitName
from lipflow.files import write_text
from lipflow.machine import processor
from lipflow.train.distributed import Ranks
from lipflow.train.evaluate import Accuracy
from lipflow.train.recipe import require_threads
from lipflow.train.run import Run, from_json
from lipflow.train.schedule import Plan
from lipflow.untrusted import RUBBISH, read_json

FINAL, BEST = "model.safetensors", "best.safetensors"


@dataclass(frozen=True)
class Record:
    """A run, its plan, the environment in which it began, its exact accuracy after its end, and its images."""

    run: Run
    plan: Plan
    environment: Mapping[str, Any]
    exact: Accuracy | None = None
    data_sha256: Mapping[str, str] = field(default_factory=dict)  # of each split
    class_names: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """The number of steps of the latest plan."""
        return self.plan.steps

    def write(self, folder: Path) -> None:
        values = {
            "run": self.run.to_json(),
            "steps": self.steps,
            "environment": dict(self.environment),
            "plan": self.plan.decisions if len(self.plan.decisions) > 1 else None,
            "validation_exact": asdict(self.exact) if self.exact else None,
            "data_sha256": dict(self.data_sha256) or None,
            "class_names": self.class_names or None,
        }
        text = json.dumps({name: value for name, value in values.items() if value is not None}, indent=2)
        write_text(folder / "run.json", text + "\n")

    @classmethod
    def read(cls, folder: Path) -> "Record":
        path = folder / "run.json"
        try:
            values = read_json(path)
            run = Run.from_json(values["run"])
            plan = Plan.of(values.get("plan", values["steps"]))
            if plan.steps != values["steps"]:
                raise ValueError(f"its plan has {plan.steps} steps, and not {values['steps']}")
            environment = from_json("environment", values["environment"], dict)
            require_threads(environment.get("threads", 0))
            digests = from_json("data_sha256", values.get("data_sha256", {}), dict)
            classes = from_json("class_names", values.get("class_names", []), tuple[str, ...])
            exact = Accuracy.from_json(values["validation_exact"]) if "validation_exact" in values else None
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"{folder} holds no run: there is no {path}") from None
        except RUBBISH as error:
            missing = "it has no field " if isinstance(error, KeyError) else ""
            raise ValueError(f"{path} is not a record of a run: {missing}{' '.join(str(error).split())}") from None
        return cls(run, plan, environment, exact, digests, classes)

    def other_images(self, data: Dataset, *splits: SplitName) -> list[str]:
        """The splits whose images differ from those with which the run began, as far as these are known."""
        known = self.data_sha256
        return [split for split in splits if split in known and known[split] != data.digest(split)]


def environment(ranks: Ranks) -> dict[str, Any]:
    """What the numbers of a run depend on, besides its flags."""
    return {
        "lipflow": lipflow.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else ranks.device.type,
        "threads": torch.get_num_threads(),
        "processes": ranks.world,
    }


def network_file(folder: Path, network: Literal["final", "best"] = "final") -> Path:
    """Return the file of a finished run's network.

    `final` is the network at the end of its schedule, which the paper reports. `best` is the one with the most
    certified validation images, by estimate.
    """
    if not (folder / "run.json").is_file():
        raise ValueError(f"{folder} holds no run: there is no {folder / 'run.json'}")
    file = folder / {"final": FINAL, "best": BEST}[network]
    if network == "best" and not file.is_file() and (folder / FINAL).is_file():
        raise ValueError(f"{folder} has no {file.name}: there were no validation images to select it; use `final`")
    if not file.is_file():
        raise ValueError(f"{folder} has no {file.name}: the run has not ended; `lipflow train --out {folder} --resume`")
    return file


def _commit() -> str | None:
    """The commit of this checkout, with -dirty if code differs from it; None for an installed package."""
    package = Path(lipflow.__file__).parent
    try:
        _git(package, "ls-files", "--error-unmatch", "__init__.py")  # fails in the checkout of another project
        changed = _git(package, "status", "--porcelain", "--untracked-files=no", "--", ":/*.py", ":/*.toml")
        return _git(package, "rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
