"""Trained networks that come with the package: `lipflow.load("cpl-fast-cifar10")`.

Each is the folder of a finished run, with weights rounded to bfloat16. What is certified is the rounded network.
"""

import difflib
import filecmp
import shutil
from functools import partial
from pathlib import Path
from typing import Literal

from lipflow.files import write_atomic
from lipflow.models import Network
from lipflow.models.file import read
from lipflow.train.record import FINAL, network_file

_HERE = Path(__file__).parent
FILES = ("run.json", FINAL)
NAMES = tuple(sorted(folder.name for folder in _HERE.iterdir() if (folder / FINAL).is_file()))


def load(source: Path | str, network: Literal["final", "best"] = "final") -> Network:
    """Load a trained network in evaluation mode.

    `source` is the name of a pretrained network, the folder of a finished run, its name in runs/, or a .safetensors
    file. Of a run, `network` chooses the network at the end of its schedule ("final"), or the one with the most
    certified validation images ("best"). Nothing in a file is executed.
    """
    path = _HERE / str(source) if str(source) in NAMES and not Path(source).exists() else _found(Path(source))
    if path.is_file() and path.suffix != ".safetensors":
        raise ValueError(f"{path} is not a .safetensors file; load a state dict with build(...).load_state_dict")
    return read(path if path.is_file() else network_file(path, network))


def _found(run: Path) -> Path:
    """Return a folder or a file by its path, or by its name in runs/."""
    named = Path("runs") / run
    if run.exists() or named.exists():
        return run if run.exists() else named
    known = [*NAMES, *(path.name for path in Path("runs").glob("*") if path.is_dir())]
    longer = [name for name in known if name.startswith(str(run))]
    near = longer or difflib.get_close_matches(str(run), known, 1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"the pretrained networks are {', '.join(NAMES)}"
    raise ValueError(f"there is no folder {run}, here or in runs/, and no pretrained network of that name; {hint}")


def folder_of(run: Path) -> Path:
    """Return the folder of a run, by path or by name in runs/; a pretrained network is first copied to runs/.

    Several processes may copy at the same time. Raise if runs/ has another run of that name.
    """
    if run.exists() or str(run) not in NAMES:
        return _found(run)
    folder = Path("runs") / run
    missing = [name for name in FILES if not (folder / name).exists()]
    same = all(filecmp.cmp(folder / n, _HERE / run / n, shallow=False) for n in FILES if n not in missing)
    others = any(path.name not in FILES for path in folder.glob("[!.]*"))
    if not same or (others and missing):
        raise ValueError(f"{folder} is not the pretrained network {run}; for that folder give ./{folder}, or move it")
    for name in missing:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / name, partial(shutil.copyfile, _HERE / run / name))
    if missing:
        print(f"copied the pretrained network {run} to {folder}")
    return folder
