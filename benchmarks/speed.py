"""How do the time and memory of lipflow compare with the paper's Algorithm 1 written literally in PyTorch?

    python benchmarks/speed.py                    # cpl-s, batch 256: about five minutes on two cores
    python benchmarks/speed.py --batch 64 --rounds 1

Aims, on cpl-s at batch 256 and two cores: a training step is at least 4 times faster, at no more than 60% of the peak
memory; float32 evaluation is at least twice as fast; certifying in float64 is no slower than the literal evaluation in
float32; and a training step reaches 60% of a roofline measured here: the same matrix products, with each activation
read and written once, and nothing else. A step with products in bfloat16 (`--precision bfloat16`) is measured too.

Each measurement runs in its own process, so that its peak memory (the greatest resident size) is its own. lipflow runs
with the settings of the command line program (`lipflow.machine`), the literal form without them. The processes
alternate, and a time is the least of all rounds, as other processes can only add time.
"""

import argparse
import json
import platform
import subprocess
import sys

import torch
from literal import literal
from rich.console import Console
from rich.table import Table
from timing import gigaflops, least_seconds, peak_megabytes
from torch.nn import functional as F

import lipflow
from lipflow.machine import keep_freed_memory
from lipflow.models.cpl import SIZES

MODEL = "cpl-s"


def training(network, batch: int, fused: bool, low: bool = False) -> float:
    """Seconds of a training step: forward, backward, Adam; with products in bfloat16 if `low`."""
    optimiser = torch.optim.Adam(network.train().parameters(), 1e-3, fused=fused)
    x, y = torch.rand(batch, 3, 32, 32), torch.randint(0, 10, (batch,))

    def step() -> None:
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            scores = network(x)
        F.cross_entropy(scores.float(), y).backward()
        optimiser.step()

    return least_seconds(step)


def evaluation(network, batch: int) -> float:
    """Seconds of a forward pass in evaluation mode."""
    x = torch.rand(batch, 3, 32, 32)
    with torch.no_grad():
        return least_seconds(lambda: network.eval()(x))


def certifying(batch: int) -> float:
    frozen = lipflow.freeze(lipflow.build(MODEL))
    images = torch.rand(batch, 3, 32, 32)
    return least_seconds(lambda: lipflow.certify(frozen, images))


def roofline(batch: int) -> float:
    """The products of a training step of cpl-s, and one read and write of each activation: six products a layer.

    The columns of a chunk of images fit into the cache, so the products run in chunks, as in lipflow.
    """
    sizes, chunk = SIZES[MODEL], 8
    channels, taps, positions, features = sizes["channels"], 9 * sizes["inner"], 32 * 32, 64 * sizes["channels"]
    x, z, g = (torch.rand(batch, channels, positions) for _ in range(3))
    kernel, columns = torch.rand(taps, channels), torch.rand(chunk, taps, positions)
    flat, inner, out = torch.rand(batch, features), torch.rand(batch, sizes["features"]), torch.rand(batch, features)
    weights = [torch.rand(sizes["features"], features) for _ in range(sizes["depth_linear"])]
    total = torch.rand(sizes["features"], features)

    def step() -> None:
        for _ in range(sizes["depth"]):
            for first in range(0, batch, chunk):
                part = slice(first, first + chunk)
                left = kernel.expand(len(x[part]), -1, -1)
                p = columns[: len(left)]
                torch.bmm(left, x[part], out=p)
                torch.baddbmm(x[part], left.mT, p, out=z[part])
            for first in range(0, batch, chunk):
                part = slice(first, first + chunk)
                left = kernel.expand(len(x[part]), -1, -1)
                p = columns[: len(left)]
                torch.bmm(left, g[part], out=p)
                torch.bmm(g[part], p.mT)
                torch.bmm(x[part], p.mT)
                torch.baddbmm(g[part], left.mT, p, out=z[part])
        for weight in weights:
            torch.mm(flat, weight.T, out=inner)
            torch.addmm(flat, inner, weight, out=out)
            torch.mm(out, weight.T, out=inner)
            torch.addmm(out, inner, weight, out=out)
            torch.mm(inner.T, out, out=total)
            total.addmm_(inner.T, flat)

    return least_seconds(step)


TASKS = {
    "literal training": lambda batch: training(literal(MODEL), batch, fused=False),
    "lipflow training": lambda batch: training(lipflow.build(MODEL), batch, fused=True),
    "lipflow training, bfloat16": lambda batch: training(lipflow.build(MODEL), batch, fused=True, low=True),
    "roofline": roofline,
    "literal evaluation": lambda batch: evaluation(literal(MODEL), batch),
    "lipflow evaluation": lambda batch: evaluation(lipflow.build(MODEL), batch),
    "certifying": certifying,
}

# The aims: a ratio of times or of peak memory, and its least value
RATIOS = [
    ("a training step, literal over lipflow", "literal training", "lipflow training", "seconds", 4.0),
    ("the same in bfloat16", "literal training", "lipflow training, bfloat16", "seconds", 4.0),
    ("its peak memory, literal over lipflow", "literal training", "lipflow training", "megabytes", 1 / 0.6),
    ("the roofline over a training step", "roofline", "lipflow training", "seconds", 0.6),
    ("float32 evaluation, literal over lipflow", "literal evaluation", "lipflow evaluation", "seconds", 2.0),
    ("literal float32 evaluation over certifying in float64", "literal evaluation", "certifying", "seconds", 1.0),
]


def measure(task: str, batch: int) -> dict[str, float]:
    """The time and memory of a task, measured in its own process."""
    command = [sys.executable, __file__, "--task", task, "--batch", str(batch)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2, help="number of rounds of measurements")
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        if not arguments.task.startswith("literal"):
            keep_freed_memory()
        least = TASKS[arguments.task](arguments.batch)
        print(json.dumps({"seconds": least, "megabytes": peak_megabytes()}))
        return

    found: dict[str, dict[str, float]] = {}
    for _ in range(arguments.rounds):
        for task in TASKS:
            new, old = measure(task, arguments.batch), found.get(task, {})
            found[task] = {key: min(value, old.get(key, value)) for key, value in new.items()}
    console = Console()
    table = Table("", "seconds", "images/s", "peak MB", title=f"{MODEL}, batch {arguments.batch}")
    for task, row in found.items():
        rate = arguments.batch / row["seconds"]
        table.add_row(task, f"{row['seconds']:.3g}", f"{rate:.1f}", f"{row['megabytes']:.0f}")
    console.print(table)
    table = Table("ratio", "measured", "aim")
    for label, over, under, key, aim in RATIOS:
        table.add_row(label, f"{found[over][key] / found[under][key]:.2f}", f"≥ {aim:.2f}")
    console.print(table)
    machine = f"{torch.get_num_threads()} threads, {platform.machine()}, matrix products at {gigaflops():.0f} GFLOP/s"
    console.print(f"torch {torch.__version__}, {machine}")


if __name__ == "__main__":
    main()
