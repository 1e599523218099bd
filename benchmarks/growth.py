"""How do the time and the memory of a training step grow with depth, channels, batch and image size?

    python benchmarks/growth.py                   # about ten minutes on two cores
    python benchmarks/growth.py --only depth      # with the figure of memory against depth (--figure PATH)

Aims: the step of a network of 1000 convolutional layers (30 channels, 32×32, batch 128) takes less than 6 GB; with
--recompute-activations memory grows like the square root of the depth; time grows at most in proportion to each.

Each row is measured in its own process, with the settings of the command line program. Memory is the greatest resident
size minus that of the same process before the network was built. Time is that of one step, after a step on two images.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from timing import peak_megabytes

BASE = dict(depth=20, channels=30, batch=64, size=32, inner=5, recompute=False)
ROWS: dict[str, list[dict[str, int | bool]]] = {
    "depth": [dict(depth=depth, batch=128, recompute=c) for c in (False, True) for depth in (20, 100, 250, 500, 1000)],
    "channels": [dict(channels=channels) for channels in (15, 30, 60, 120)],
    "batch": [dict(batch=batch) for batch in (16, 64, 256)],
    "size": [dict(size=size) for size in (16, 32, 64)],
}


def step(depth: int, channels: int, batch: int, size: int, inner: int, recompute: bool) -> dict[str, float]:
    """Seconds and megabytes of a training step of `depth` convolutional layers and one dense one."""
    import torch
    from torch.nn import functional as F

    import lipflow
    from lipflow.machine import keep_freed_memory

    keep_freed_memory()
    before = peak_megabytes()
    network = lipflow.build(
        "cpl", 10, (3, size, size), depth=depth, channels=channels, inner=inner, depth_linear=1, features=512
    ).train()
    network.recompute_activations(recompute)
    optimiser = torch.optim.Adam(network.parameters(), 1e-3, fused=True)
    x, y = torch.rand(batch, 3, size, size), torch.randint(0, 10, (batch,))
    start = 0.0
    for images in (2, batch):
        start = time.perf_counter()
        optimiser.zero_grad()
        F.cross_entropy(network(x[:images]), y[:images]).backward()
        optimiser.step()
    return {"seconds": time.perf_counter() - start, "megabytes": peak_megabytes() - before}


def draw(found: list[tuple[dict, dict[str, float]]], path: Path) -> None:
    """Memory against depth, with and without recomputed activations."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for recompute, label in ((False, "activations stored"), (True, "--recompute-activations")):
        rows = [(row["depth"], result["megabytes"] / 1e3) for row, result in found if row["recompute"] == recompute]
        axes.plot(*zip(*rows, strict=True), marker="o", label=label)
    axes.set(xlabel="depth", ylabel="GB of a training step", title="30 channels, 32×32, batch 128", ylim=(0, None))
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=ROWS)
    parser.add_argument("--figure", type=Path, help="write the figure of memory against depth")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(step(**json.loads(arguments.row))))
        return

    from rich.console import Console
    from rich.table import Table

    for name in [arguments.only] if arguments.only else ROWS:
        table, found = Table(name, "recomputed", "seconds", "MB", title=f"a training step against {name}"), []
        for changes in ROWS[name]:
            row = {**BASE, **changes}
            command = [sys.executable, __file__, "--row", json.dumps(row)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            result = json.loads(output.splitlines()[-1])
            found.append((row, result))
            recomputed = "yes" if row["recompute"] else "no"
            table.add_row(str(row[name]), recomputed, f"{result['seconds']:.3g}", f"{result['megabytes']:.0f}")
        Console().print(table)
        if name == "depth" and arguments.figure:
            draw(found, arguments.figure)


if __name__ == "__main__":
    main()
