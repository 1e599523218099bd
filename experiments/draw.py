"""The figures of experiments, from their JSON. matplotlib is imported when a figure is drawn."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from lipflow.report.figure import COLOURS, MARKS, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = Mapping[str, Any]
Drawing = Callable[["Figure", Result], None]
AXES = {"certified": "certified accuracy (%)", "attacked": "accuracy under PGD (%)"}
START = {"certified": "clean", "attacked": "attacked_clean"}  # at ε = 0, of the same images


def save(draw: Drawing, result: Result, path: Path) -> None:
    """Draw a result to a PNG file, with the scale in its title."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    draw(figure, result)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=7)
    figure.suptitle(f"{result['title']} ({result['scale']} scale)", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def look_up(measured: Mapping[str, Any], path: Sequence[str]) -> Any:
    """The entry at a path of keys, or None."""
    value: Any = measured
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def average(rows: Sequence[Mapping[str, Any]], path: Sequence[str]) -> float | None:
    """The mean over the seeds that have a number at a path."""
    found = [value for row in rows if isinstance(value := look_up(row, path), int | float)]
    return mean(found) if found else None


def dots(figure: "Figure", result: Result) -> None:
    """All rows and all columns of percents: our numbers as marks, published ones as crosses of the same colour."""
    figure.set_size_inches(6.4, 4)
    axes = figure.add_subplot()
    columns = [c for c in result["columns"] if c["percent"]]
    for i, (label, rows) in enumerate(result["rows"].items()):
        colour = COLOURS[i % len(COLOURS)]
        ours = [(x, average(rows, c["path"])) for x, c in enumerate(columns)]
        _marks(axes, [(x, 100 * y) for x, y in ours if y is not None], colour, MARKS[i % 4], label)
        theirs = [result["published"].get(label, {}).get(c["title"]) for c in columns]
        _marks(axes, [(x, y) for x, y in enumerate(theirs) if y is not None], colour, "x", f"{label}, published")
    axes.set_xticks(range(len(columns)), [c["title"] for c in columns])
    axes.set(ylabel="accuracy (%)", ylim=(0, 100))


def _marks(axes: "Axes", points: Sequence[tuple[float, float]], colour: str, mark: str, label: str) -> None:
    if points:
        style = ":" if mark == "x" else "-"
        x, y = zip(*points, strict=True)
        axes.plot(x, y, style, marker=mark, color=colour, linewidth=1, markersize=5, label=escape(label))


def curves(*keys: str) -> Drawing:
    """Accuracy against ε, a panel for each key: the mean over seeds, and each seed as a thin line."""

    def draw(figure: "Figure", result: Result) -> None:
        figure.set_size_inches(5.2 * len(keys), 4)
        for place, key in enumerate(keys, 1):
            axes = figure.add_subplot(1, len(keys), place)
            for i, (label, rows) in enumerate(result["rows"].items()):
                colour = COLOURS[i % len(COLOURS)]
                lines = [_curve(row, key) for row in rows if key in row and START[key] in row]
                for line in lines:
                    axes.plot([e for e, _ in line], [y for _, y in line], color=colour, linewidth=0.6, alpha=0.4)
                if lines:
                    x = [e for e, _ in lines[0]]
                    y = [mean(line[k][1] for line in lines) for k in range(len(x))]
                    mark = "" if len(x) > 20 else MARKS[i % 4]
                    axes.plot(x, y, color=colour, marker=mark, markersize=4, label=escape(label))
            axes.set(xlabel="ε, the L2 norm of the perturbation", ylabel=AXES[key], ylim=(0, 100))
            axes.set_xlim(left=0)

    return draw


def _curve(row: Mapping[str, Any], key: str) -> list[tuple[float, float]]:
    points = {Fraction(0): row[START[key]], **{Fraction(eps): value for eps, value in row[key].items()}}
    return [(float(eps), 100 * points[eps]) for eps in sorted(points)]


def course(figure: "Figure", result: Result) -> None:
    """Accuracy over the steps, on a logarithmic axis: lines of training batches, marks of held-out images."""
    figure.set_size_inches(6.4, 4)
    axes = figure.add_subplot()
    for i, (label, rows) in enumerate(result["rows"].items()):
        for row in rows:
            colour, line = COLOURS[i % len(COLOURS)], row.get("accuracies", [])
            _line(axes, [(x, 100 * y) for x, y in line], color=colour, linewidth=1, label=escape(label))
            each = row.get("steps", 0) / max(1, row.get("epochs", 1))
            points = [(n * each, 100 * value) for n, value in row.get("validations", [])]
            _line(axes, points, linestyle="", marker=MARKS[i % 4], markersize=5, color=colour)
    axes.set(xlabel="training step", ylabel="accuracy (%)", xscale="log", ylim=(0, None))


def _line(axes: "Axes", points: Sequence[Sequence[float]], **style: Any) -> None:
    if points:  # Matplotlib cannot draw a logarithmic axis for an empty line
        axes.plot([x for x, _ in points], [y for _, y in points], **style)


def gradients(figure: "Figure", result: Result) -> None:
    """Norms of gradients: before and after training by layer; of the first layer by step; of the deepest by layer."""
    figure.set_size_inches(15, 4)
    ends, first, deepest = figure.subplots(1, 3)
    for i, (label, rows) in enumerate(result["rows"].items()):
        colour = COLOURS[i % len(COLOURS)]
        for row in rows:
            for state, style in (("trained", "-"), ("fresh", "--")):
                norms = look_up(row, ("gradient", state)) or []
                points = [(k / max(1, len(norms) - 1), norm) for k, norm in enumerate(norms)]
                _line(ends, points, linestyle=style, color=colour, linewidth=1.2, label=escape(f"{label}, {state}"))
            _line(first, row.get("first_gradients", []), color=colour, linewidth=1, label=escape(label))
    ends.set(
        xlabel="place in the network (0: first layer, 1: last)", ylabel="gradient before the layer / at the scores"
    )
    first.set(xlabel="training step", ylabel="gradient of the weights of the first layer", xscale="log")
    label, rows = list(result["rows"].items())[-1]
    profiles = rows[0].get("gradients_by_layer", {})
    for i, (step, points) in enumerate(profiles.items()):
        shade = str(0.8 * (1 - i / max(1, len(profiles) - 1)))
        _line(deepest, points, color=shade, linewidth=1, label=f"step {step}")
    deepest.set(xlabel=f"layer, of {label}", ylabel="gradient of its weights")
    for axes in (ends, first, deepest):
        axes.set_yscale("log")


def bars(title: str, unit: str) -> Drawing:
    """One column as bars, one for each row."""

    def draw(figure: "Figure", result: Result) -> None:
        figure.set_size_inches(5.2, 3.6)
        axes = figure.add_subplot()
        (column,) = (c for c in result["columns"] if c["title"] == title)
        labels = list(result["rows"])
        for i, label in enumerate(labels):
            value = average(result["rows"][label], column["path"])
            if value is not None:
                axes.bar(i, 100 * value if column["percent"] else value, color=COLOURS[i % len(COLOURS)])
        axes.set_xticks(range(len(labels)), [escape(label) for label in labels])
        axes.set_ylabel(unit)

    return draw
