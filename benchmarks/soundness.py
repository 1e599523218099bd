"""What does a sound certificate cost?

    python benchmarks/soundness.py

It measures three costs, on cpl-s with fresh weights: the radius lost to rounding; the radius lost because the step h
uses a certified norm instead of an estimate; and the time to certify in float64, compared with evaluating the literal
form of the same network in float32 with plain PyTorch. Claim: in total, less than 1e-3 of the radius is lost.
"""

import argparse
import dataclasses
import platform
import time
from fractions import Fraction

import torch
from literal import literal
from rich.console import Console
from rich.table import Table
from timing import least_seconds

import lipflow
from lipflow.certificate import from_logits
from lipflow.graph import Graph
from lipflow.node import Vertex
from lipflow.primitives import Descent
from lipflow.rounding import down

MODEL = "cpl-s"


def estimated(frozen: lipflow.Frozen) -> Graph:
    """The same network with steps from estimated norms (500 power iterations): for comparison only."""
    vertices: dict[int, Vertex] = {}
    for vertex in frozen.graph.vertices:
        p = vertex.primitive
        if isinstance(p, Descent):
            sigma = float(lipflow.norm_estimate(p.op.with_weight(p.op.weight), iterations=500))
            p = dataclasses.replace(p, h=down(2 / Fraction(sigma) ** 2))
        inputs = tuple(vertices[id(v)] for v in vertex.inputs)
        vertices[id(vertex)] = Vertex(p, inputs, vertex.shape, vertex.name)
    return Graph(tuple(vertices.values()))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=128)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    network = lipflow.build(MODEL)
    start = time.perf_counter()
    frozen = lipflow.freeze(network)
    freezing = time.perf_counter() - start
    images = torch.rand(arguments.images, *frozen.in_shape)
    sound = lipflow.certify(frozen, images)

    exact = from_logits(sound.logits, frozen.pair_bounds, 0.0)
    logits = estimated(frozen).run(images.double())
    loose = from_logits(logits, frozen.pair_bounds, 0.0)
    rounding = 1 - float(sound.radius.mean() / exact.radius.mean())
    gap = 1 - float(exact.radius.mean() / loose.radius.mean())

    plain = literal(MODEL).eval()
    certifying = arguments.images / least_seconds(lambda: lipflow.certify(frozen, images))
    evaluating = arguments.images / least_seconds(lambda: plain(images))

    table = Table("what", "value", title="The cost of soundness")
    table.add_row("E, rounding of the whole network", f"{frozen.rounding:.2e}")
    table.add_row("radius lost to rounding", f"{rounding:.2e}")
    table.add_row("radius lost to the gap of the norms", f"{gap:.2e}")
    table.add_row("freezing, once", f"{freezing:.1f} s")
    table.add_row("certifying, float64", f"{certifying:.0f} images/s")
    table.add_row("literal evaluation, float32", f"{evaluating:.0f} images/s")
    table.add_row("ratio", f"{certifying / evaluating:.2f}")
    Console().print(table)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")


if __name__ == "__main__":
    main()
