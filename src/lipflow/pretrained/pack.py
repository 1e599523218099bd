"""Make a finished run a pretrained network of the package:

    python -m lipflow.pretrained.pack runs/best cpl-fast-cifar10

Weights are rounded to bfloat16, which halves the file; nothing of where the run was made is kept.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from lipflow.train.checkpoint import save_model
from lipflow.train.record import FINAL, Record, load_run

LIMIT = 20 * 2**20
VERSIONS = ("lipflow", "commit", "torch", "python")


def pack(run: Path, folder: Path) -> int:
    """Write run.json and the rounded weights into a folder; return the size of the weights in bytes."""
    _, network = load_run(run)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    record = Record.read(run)
    made = {name: value for name, value in record.environment.items() if name in VERSIONS}
    folder.mkdir(parents=True, exist_ok=True)
    anywhere = replace(record.run, out=None, data_dir=None)
    replace(record, run=anywhere, environment=made, exact=None).write(folder)
    save_model(network, folder / FINAL)
    return (folder / FINAL).stat().st_size


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, name = sys.argv[1:]
    size = pack(Path(source), Path(__file__).parent / name)
    print(f"{name}: {size / 2**20:.1f} MiB" + (f", more than {LIMIT >> 20}" if size > LIMIT else ""))
    sys.exit(size > LIMIT)
