"""Trained networks that come with the package: `lipflow.load("cpl-fast-cifar10")`.

Each is the folder of a finished run with its weights rounded to bfloat16. The rounding is part of the network: what is
certified is what is stored.
"""

import difflib
import filecmp
import shutil
from pathlib import Path
from uuid import uuid4

from lipflow.models import Network
from lipflow.train.checkpoint import load_model
from lipflow.train.record import FINAL, load_run

_HERE = Path(__file__).parent
FILES = ("run.json", FINAL)
NAMES = tuple(sorted(folder.name for folder in _HERE.iterdir() if (folder / FINAL).is_file()))


def load(source: Path | str) -> Network:
    """A trained network in evaluation mode: one of ours by name, that of a finished run, or of a .safetensors file.

    A run is named by its folder, or by its name in runs/. Nothing in the file is executed.
    """
    path = _HERE / str(source) if str(source) in NAMES and not Path(source).exists() else _found(Path(source))
    if path.is_file() and path.suffix != ".safetensors":
        raise ValueError(f"{path} is no .safetensors file; of a state dict, build the network and load_state_dict")
    return load_model(path) if path.is_file() else load_run(path)[1]


def _found(run: Path) -> Path:
    """A folder or a file by its path, or by its name in runs/."""
    named = Path("runs") / run
    if run.exists() or named.exists():
        return run if run.exists() else named
    known = [*NAMES, *(path.name for path in Path("runs").glob("*") if path.is_dir())]
    begun = [name for name in known if name.startswith(str(run))]
    near = begun or difflib.get_close_matches(str(run), known, 1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"trained networks are {', '.join(NAMES)}"
    raise ValueError(f"there is no folder {run}, here or in runs/, and no trained network of that name; {hint}")


def folder_of(run: Path) -> Path:
    """The folder that a command works in: of a run, or its name in runs/, or a pretrained one, copied there first.

    The copy appears whole or not at all, also where several processes make it; another run in its place is refused.
    """
    if run.exists() or str(run) not in NAMES:
        return _found(run)
    folder = Path("runs") / run
    if not folder.exists():
        beside = folder.with_name(f".{run}-{uuid4().hex}")
        beside.mkdir(parents=True)
        try:
            for name in FILES:
                shutil.copyfile(_HERE / run / name, beside / name)
            beside.rename(folder)
            print(f"copied the pretrained network {run} to {folder}")
        except OSError:
            shutil.rmtree(beside)
            if not folder.exists():  # else another process was faster
                raise
    same = all((folder / n).is_file() and filecmp.cmp(folder / n, _HERE / run / n, shallow=False) for n in FILES)
    if not same:
        raise ValueError(
            f"{folder} holds another run than the pretrained {run}; give its path as ./{folder}, or move it"
        )
    return folder
