"""Trained networks that come with the package: `lipflow.load("cpl-fast-cifar10")`.

Each is the folder of a finished run with its weights rounded to bfloat16. The rounding is part of the network: what is
certified is what is stored.
"""

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

    Nothing in the file is executed.
    """
    path = Path(source)
    if str(source) in NAMES and not path.exists():
        path = _HERE / str(source)
    if path.suffix == ".safetensors" and path.is_file():
        return load_model(path)
    if not path.exists():
        raise ValueError(f"{str(source)!r} is no folder of a run, no file, and no name: there is {', '.join(NAMES)}")
    return load_run(path)[1]


def folder_of(run: Path) -> Path:
    """The folder that a command works in: of a run, or its name in runs/, or a pretrained one, copied there first.

    The copy appears whole or not at all, also where several processes make it; another run in its place is refused.
    """
    folder = Path("runs") / run
    if run.exists() or str(run) not in NAMES:
        return run if run.exists() or not folder.exists() else folder
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
