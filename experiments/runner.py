"""Train the runs of the experiments, measure them, judge the claims, and write and draw the results.

    python -m experiments --scale small --list                 list the runs and their expected time
    python -m experiments --scale small                        run everything, large effects first
    python -m experiments --scale small --only margin-cifar10 relaxed
    python -m experiments --scale small --jobs 2               two runs at a time, each with its share of the cores
    python -m experiments --scale small --judge                judge the stored numbers again
    torchrun --nproc-per-node=8 -m experiments --scale paper   one run at a time, on eight processes

The folder of a run, in runs/experiments/SCALE/, is named after its settings, so that experiments share runs. A finished
run is not repeated, and an interrupted one is resumed. A result is experiments/results/SCALE/NAME.json.
"""

import importlib
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, get_args

from experiments.draw import save
from experiments.experiment import Experiment, Rows
from experiments.parallel import agree, in_parallel, is_first
from experiments.provenance import provenance, write_json
from experiments.scale import DEEP, SCALES, Scale, cost, parallel, total
from lipflow.report.figure import require_matplotlib
from lipflow.train.budget import format_duration
from lipflow.train.run import Run, differences

# The experiments with large effects, which a small scale can show, come first.
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
    """The number of parallel runs, each with its share of the cores."""
    judge: bool = False
    """Judge the stored numbers again and write their page, without training or measuring."""
    list: bool = False
    """List the runs, their states and the expected time."""
    runs: Path = Path("runs/experiments")
    """The folder of the runs."""
    results: Path = Path("experiments/results")
    """The folder of the results, with a folder for each scale."""
    docs: Path = Path("docs")
    """The folder of figures and results.md; figures of smoke runs are in the folder of their results."""
    data_dir: Path | None = None
    """The folder of CIFAR (default: data/ if it exists, or the download cache)."""


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
    command = f"python -m experiments {shlex.join(words)}".strip()
    with nullcontext() if is_first() else redirect_stdout(None):
        return exit_code_of("experiments", lambda: list_or_run(options, command))


def exit_code_of(program: str, work: Callable[[], int]) -> int:
    """Do some work and return its exit code. For a user's mistake or an interruption, print one line."""
    from lipflow.train.signals import EndedEarly

    try:
        return work()
    except EndedEarly as error:
        print(f"{program}: {error}; the same command continues", file=sys.stderr)
        return error.exit_code
    except (ValueError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted; the same command continues", file=sys.stderr)
        return 130


def list_or_run(options: Options, command: str) -> int:
    """Do what the options say; return 1 if an experiment failed, and 0 otherwise."""
    if options.jobs < 1:
        raise ValueError(f"--jobs is at least 1, not {options.jobs}")
    if options.jobs > 1 and "RANK" in os.environ:
        raise ValueError(f"--jobs {options.jobs} and torchrun exclude each other: torchrun makes one run at a time")
    chosen, scale = experiments(options.only), scale_of(options)
    if options.list:
        show(chosen, scale)
        return 0
    if options.judge:
        judge_again(chosen, scale, options)
        return 0
    require_matplotlib()
    failed = run_all(chosen, scale, options, command)
    if failed:
        print(f"experiments: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def scale_of(options: Options) -> Scale:
    """The scale, with the folders of the options."""
    where = options.data_dir or (Path("data") if Path("data").is_dir() else None)
    if options.scale == "smoke":
        where = options.data_dir or options.runs / "smoke" / "data"
        where.mkdir(parents=True, exist_ok=True)
    return replace(SCALES[options.scale], folder=options.runs, data_dir=where)


def run_all(chosen: Sequence[Experiment], scale: Scale, options: Options, command: str) -> list[str]:
    """Run the experiments and write their results; return the names of those that failed.

    An experiment without its images is skipped. If one fails, the error is printed and the others continue.
    """
    from lipflow.machine import keep_freed_memory
    from lipflow.train.signals import EndedEarly

    keep_freed_memory()
    failed = []
    for number, experiment in enumerate(as_trained(chosen, scale, options.jobs), 1):
        print(f"==> {number}/{len(chosen)} {experiment.name}: {experiment.title}", flush=True)
        if not has_data(experiment, scale):
            print(f"    skipped: {experiment.data} was not found (lipflow data NAME, or --data-dir)", flush=True)
            continue
        try:
            result = run_one(experiment, scale, command)
            if is_first():
                write(experiment, result, options)
            agree(0)  # the others wait, as torchrun ends all processes when one has ended
        except EndedEarly:
            raise
        except Exception:
            traceback.print_exc()
            failed.append(experiment.name)
    return failed


def as_trained(chosen: Sequence[Experiment], scale: Scale, jobs: int) -> Iterator[Experiment]:
    """The experiments in order; with several jobs, each one once parallel processes have finished its last run."""
    left = {experiment.name: experiment for experiment in chosen}
    if jobs > 1:
        here = [experiment for experiment in chosen if has_data(experiment, scale)]
        missing = {experiment.name: set(work_of([experiment], scale)) for experiment in here}
        for run in in_parallel(jobs, finish, work_of(here, scale)):
            for name, runs in missing.items():
                runs.discard(run)
                if not runs and name in left:
                    yield left.pop(name)
    yield from left.values()


def write(experiment: Experiment, result: dict[str, Any], options: Options) -> None:
    """Write the JSON and the figure of a result, and the page unless it is of a smoke run."""
    from experiments.results import write_page

    folder, smoke = options.results / result["scale"], result["scale"] == "smoke"
    save_result(folder / f"{experiment.name}.json", result)
    pictures = folder if smoke else options.docs / "figures"
    save(experiment.draw, result, pictures / f"{experiment.name}-{result['scale']}.png")
    if not smoke:
        write_page(options.results, options.docs / "results.md")


def judge_again(chosen: Sequence[Experiment], scale: Scale, options: Options) -> None:
    """Judge the stored numbers by the current rules."""
    from experiments.results import write_page

    for experiment in chosen:
        path = options.results / scale.name / f"{experiment.name}.json"
        if path.is_file():
            result = json.loads(path.read_text())
            result["claims"] = experiment.judge(scale.name, Rows(result["rows"]))
            save_result(path, result)
    write_page(options.results, options.docs / "results.md")


def save_result(path: Path, result: dict[str, Any]) -> None:
    write_json(path, result)
    for claim in result["claims"]:
        print(f"    {claim['verdict']}: {claim['text']} ({claim['evidence']})", flush=True)


def run_one(experiment: Experiment, scale: Scale, command: str) -> dict[str, Any]:
    """Train, measure and judge; return the result of an experiment as JSON values."""
    began, rows = time.monotonic(), {label: list(row) for label, row in experiment.fixed().items()}
    planned = experiment.runs(scale)
    for run in in_rounds(planned):
        ensure(run)
    for label, runs in planned.items():
        rows[label] = [measured(run, experiment.measures, scale) for run in runs]
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "scale": scale.name,
        "data": sorted({run.data for run in in_rounds(planned)}),
        "columns": [column._asdict() for column in experiment.columns if scale.name in column.scales],
        "published": experiment.published,
        "rows": rows,
        "claims": experiment.judge(scale.name, Rows(rows)),
        "provenance": {**provenance(command), "seconds_of_this_command": round(time.monotonic() - began, 1)},
    }


def work_of(chosen: Sequence[Experiment], scale: Scale) -> dict[str, tuple[Run, tuple[str, ...], Scale]]:
    """The arguments of `finish` for each run of some experiments, with the measures of all of them."""
    work: dict[str, tuple[Run, tuple[str, ...], Scale]] = {}
    for experiment in chosen:
        for run in in_rounds(experiment.runs(scale)):
            _, measures, _ = work.get(run.folder.name, (run, (), scale))
            work[run.folder.name] = run, tuple(dict.fromkeys([*measures, *experiment.measures])), scale
    return work


def finish(run: Run, measures: tuple[str, ...], scale: Scale) -> None:
    """Train and measure a run; its folder stores the results."""
    ensure(run)
    measured(run, measures, scale)


def in_rounds(planned: Mapping[str, Sequence[Run]]) -> list[Run]:
    """The first seed of every row, then the second ones, so that rows can be compared after an interruption."""
    return [run for seeds in zip_longest(*planned.values()) for run in seeds if run]


State = Literal["done", "diverged", "interrupted", "to do"]


def state(run: Run) -> State:
    """The state of the run in a folder."""
    if (run.folder / "model.safetensors").is_file():
        return "done"
    if (run.folder / DIVERGED).is_file():
        return "diverged"
    return "interrupted" if (run.folder / "run.json").is_file() else "to do"


def ensure(run: Run) -> None:
    """Train a run, or resume it, unless it has finished or diverged (a NaN or infinite loss)."""
    import experiments.sources  # noqa: F401 - adds the datasets of the smaller scales
    from experiments.deep import record_gradients
    from lipflow.train.loop import train
    from lipflow.train.record import Record
    from lipflow.train.signals import NonFiniteLoss

    states = get_args(State)
    found = states[agree(states.index(state(run)))]
    if found != "to do" and (changed := differences(Record.read(run.folder).run, run)):
        raise ValueError(f"{run.folder} holds another run: {', '.join(map(str, changed))}; move it away")
    if found in ("done", "diverged"):
        print(f"    {found} already: {run.folder.name}", flush=True)
        return
    print(f"    {'resuming' if found == 'interrupted' else 'training'} {run.folder.name}", flush=True)
    watch = record_gradients(run.folder) if run.model == DEEP and is_first() else None
    try:
        train(run, resume=found == "interrupted", watch=watch)
    except NonFiniteLoss as error:
        (run.folder / DIVERGED).write_text(json.dumps({"error": str(error)}) + "\n")


def measured(run: Run, measures: tuple[str, ...], scale: Scale) -> dict[str, Any]:
    """The numbers of a run; of a diverged run, only that it diverged."""
    from experiments.measure import measure

    if state(run) == "diverged":
        return {"run": run.folder.name, "seed": run.seed, "diverged": True}
    return {**measure(run.folder, measures, scale), "diverged": False}


def has_data(experiment: Experiment, scale: Scale) -> bool:
    """Whether the images of all runs of an experiment can be loaded without a download."""
    from experiments.sources import available
    from lipflow.data.dataset import Request

    kinds = {run.data for run in in_rounds(experiment.runs(scale))}
    return all(available(kind, Request(data_dir=scale.data_dir)) for kind in kinds)


def show(chosen: Sequence[Experiment], scale: Scale) -> None:
    """List all experiments with their runs; a shared run counts once."""
    counted: dict[Path, Run] = {}
    for experiment in chosen:
        here = has_data(experiment, scale)
        print(f"{experiment.name}: {experiment.title}" + ("" if here else "  (skipped: its images were not found)"))
        for run in in_rounds(experiment.runs(scale)):
            status = "no data" if not here else "shared" if run.folder in counted else state(run)
            if here:
                counted.setdefault(run.folder, run)
            expected = format_duration(cost(scale, run)) if status in ("to do", "interrupted") else ""
            print(f"  {status:<12} {expected:>7}  {run.folder.name}")
    left = [run for run in counted.values() if state(run) in ("to do", "interrupted")]
    expected = f"about {format_duration(total(scale, left))}"
    if scale.name == "paper":
        eight = format_duration(parallel(scale, left, 8))
        expected += (
            f" on one GPU like the authors', {eight} on eight of them (a run on each), by their seconds an epoch"
        )
    print(
        f"{len(counted)} runs, {len(left)} to do: {expected if scale.name == 'paper' else expected + ' on two cores'}"
    )
