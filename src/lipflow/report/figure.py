"""The charts of the page as PNG and PDF. matplotlib is an extra, so it is imported only when a figure is drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lipflow.radius import parse_radius
from lipflow.report.run_results import RunResults
from lipflow.report.series import BINS, attacked, epsilon_reach, histogram, paper, smooth
from lipflow.report.table import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colours of the page, in the same order. Colour-blind readers can tell them apart; the marks differ without colour.
COLOURS = ("#0b63a5", "#c2500a", "#00805e", "#a2478a", "#8d6a00", "#3b8fc4", "#55585e", "#7d2244")
MARKS = "osD^"
GREY = "#8a8d92"  # for the paper's networks


def require_matplotlib() -> None:
    """Raise if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("figures need matplotlib, which is not installed: pip install matplotlib") from None


def save(runs: Sequence[RunResults], summary: Summary, folder: Path) -> list[Path]:
    """Write the figures that the runs have data for into a folder; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {"accuracy": accuracy(runs, summary), "radii": radii(runs, summary), "training": training(runs)}
    files = []
    for name, figure in drawn.items():
        if figure is not None:
            files += [folder / f"{name}.png", folder / f"{name}.pdf"]
            figure.savefig(files[-2], dpi=200)
            figure.savefig(files[-1], metadata={"CreationDate": None})  # the same runs give the same file
    return files


def accuracy(runs: Sequence[RunResults], summary: Summary) -> "Figure | None":
    """Draw certified (solid), attacked (dashed) and, in grey, published (crosses) accuracy against ε."""
    if not any(run.certificate is not None for run in runs):
        return None
    figure, (axes,) = _figure(1, 6.4)
    reach = epsilon_reach(runs, summary.epsilons)
    for i, run in enumerate(runs):
        colour, mark, certificate = _colour(i), _mark(i), run.certificate
        if certificate is not None:
            right = np.sort(certificate.radius[certificate.right])
            x = np.minimum([0.0, *right, np.inf], 2 * reach)  # the axis ends at `reach`
            y = 100 * np.maximum(len(right) - np.arange(len(x)), 0) / max(1, len(certificate.truth))
            last = [int(np.searchsorted(x, float(parse_radius(eps)), side="right")) - 1 for eps in summary.epsilons]
            label, marks = f"{escape(run.name)}, certified", {"marker": mark, "markevery": sorted(set(last))}
            axes.step(x, y, where="post", color=colour, label=label, markersize=4.5, **marks)
        if points := attacked(run):
            of = f", first {run.part} images" if run.part else ""
            label = f"{escape(run.name)}, under attack{of}"
            _plot_points(axes, points, "--", marker=mark, color=colour, markerfacecolor="white", label=label)
    for i, (title, points) in enumerate(paper(runs)):
        _plot_points(axes, points, ":", marker="x+12"[i % 4], color=GREY, label=f"the paper's {title}")
    axes.set(xlabel="ε, the L2 norm of the perturbation", ylabel="accuracy (%)", xlim=(0, reach), ylim=(0, 101))
    axes.legend(frameon=False, fontsize=8)
    return figure


def radii(runs: Sequence[RunResults], summary: Summary) -> "Figure | None":
    """Draw a histogram of certified radii per run: filled where the label is right, outlined where it is wrong."""
    shown = [(i, run, run.certificate) for i, run in enumerate(runs) if run.certificate is not None]
    if not shown:
        return None
    reach = epsilon_reach(runs, summary.epsilons)
    figure, all_axes = _figure(len(shown), 3.4)
    edges, width = np.linspace(0, reach, BINS + 1)[:-1], reach / BINS
    for axes, (i, run, certificate) in zip(all_axes, shown, strict=True):
        right, wrong = (100 * counts / max(1, len(certificate.truth)) for counts in histogram(certificate, reach))
        axes.bar(edges, right, width * 0.9, align="edge", color=_colour(i))
        axes.bar(edges, wrong, width * 0.9, bottom=right, align="edge", fill=False, edgecolor=_colour(i))
        axes.set(title=escape(run.name), xlabel="certified radius", ylabel="images (%)", xlim=(0, reach))
    return figure


def training(runs: Sequence[RunResults]) -> "Figure | None":
    """Draw the loss, and accuracy on validation images: clean (dashed) and certified by estimate (solid)."""
    if not any(run.losses for run in runs):
        return None
    figure, (losses, validations) = _figure(2, 3.6)
    logarithmic = all(loss >= 0 for run in runs for _, loss in smooth(run.losses))
    for i, run in enumerate(runs):
        points = [(step, loss) for step, loss in smooth(run.losses) if loss > 0 or not logarithmic]
        losses.plot([x for x, _ in points], [y for _, y in points], color=_colour(i), label=escape(run.name))
        validated = [e for e in run.epochs if e.clean is not None]
        x = [e.number for e in validated]
        mark = _mark(i) if len(x) < 4 else ""
        certified = [100 * next(iter(e.certified.values()), np.nan) for e in validated]
        clean = [100 * (e.clean or 0.0) for e in validated]
        validations.plot(x, clean, "--", color=_colour(i), linewidth=1, marker=mark)
        validations.plot(x, certified, color=_colour(i), marker=mark)
    losses.set(xlabel="step", ylabel="training loss", yscale="log" if logarithmic else "linear")
    validations.set(xlabel="epoch", ylabel="validation accuracy (%)", ylim=(0, 101))
    losses.legend(frameon=False, fontsize=8)
    return figure


def escape(text: str) -> str:
    """Escape a name for matplotlib, which reads $…$ as mathematics and hides a label that begins with _."""
    safe = text.replace("$", r"\$")
    return f"\u2009{safe}" if safe.startswith("_") else safe


def _colour(run: int) -> str:
    return COLOURS[run % len(COLOURS)]


def _mark(run: int) -> str:
    """The mark of a run: the ninth run has the colour of the first one, and another mark."""
    return MARKS[(run + run // len(COLOURS)) % len(MARKS)]


def _plot_points(axes: "Axes", points: Sequence[tuple[str, float, float]], style: str, **options: Any) -> None:
    x, y = [eps for _, eps, _ in points], [100 * accuracy for _, _, accuracy in points]
    axes.plot(x, y, style, linewidth=1, markersize=4.5, **options)


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
