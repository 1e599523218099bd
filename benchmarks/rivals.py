"""What does a training step cost, for one layer of each kind at equal shapes and for each model?

Seen so far, in four runs on two shared cores, so as ranges, in times a plain layer. Convolution: CPL 1.8
to 4.2, BCOP 2.2 to 3.3, Cayley and SOC 6 to 28. Dense: CPL 2.3 to 18, SOC 6 to 26, Cayley 24 to 190, Björck about 2000.
This does not tell CPL and BCOP convolutions apart, and times of whole models spread too much to rank them. Parameters
do not depend on the load, and peak memory hardly. Run it on an idle machine before quoting a time.

    python benchmarks/rivals.py                          # about ten minutes on two cores
    python benchmarks/rivals.py --only cpl-s,soc-10      # some rows
    python benchmarks/rivals.py --batch 64

Each row is a process of its own, so that its peak memory is its own: the greatest resident size, less what Python and
torch took before the layer was made. A step is forward, backward and SGD; the time is the least of three after one
more, as a busy machine only ever adds. Rows of one run are comparable; between machines compare ratios.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

STEPS = 3


class Row(NamedTuple):
    """What is measured: how to make it, and the shape of one input."""

    make: Callable[[], Any]
    shape: tuple[int, ...]


def rows() -> dict[str, dict[str, Row]]:
    """All rows, by table."""
    from torch import nn

    import lipflow

    image, features = (32, 32, 32), (512,)
    convolutions = {
        "torch (no bound)": lambda: nn.Conv2d(32, 32, 3, padding=1),
        "spectral": lambda: lipflow.spectral_conv(32, 32),
        "reshaped": lambda: lipflow.reshaped_conv(32, 32),
        "cpl": lambda: lipflow.cpl_conv(32, 32),
        "proximal": lambda: lipflow.proximal(32, 32, 3),
        "cayley (flow)": lambda: lipflow.cayley(32, 3),
        "cayley": lambda: lipflow.cayley_conv(32, 32),
        "soc": lambda: lipflow.soc_conv(32, 32),
        "bcop": lambda: lipflow.bcop_conv(32, 32),
    }
    dense = {
        "torch (no bound)": lambda: nn.Linear(512, 512),
        "spectral": lambda: lipflow.spectral_dense(512, 512),
        "cpl": lambda: lipflow.cpl_dense(512, 512),
        "proximal": lambda: lipflow.proximal(512, 512),
        "cayley (flow)": lambda: lipflow.cayley(512),
        "cayley": lambda: lipflow.cayley_dense(512, 512),
        "soc": lambda: lipflow.soc_dense(512, 512),
        "björck": lambda: lipflow.bjorck_dense(512, 512),
    }
    models = [name for name in lipflow.list_models() if name not in ("cpl", "cpl-digits")]
    return {
        "convolution, 32 channels at 32×32, 3×3": {k: Row(make, image) for k, make in convolutions.items()},
        "dense, 512 features": {k: Row(make, features) for k, make in dense.items()},
        "model, CIFAR-10": {name: Row(lambda name=name: lipflow.build(name), (3, 32, 32)) for name in models},
    }


def measure(table: str, name: str, batch: int) -> dict[str, float]:
    """Parameters, seconds of a training step, and peak memory in MB: run in a process of its own."""
    import torch

    def train(module: torch.nn.Module, x: torch.Tensor, steps: int) -> list[float]:
        optimiser, seconds = torch.optim.SGD(module.parameters(), lr=1e-3), []
        for _ in range(steps):
            start = time.perf_counter()
            optimiser.zero_grad()
            module(x).square().mean().backward()
            optimiser.step()
            seconds.append(time.perf_counter() - start)
        return seconds

    def peak() -> float:
        """In MB: ru_maxrss counts bytes on macOS, and kilobytes elsewhere."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)

    torch.manual_seed(0)
    row = rows()[table][name]
    train(torch.nn.Conv2d(1, 1, 3), torch.rand(1, 1, 8, 8), 2)  # what torch loads at first use is not the row's
    before = peak()
    module = row.make()
    seconds = train(module, torch.rand(batch, *row.shape), 1 + STEPS)
    parameters = sum(p.numel() for p in module.parameters())
    return dict(parameters=parameters, seconds=min(seconds[1:]), peak=peak() - before)


def run(table: str, name: str, batch: int) -> dict[str, float] | str:
    """`measure` in a new process: its numbers, or why there are none."""
    command = [sys.executable, __file__, "--measure", table, name, "--batch", str(batch)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]
    return json.loads(done.stdout)


def show(console: Console, table: str, measured: dict[str, dict[str, float] | str], batch: int) -> None:
    view = Table(title=f"{table}, batch {batch}", title_justify="left")
    view.add_column(table.split(",")[0])
    for column in ("parameters", "step", "times the first", "peak memory"):
        view.add_column(column, justify="right")
    first = next((m["seconds"] for m in measured.values() if not isinstance(m, str)), 1.0)
    for name, m in measured.items():
        if isinstance(m, str):
            view.add_row(name, "", "", "", m)
            continue
        count = m["parameters"]
        size = f"{count / 1e6:.2f} M" if count >= 1e5 else f"{count:.0f}"
        step = f"{m['seconds']:.2f} s" if m["seconds"] >= 1 else f"{1000 * m['seconds']:.1f} ms"
        view.add_row(name, size, step, f"{m['seconds'] / first:.1f}", f"{m['peak']:.0f} MB")
    console.print(view)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16, help="images or vectors a step")
    parser.add_argument("--only", default="", help="names of rows, separated by commas")
    parser.add_argument("--measure", nargs=2, metavar=("TABLE", "ROW"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        table, row = arguments.measure
        print(json.dumps(measure(table, row, arguments.batch)))
        return
    console, only = Console(), set(filter(None, arguments.only.split(",")))
    console.print(f"{platform.machine()}, Python {platform.python_version()}, {platform.system()}")
    for table, entries in rows().items():
        names = [name for name in entries if not only or name in only]
        if names:
            show(console, table, {name: run(table, name, arguments.batch) for name in names}, arguments.batch)


if __name__ == "__main__":
    main()
