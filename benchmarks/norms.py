"""What does a certified norm cost, and how tight is it?

Claim: `norm_bound` exceeds the norm by less than 1e-3 of it, while 100 power iterations (with which the paper's code
certifies) lie below it; it bounds all norms of cpl-s in under 30 s and of cpl-xl in under 5 minutes on two cores.

    python benchmarks/norms.py          # about a minute
    python benchmarks/norms.py --xl     # with cpl-xl, a few minutes more
    python benchmarks/norms.py --draws 24    # only the gap, over many kernels

A gap is (value - norm)/norm. The norm is that of a long Lanczos run, which is from below and has converged to the
digits shown (dense: of an SVD). A certificate needs a gap above 0.
"""

import argparse
import math
import os
import platform
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import lipflow
from lipflow import ConvOperator, ConvWeight, DenseOperator, DenseWeight, LinearOperator, norm_bound, norm_estimate

LIMITS = {"cpl-s": 30.0, "cpl-xl": 300.0}


def timed(f: Callable[[], float]) -> tuple[float, float]:
    """A value and the time to compute it: the lesser of two times, unless the first is above two seconds."""
    seconds, value = math.inf, math.nan
    for _ in range(2):
        start = time.perf_counter()
        value = f()
        seconds = min(seconds, time.perf_counter() - start)
        if seconds > 2:
            break
    return value, seconds


def norm_from_below(op: LinearOperator, steps: int = 250) -> float:
    """‖Wv‖/‖v‖ for the top Ritz vector v of WᵀW after some Lanczos steps with full reorthogonalisation."""
    q = torch.randn(math.prod(op.in_shape), dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    basis, alphas, betas = (q / q.norm())[None], [], []
    for _ in range(steps):
        w = op.adjoint(op(basis[-1].reshape(1, *op.in_shape))).flatten()
        alphas.append(w @ basis[-1])
        for _ in range(2):
            w = w - basis.T @ (basis @ w)
        betas.append(w.norm())
        basis = torch.cat([basis, (w / w.norm())[None]])
    off = torch.stack(betas[:-1])
    t = torch.diag(torch.stack(alphas)) + torch.diag(off, 1) + torch.diag(off, -1)
    v = torch.linalg.eigh(t).eigenvectors[:, -1] @ basis[:-1]
    return float(op(v.reshape(1, *op.in_shape)).norm() / v.norm())


def svd_norm(matrix: Tensor) -> float:
    return float(torch.linalg.svdvals(matrix)[0])


def gap_and_time(value: float, seconds: float, norm: float) -> tuple[str, str]:
    return f"{value / norm - 1:+.1e}", f"{seconds:.2f} s"


def compare(console: Console) -> None:
    """One row for each operator: gap and time of three ways to compute its norm."""
    generator = torch.Generator().manual_seed(0)
    operators: dict[str, LinearOperator] = {}
    for out in (5, 45):
        kernel = torch.randn(out, 45, 3, 3, generator=generator, dtype=torch.float64)
        operators[f"conv 45 → {out}"] = ConvOperator(kernel, (32, 32))
    blur = torch.outer(*2 * [torch.tensor([0.6, 1.0, 0.5], dtype=torch.float64)])
    operators["smooth 45 → 5"] = ConvOperator(kernel[:5] * blur + kernel[:5].mean((2, 3), True), (32, 32))
    weight = torch.randn(2048, 2880, generator=generator, dtype=torch.float64)
    operators["2880 → 2048"] = DenseOperator(weight)

    table = Table(
        title="one norm: gap (relative, + is above) and time",
        caption="power, 100: 100 iterations; convolutions: 3×3 on 32×32, zero padding",
    )
    table.add_column("operator", no_wrap=True)
    for way in ("power, 100", "SVD", "norm_bound"):
        table.add_column(way, justify="right", no_wrap=True)
        table.add_column("time", justify="right", no_wrap=True)
    for name, op in operators.items():
        power = timed(lambda op=op: float(norm_estimate(op, iterations=100)))
        bound = timed(lambda op=op: norm_bound(op))
        if isinstance(op, DenseOperator):
            svd = timed(lambda op=op: svd_norm(op.weight))
            norm, svd_cells = svd[0], gap_and_time(*svd, svd[0])
        else:
            size = 8 * math.prod(op.in_shape) * math.prod(op.out_shape)
            norm, svd_cells = norm_from_below(op), (f"{size / 2**30:.1f} GiB", "—")
        table.add_row(name, *gap_and_time(*power, norm), *svd_cells, *gap_and_time(*bound, norm))
    console.print(table)


def draws(console: Console, count: int) -> None:
    """The gaps of norm_bound, and of 100 power iterations, over many Gaussian kernels."""
    table = Table("kernel", "draws", "norm_bound", "power, 100", title="gaps over Gaussian kernels on 32×32")
    for out, number in ((5, count), (45, -(-count // 5))):
        above, below = [], []
        for seed in range(number):
            generator = torch.Generator().manual_seed(seed)
            op = ConvOperator(torch.randn(out, 45, 3, 3, generator=generator, dtype=torch.float64), (32, 32))
            norm = norm_from_below(op)
            above.append(norm_bound(op) / norm - 1)
            below.append(float(norm_estimate(op, iterations=100)) / norm - 1)
        ranges = (f"{min(gaps):+.1e} to {max(gaps):+.1e}" for gaps in (above, below))
        table.add_row(f"45 → {out}", str(number), *ranges)
    console.print(table)


def networks(console: Console, names: list[str]) -> None:
    """The time to bound every norm of a network."""
    table = Table(title="all norms of a network, as built")
    for column in ("network", "convolutions", "dense", "time", "claim"):
        table.add_column(column, justify="left" if column == "network" else "right")
    for name in names:
        model = lipflow.build(name)
        weights = [m for m in model.modules() if isinstance(m, ConvWeight | DenseWeight)]
        times = {ConvWeight: 0.0, DenseWeight: 0.0}
        for weight in weights:
            start = time.perf_counter()
            norm_bound(weight.operator(None))
            times[type(weight)] += time.perf_counter() - start
        total = sum(times.values())
        cells = [f"{sum(type(w) is kind for w in weights)} in {seconds:.1f} s" for kind, seconds in times.items()]
        verdict = "holds" if total < LIMITS[name] else "FAILS"
        table.add_row(name, *cells, f"{total:.1f} s", f"under {LIMITS[name]:.0f} s: {verdict}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--xl", action="store_true", help="bound the norms of cpl-xl as well")
    parser.add_argument(
        "--draws", type=int, help="only the gaps of this number of kernels 45 → 5, and of a fifth of it 45 → 45"
    )
    arguments = parser.parse_args()
    console = Console()
    load = "/".join(f"{x:.1f}" for x in os.getloadavg())
    console.print(
        f"{os.cpu_count()} cores ({torch.get_num_threads()} threads), {platform.machine()}, load {load}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, lipflow {lipflow.__version__}"
    )
    if arguments.draws:
        draws(console, arguments.draws)
        return
    compare(console)
    networks(console, ["cpl-s", "cpl-xl"] if arguments.xl else ["cpl-s"])


if __name__ == "__main__":
    main()
