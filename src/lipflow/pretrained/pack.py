"""Add the network of a finished run to the package:

    python -m lipflow.pretrained.pack runs/best cpl-fast-cifar10

Weights are rounded to bfloat16, which halves the file. Paths and the description of the machine are removed from
run.json.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from lipflow.models.file import save
from lipflow.pretrained import load
from lipflow.train.record import FINAL, Record

MAX_BYTES = 20 * 2**20
VERSIONS = ("lipflow", "commit", "torch", "python")


def pack(run: Path, folder: Path) -> int:
    """Write run.json and the rounded weights into a folder; return the size of the weights in bytes."""
    network = load(run)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    record = Record.read(run)
    versions = {name: value for name, value in record.environment.items() if name in VERSIONS}
    folder.mkdir(parents=True, exist_ok=True)
    without_paths = replace(record.run, out=None, data_dir=None)
    replace(record, run=without_paths, environment=versions, exact=None).write(folder)
    save(network, folder / FINAL)
    return (folder / FINAL).stat().st_size


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, name = sys.argv[1:]
    size = pack(Path(source), Path(__file__).parent / name)
    print(f"{name}: {size / 2**20:.1f} MiB" + (f", more than {MAX_BYTES >> 20}" if size > MAX_BYTES else ""))
    sys.exit(size > MAX_BYTES)
