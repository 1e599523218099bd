"""How fast and how lean is lipflow, against the paper's Algorithm 1 written literally in PyTorch?

    python benchmarks/speed.py                    # cpl-s, batch 256: about five minutes on two cores
    python benchmarks/speed.py --batch 64 --rounds 1

Aims, on cpl-s at batch 256 and two cores: a training step is at least 4 times faster, at no more than 60% of the peak
memory; float32 evaluation is at least twice as fast; certifying in float64 is no slower than the literal evaluation in
float32; and a training step reaches 60% of a roofline measured here: the same matrix products, each activation read and
written once, and nothing else. Beside it, the step with products in bfloat16 (`--precision bfloat16`).

Each measurement is a process of its own, so that peak memory (the greatest resident size) is its own; ours run with the
settings that the command line program applies (`lipflow.machine`), the literal form with none. The processes take
turns, and a time is the least seen, as a busy machine only ever adds.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable

MODEL, STEPS = "cpl-s", 3


def seconds(function: Callable[[], object], times: int = STEPS) -> float:
    """The least time of some calls, after one more to warm up."""
    least = float("inf")
    for i in range(times + 1):
        start = time.perf_counter()
        function()
        if i:
            least = min(least, time.perf_counter() - start)
    return least


def training(network, batch: int, fused: bool, low: bool = False) -> float:
    """Seconds of a training step: forward, backward, Adam; or with products in bfloat16."""
    import torch
    from torch.nn import functional as F

    optimiser = torch.optim.Adam(network.train().parameters(), 1e-3, fused=fused)
    x, y = torch.rand(batch, 3, 32, 32), torch.randint(0, 10, (batch,))

    def step() -> None:
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            scores = network(x)
        F.cross_entropy(scores.float(), y).backward()
        optimiser.step()

    return seconds(step)


def evaluation(network, batch: int) -> float:
    """Seconds of a forward pass in evaluation mode."""
    import torch

    x = torch.rand(batch, 3, 32, 32)
    with torch.no_grad():
        return seconds(lambda: network.eval()(x))


def literal_training(batch: int) -> float:
    from literal import literal

    return training(literal(MODEL), batch, fused=False)


def literal_evaluation(batch: int) -> float:
    from literal import literal

    return evaluation(literal(MODEL), batch)


def our_training(batch: int) -> float:
    import lipflow
    from lipflow.machine import keep_freed_memory

    keep_freed_memory()
    return training(lipflow.build(MODEL), batch, fused=True)


def our_low_training(batch: int) -> float:
    import lipflow
    from lipflow.machine import keep_freed_memory

    keep_freed_memory()
    return training(lipflow.build(MODEL), batch, fused=True, low=True)


def our_evaluation(batch: int) -> float:
    import lipflow
    from lipflow.machine import keep_freed_memory

    keep_freed_memory()
    return evaluation(lipflow.build(MODEL), batch)


def certifying(batch: int) -> float:
    import torch

    import lipflow
    from lipflow.machine import keep_freed_memory

    keep_freed_memory()
    frozen = lipflow.freeze(lipflow.build(MODEL))
    images = torch.rand(batch, 3, 32, 32)
    return seconds(lambda: lipflow.certify(frozen, images))


def roofline(batch: int) -> float:
    """The products of a training step of cpl-s, and one read and write of each activation: six products a layer.

    Columns stay in the cache, so their products run in chunks of images as ours do.
    """
    import torch

    from lipflow.machine import keep_freed_memory
    from lipflow.models.cpl import SIZES

    keep_freed_memory()
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

    return seconds(step)


TASKS = {
    "literal training": literal_training,
    "lipflow training": our_training,
    "lipflow training, bfloat16": our_low_training,
    "roofline": roofline,
    "literal evaluation": literal_evaluation,
    "lipflow evaluation": our_evaluation,
    "certifying": certifying,
}

# The aims: a ratio of times, or of peak memory, and the least it should be
RATIOS = [
    ("a training step against the literal one", "literal training", "lipflow training", "seconds", 4.0),
    ("the same in bfloat16", "literal training", "lipflow training, bfloat16", "seconds", 4.0),
    ("its peak memory, literal over ours", "literal training", "lipflow training", "megabytes", 1 / 0.6),
    ("its part of the roofline", "roofline", "lipflow training", "seconds", 0.6),
    ("float32 evaluation against the literal one", "literal evaluation", "lipflow evaluation", "seconds", 2.0),
    ("certifying in float64 against the literal float32", "literal evaluation", "certifying", "seconds", 1.0),
]


def measure(task: str, batch: int) -> dict[str, float]:
    """One task in a process of its own."""
    command = [sys.executable, __file__, "--task", task, "--batch", str(batch)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2, help="how often every measurement is taken")
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        least = TASKS[arguments.task](arguments.batch)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
        print(json.dumps({"seconds": least, "megabytes": peak}))
        return

    import torch
    from rich.console import Console
    from rich.table import Table

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
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")


if __name__ == "__main__":
    main()
