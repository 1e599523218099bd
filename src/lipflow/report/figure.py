"""The curves of the page as figures to print, PNG and PDF, with matplotlib: an extra, imported when it is asked for."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lipflow.radius import parse_radius
from lipflow.report.run_results import RunResults
from lipflow.report.series import BINS, attacked, epsilon_reach, histogram, paper, smooth
from lipflow.report.table import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# As on the page, in its order: told apart by colour-blind readers, and by their marks without colour.
COLOURS = ("#0b63a5", "#c2500a", "#00805e", "#a2478a", "#8d6a00", "#3b8fc4", "#55585e", "#7d2244")
MARKS = "osD^"
GREY = "#8a8d92"  # what is no run


def require_matplotlib() -> None:
    """Refuse early, before any work is done, with what would help."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("figures need matplotlib, which is not installed: pip install matplotlib") from None


def save(runs: Sequence[RunResults], summary: Summary, folder: Path) -> list[Path]:
    """Write every figure that the runs have something for into a folder, which is made if need be; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {"accuracy": accuracy(runs, summary), "radii": radii(runs, summary), "training": training(runs)}
    files = []
    for name, figure in drawn.items():
        if figure is None:
            continue
        files += [folder / f"{name}.png", folder / f"{name}.pdf"]
        figure.savefig(files[-2], dpi=200)
        figure.savefig(files[-1], metadata={"CreationDate": None})  # the same runs give the same file
    return files


def accuracy(runs: Sequence[RunResults], summary: Summary) -> "Figure | None":
    """Certified (solid), attacked (dashed) and, in grey, published (crosses) accuracy against ε."""
    if not any(run.certificate is not None for run in runs):
        return None
    figure, (axes,) = _figure(1, 6.4)
    reach = epsilon_reach(runs, summary.epsilons)
    for i, run in enumerate(runs):
        colour, held = COLOURS[i % len(COLOURS)], run.certificate
        if held is not None:
            ends = np.concatenate([[0.0], np.sort(held.radius[held.right])])
            left = np.arange(len(ends) - 1, -1, -1) / max(1, len(held.truth))
            inside = ends <= reach
            x, y = np.append(ends[inside], reach), np.append(left[inside], left[inside][-1])
            marked = {"marker": MARKS[(i + i // 8) % 4], "markevery": _at(x, summary.epsilons), "markersize": 4.5}
            axes.step(x, 100 * y, where="post", color=colour, label=f"{plain(run.name)}, certified", **marked)
        if points := attacked(run):
            line = _marked(axes, points, "--", MARKS[(i + i // 8) % 4])
            of = f", first {run.part} images" if run.part else ""
            line.set(color=colour, markerfacecolor="white", label=f"{plain(run.name)}, under attack{of}")
    for i, (title, points) in enumerate(paper(runs)):
        _marked(axes, points, ":", "x+12"[i % 4]).set(color=GREY, label=f"the paper's {title}")
    axes.set(xlabel="ε, the L2 norm of the perturbation", ylabel="accuracy (%)", xlim=(0, reach), ylim=(0, 101))
    axes.legend(frameon=False, fontsize=8)
    return figure


def radii(runs: Sequence[RunResults], summary: Summary) -> "Figure | None":
    """Histograms of certified radii, one a run: filled where the label is right, outlined where it is wrong."""
    shown = [(i, run, run.certificate) for i, run in enumerate(runs) if run.certificate is not None]
    if not shown:
        return None
    reach = epsilon_reach(runs, summary.epsilons)
    figure, all_axes = _figure(len(shown), 3.4)
    edges, width = np.linspace(0, reach, BINS + 1)[:-1], reach / BINS
    for axes, (i, run, held) in zip(all_axes, shown, strict=True):
        colour, total = COLOURS[i % len(COLOURS)], max(1, len(held.truth))
        right, wrong = (100 * counts / total for counts in histogram(held, reach))
        axes.bar(edges, right, width * 0.9, align="edge", color=colour)
        axes.bar(edges, wrong, width * 0.9, bottom=right, align="edge", fill=False, edgecolor=colour)
        axes.set(title=plain(run.name), xlabel="certified radius", ylabel="images (%)", xlim=(0, reach))
    return figure


def training(runs: Sequence[RunResults]) -> "Figure | None":
    """The loss, and accuracy on validation images: clean (dashed) and certified by estimate (solid)."""
    if not any(run.losses for run in runs):
        return None
    figure, (losses, checks) = _figure(2, 3.6)
    logarithmic = all(loss >= 0 for run in runs for _, loss in smooth(run.losses))
    for i, run in enumerate(runs):
        colour, steps = COLOURS[i % len(COLOURS)], [s for s in smooth(run.losses) if s[1] > 0 or not logarithmic]
        losses.plot([s for s, _ in steps], [loss for _, loss in steps], color=colour, label=plain(run.name))
        checked = [e for e in run.epochs if e.clean is not None]
        x = [e.number for e in checked]
        mark = MARKS[(i + i // 8) % 4] if len(x) < 4 else ""
        checks.plot(x, [100 * (e.clean or 0.0) for e in checked], "--", color=colour, linewidth=1, marker=mark)
        certified = [100 * next(iter(e.certified.values()), np.nan) for e in checked]
        checks.plot(x, certified, color=colour, marker=mark)
    losses.set(xlabel="step", ylabel="training loss", yscale="log" if logarithmic else "linear")
    checks.set(xlabel="epoch", ylabel="validation accuracy (%)", ylim=(0, 101))
    losses.legend(frameon=False, fontsize=8)
    return figure


def _marked(axes: "Axes", points: Sequence[tuple[str, float, float]], style: str, mark: str) -> "Line2D":
    x, y = [p[1] for p in points], [100 * p[2] for p in points]
    return axes.plot(x, y, style, marker=mark, linewidth=1, markersize=4.5)[0]


def plain(text: str) -> str:
    """A name as it is: matplotlib reads $…$ as mathematics, and hides a label that begins with _."""
    safe = text.replace("$", r"\$")
    return f"\u2009{safe}" if safe.startswith("_") else safe


def _at(x: np.ndarray, epsilons: Sequence[str]) -> list[int]:
    """Where a falling curve with ends x has its marks: at the last end that is at most ε, for each."""
    return sorted({int(np.searchsorted(x, float(parse_radius(eps)), side="right")) - 1 for eps in epsilons})


def _figure(count: int, width: float) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure

    rows, across = -(-count // 4), min(count, 4)
    figure = Figure(figsize=(across * width, rows * 3.6), layout="constrained")
    all_axes = [figure.add_subplot(rows, across, k + 1) for k in range(count)]
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    return figure, all_axes
