"""The one loop of all experiments: train what is not trained, measure what is not measured, judge, write, draw.

    python -m experiments --scale small --list                 what would run, and for how long
    python -m experiments --scale small                        everything, in order of usefulness
    python -m experiments --scale small --only margin-cifar10 relaxed
    python -m experiments --scale small --jobs 2               two runs at a time, each on its share of the cores
    python -m experiments --scale small --judge                the stored numbers, by the rules as they are now

A run is a folder named by what it is, under runs/experiments/SCALE/. One that is done is not run again, one that was
interrupted goes on where it was, and experiments share them. A result is experiments/results/SCALE/NAME.json.
"""

import importlib
import json
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from experiments.draw import save
from experiments.experiment import Experiment, Rows
from experiments.parallel import side_by_side
from experiments.provenance import provenance
from experiments.scale import SCALES, Scale, cost, total
from lipflow.files import write_atomic
from lipflow.report.figure import require_matplotlib
from lipflow.train.budget import format_duration
from lipflow.train.run import Run, differences

# In order of usefulness: large effects that a small scale can show come first. CIFAR-100 needs its data.
MODULES = (
    "architectures",
    "margin",
    "relaxed",
    "cifar10",
    "certified",
    "pgd",
    "effective",
    "depth",
    "gradient",
    "batch_size",
    "cifar100",
)
DIVERGED = "diverged.json"


@dataclass(frozen=True)
class Options:
    """Run the paper's experiments, or list what would run."""

    scale: Literal["paper", "small", "smoke"] = "small"
    """paper: as published; small: hours on two cores; smoke: seconds, on synthetic images."""
    only: tuple[str, ...] = ()
    """Only these experiments, by name, in this order (default: all)."""
    jobs: int = 1
    """How many runs go on side by side, each with its share of the cores."""
    judge: bool = False
    """Train and measure nothing: judge the stored numbers anew, and write their page."""
    list: bool = False
    """Show what would run, what is done already, and the time that the rest is expected to take."""
    runs: Path = Path("runs/experiments")
    """Where runs are kept."""
    results: Path = Path("experiments/results")
    """Where results go, in a folder for each scale."""
    docs: Path = Path("docs")
    """Where figures and results.md go; a smoke run leaves it alone, and draws beside its results."""
    data_dir: Path | None = None
    """Where CIFAR is (default: data/ if there is one, or the download cache)."""


def experiments(only: Sequence[str] = ()) -> list[Experiment]:
    """All experiments, or those named."""
    found = [e for name in MODULES for e in importlib.import_module(f"experiments.{name}").EXPERIMENTS]
    by_name = {e.name: e for e in found}
    if unknown := [name for name in only if name not in by_name]:
        raise ValueError(f"there is no experiment {unknown[0]!r}; there are {', '.join(by_name)}")
    return [by_name[name] for name in only] if only else found


def main(words: Sequence[str] | None = None) -> int:
    """Parse, then list or run."""
    import tyro

    words = sys.argv[1:] if words is None else list(words)
    options = tyro.cli(Options, args=words, prog="python -m experiments")
    return answered("experiments", lambda: list_or_run(options, f"python -m experiments {shlex.join(words)}".strip()))


def answered(program: str, work: Callable[[], int]) -> int:
    """The exit code of some work; what a user can get wrong, or stop, is answered in one line."""
    from lipflow.train.signals import EndedEarly

    try:
        return work()
    except EndedEarly as error:
        print(f"{program}: {error}; the same command goes on", file=sys.stderr)
        return error.exit_code
    except (ValueError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted; the same command goes on", file=sys.stderr)
        return 130


def list_or_run(options: Options, command: str) -> int:
    """0, or 1 if an experiment failed."""
    if options.jobs < 1:
        raise ValueError(f"--jobs is at least 1, not {options.jobs}")
    chosen, scale = experiments(options.only), placed(options)
    if options.list:
        show(chosen, scale)
        return 0
    if options.judge:
        judge_anew(chosen, scale, options)
        return 0
    require_matplotlib()
    failed = run_all(chosen, scale, options, command)
    if failed:
        print(f"experiments: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def placed(options: Options) -> Scale:
    """The scale, with the folders of this call."""
    where = options.data_dir or (Path("data") if Path("data").is_dir() else None)
    if options.scale == "smoke":
        where = options.data_dir or options.runs / "smoke" / "data"
        where.mkdir(parents=True, exist_ok=True)
    return replace(SCALES[options.scale], folder=options.runs, data_dir=where)


def run_all(chosen: Sequence[Experiment], scale: Scale, options: Options, command: str) -> list[str]:
    """Each experiment, to its JSON and its figure; return the names of those that failed.

    One whose images are not here is passed over, and said. One that fails is shown, and does not stop the others.
    """
    from lipflow.machine import keep_freed_memory
    from lipflow.train.signals import EndedEarly

    keep_freed_memory()
    numbers = {experiment.name: number for number, experiment in enumerate(chosen, 1)}
    left = {experiment.name: experiment for experiment in chosen}
    failed = []

    def publish(experiment: Experiment) -> None:
        del left[experiment.name]
        print(f"==> {numbers[experiment.name]}/{len(chosen)} {experiment.name}: {experiment.title}", flush=True)
        if not has_data(experiment, scale):
            print(f"    passed over: there is no {experiment.data} here (lipflow data NAME, or --data-dir)", flush=True)
            return
        try:
            write(experiment, run_one(experiment, scale, command), options)
        except EndedEarly:
            raise
        except Exception:
            traceback.print_exc()
            failed.append(experiment.name)

    if options.jobs > 1:
        here = [experiment for experiment in chosen if has_data(experiment, scale)]
        waits = {e.name: {run.folder.name for row in e.runs(scale).values() for run in row} for e in here}

        def after(name: str) -> None:
            for experiment in here:
                waits[experiment.name].discard(name)
                if not waits[experiment.name] and experiment.name in left:
                    publish(experiment)

        side_by_side(options.jobs, finish, work_of(here, scale), after)
    for experiment in list(left.values()):
        publish(experiment)
    return failed


def write(experiment: Experiment, result: dict[str, Any], options: Options) -> None:
    """The JSON, the figure and the page of a result. A smoke run leaves the page alone."""
    from experiments.results import write_page

    folder, smoke = options.results / result["scale"], result["scale"] == "smoke"
    folder.mkdir(parents=True, exist_ok=True)
    save_result(folder / f"{experiment.name}.json", result)
    pictures = folder if smoke else options.docs / "figures"
    save(experiment.draw, result, pictures / f"{experiment.name}-{result['scale']}.png")
    if not smoke:
        write_page(options.results, options.docs / "results.md")


def judge_anew(chosen: Sequence[Experiment], scale: Scale, options: Options) -> None:
    """What the rules, as they are now, say of the numbers as they are stored."""
    from experiments.results import write_page

    for experiment in chosen:
        path = options.results / scale.name / f"{experiment.name}.json"
        if path.is_file():
            result = json.loads(path.read_text())
            result["claims"] = experiment.judge(scale.name, Rows(result["rows"]))
            save_result(path, result)
    write_page(options.results, options.docs / "results.md")


def save_result(path: Path, result: dict[str, Any]) -> None:
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    write_atomic(path, lambda temporary: temporary.write_text(text))
    for claim in result["claims"]:
        print(f"    {claim['verdict']}: {claim['text']} ({claim['evidence']})", flush=True)


def run_one(experiment: Experiment, scale: Scale, command: str) -> dict[str, Any]:
    """Train, measure and judge: the result of an experiment, as JSON values."""
    began, rows = time.monotonic(), {label: list(row) for label, row in experiment.fixed().items()}
    planned = experiment.runs(scale)
    for run in (run for row in in_rounds(planned) for run in row):
        ensure(run)
    for label, runs in planned.items():
        rows[label] = [measured(run, experiment.measures, scale) for run in runs]
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "scale": scale.name,
        "data": sorted({run.data for row in planned.values() for run in row}),
        "columns": [column._asdict() for column in experiment.columns if scale.name in column.scales],
        "published": experiment.published,
        "rows": rows,
        "claims": experiment.judge(scale.name, Rows(rows)),
        "provenance": {**provenance(command), "seconds_of_this_command": round(time.monotonic() - began, 1)},
    }


def work_of(chosen: Sequence[Experiment], scale: Scale) -> dict[str, tuple[Run, tuple[str, ...], Scale]]:
    """The arguments of `finish` for every run of some experiments, once, with all that any of them measures of it."""
    runs: dict[str, Run] = {}
    measures: dict[str, dict[str, None]] = {}
    for experiment in chosen:
        for run in (run for row in in_rounds(experiment.runs(scale)) for run in row):
            name = run.folder.name
            runs.setdefault(name, run)
            measures.setdefault(name, {}).update(dict.fromkeys(experiment.measures))
    return {name: (run, tuple(measures[name]), scale) for name, run in runs.items()}


def finish(run: Run, measures: tuple[str, ...], scale: Scale) -> None:
    """Train and measure a run; its folder keeps what was found."""
    ensure(run)
    measured(run, measures, scale)


def in_rounds(planned: Any) -> Iterator[list[Run]]:
    """All rows with their first seed, then all with their second: what is stopped early has still a comparison."""
    rows = [list(row) for row in planned.values()]
    for seed in range(max(map(len, rows), default=0)):
        yield [row[seed] for row in rows if seed < len(row)]


def state(run: Run) -> Literal["done", "diverged", "interrupted", "to do"]:
    """What the folder of a run holds."""
    if (run.folder / "model.safetensors").is_file():
        return "done"
    if (run.folder / DIVERGED).is_file():
        return "diverged"
    return "interrupted" if (run.folder / "run.json").is_file() else "to do"


def ensure(run: Run, train: Callable[..., object] | None = None) -> None:
    """Train a run unless it has ended; go on with one that was interrupted. A loss that is no number is an end, too."""
    from lipflow.train.signals import NonFiniteLoss

    if train is None:
        import experiments.sources  # noqa: F401 - the images that a scale may name
        from lipflow.train.loop import train
    found = state(run)
    if found != "to do":
        from lipflow.train.record import Record

        if changed := differences(Record.read(run.folder).run, run):
            raise ValueError(f"{run.folder} holds another run: {', '.join(map(str, changed))}; move it away")
    if found in ("done", "diverged"):
        print(f"    {found} already: {run.folder.name}", flush=True)
        return
    print(f"    {'going on with' if found == 'interrupted' else 'training'} {run.folder.name}", flush=True)
    try:
        train(run, resume=found == "interrupted")
    except NonFiniteLoss as error:
        (run.folder / DIVERGED).write_text(json.dumps({"error": str(error)}) + "\n")


def measured(run: Run, measures: tuple[str, ...], scale: Scale) -> dict[str, Any]:
    """The numbers of a run; of one that diverged, just that."""
    from experiments.measure import measure

    if state(run) == "diverged":
        return {"run": run.folder.name, "seed": run.seed, "diverged": True}
    return {**measure(run.folder, measures, scale), "diverged": False}


def has_data(experiment: Experiment, scale: Scale) -> bool:
    """Whether the images of all its runs are here."""
    from experiments.sources import available
    from lipflow.data.dataset import Request

    kinds = {run.data for row in experiment.runs(scale).values() for run in row}
    return all(available(kind, Request(data_dir=scale.data_dir)) for kind in kinds)


def show(chosen: Sequence[Experiment], scale: Scale) -> None:
    """Every experiment with its runs; a run that two need is counted once."""
    counted: dict[Path, Run] = {}
    for experiment in chosen:
        here = has_data(experiment, scale)
        print(f"{experiment.name}: {experiment.title}" + ("" if here else "  (passed over: its images are not here)"))
        for run in (run for row in in_rounds(experiment.runs(scale)) for run in row):
            told = "no data" if not here else "shared" if run.folder in counted else state(run)
            if here:
                counted.setdefault(run.folder, run)
            time_ = format_duration(cost(scale, run)) if told in ("to do", "interrupted") else ""
            print(f"  {told:<12} {time_:>7}  {run.folder.name}")
    left = [run for run in counted.values() if state(run) in ("to do", "interrupted")]
    where = "on the authors' machine, by their seconds an epoch" if scale.name == "paper" else "on two cores"
    print(f"{len(counted)} runs, {len(left)} to do: about {format_duration(total(scale, left))} {where}")
