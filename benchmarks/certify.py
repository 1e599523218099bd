"""How fast is a frozen network, compared with the live one?

    python benchmarks/certify.py                          # a few minutes on two cores
    python benchmarks/certify.py --only soc-10 --images 128

Weights are fresh and images random. `certified` is `lipflow.certify` in float64, `live` the evaluation of the same
network in float32, both on all cores. The two alternate, and a time is the least over the rounds. `freezing` bounds
every norm, once per network.
"""

import argparse
import platform

import torch
from rich.console import Console
from rich.table import Table
from timing import seconds

import lipflow
from lipflow.machine import keep_freed_memory

MODELS = ("cpl-fast", "cpl-s", "cayley-kw3", "soc-10")


def measure(name: str, images: int, rounds: int) -> tuple[float, float, float]:
    """Seconds to freeze, and images per second, certified and live."""
    torch.manual_seed(0)
    network, x = lipflow.build(name).eval(), torch.rand(images, 3, 32, 32)
    frozen: list[lipflow.Frozen] = []
    freezing = seconds(lambda: frozen.append(lipflow.freeze(network)))
    times: dict[str, list[float]] = {"certified": [], "live": []}
    with torch.no_grad():
        for _ in range(rounds + 1):  # the first one warms up
            times["certified"].append(seconds(lambda: lipflow.certify(frozen[0], x)))
            times["live"].append(seconds(lambda: [network(part) for part in x.split(64)]))
    return freezing, images / min(times["certified"][1:]), images / min(times["live"][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=MODELS, metavar="MODEL", help="measure only these models")
    parser.add_argument("--images", type=int, default=128, help="number of images in a round")
    parser.add_argument("--rounds", type=int, default=2, help="number of timed rounds")
    arguments = parser.parse_args()
    keep_freed_memory()
    view = Table("model", "freezing", "certified", "live, float32", "live / certified")
    for name in arguments.only:
        freezing, certified, live = measure(name, arguments.images, arguments.rounds)
        view.add_row(name, f"{freezing:.1f} s", f"{certified:.3g}/s", f"{live:.3g}/s", f"{live / certified:.1f}")
    console = Console()
    console.print(f"{platform.machine()}, {torch.get_num_threads()} threads, images per second")
    console.print(view)


if __name__ == "__main__":
    main()
