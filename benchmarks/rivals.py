"""What does a training step cost, for one layer of each kind at equal shapes and for each model?

Results of four runs on two shared cores, as ranges of the time divided by that of a plain layer. Convolution: CPL 1.8
to 4.2, BCOP 2.2 to 3.3, Cayley and SOC 6 to 28. Dense: CPL 2.3 to 18, SOC 6 to 26, Cayley 24 to 190, Björck about 2000.
So CPL and BCOP convolutions cannot be distinguished, and times of whole models vary too much to rank them. Parameters
do not depend on the load, and peak memory hardly does. Measure on an idle machine before you quote a time.

    python benchmarks/rivals.py                          # about ten minutes on two cores
    python benchmarks/rivals.py --only cpl-s,soc-10      # some rows
    python benchmarks/rivals.py --batch 64

Each row is measured in its own process. Its peak memory is the greatest resident size minus that of the process before
the layer was made. A step is forward, backward and SGD; the time is the least of three, after one to warm up. Compare
times within one run only, and ratios between machines.
"""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from timing import least_seconds, peak_megabytes
from torch import Tensor, nn

import lipflow


class Row(NamedTuple):
    """What is measured: how to make it, and the shape of one input."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


def rows() -> dict[str, dict[str, Row]]:
    """All rows, by table."""
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
    """Parameters, seconds of a training step, and peak memory in MB, of this process."""

    def train(module: nn.Module, x: Tensor) -> float:
        optimiser = torch.optim.SGD(module.parameters(), lr=1e-3)

        def step() -> None:
            optimiser.zero_grad()
            module(x).square().mean().backward()
            optimiser.step()

        return least_seconds(step)

    torch.manual_seed(0)
    row = rows()[table][name]
    train(nn.Conv2d(1, 1, 3), torch.rand(1, 1, 8, 8))  # memory that torch takes at its first use does not count
    before = peak_megabytes()
    module = row.make()
    seconds = train(module, torch.rand(batch, *row.shape))
    parameters = sum(p.numel() for p in module.parameters())
    return dict(parameters=parameters, seconds=seconds, peak=peak_megabytes() - before)


def run(table: str, name: str, batch: int) -> dict[str, float] | str:
    """Call `measure` in a new process; return its numbers, or its error message."""
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
    parser.add_argument("--batch", type=int, default=16, help="images or vectors per step")
    parser.add_argument("--only", default="", help="measure only these rows: names, separated by commas")
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
