"""Runs side by side, each in a process of its own with its share of the cores: `--jobs 2`.

Small networks leave most of a second thread idle, so two runs on a core each end sooner than one after the other on
two. What a worker finds is kept in the folder of the run, and the experiments read it from there.
"""

import multiprocessing
import os
import traceback
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.synchronize import Event
from pathlib import Path

from experiments.experiment import Experiment
from experiments.scale import Scale
from lipflow.train.ending import EndedEarly
from lipflow.train.run import Run

Work = tuple[Run, tuple[str, ...]]  # a run, and what is to be measured of it


def work_of(chosen: Iterable[Experiment], scale: Scale) -> list[Work]:
    """Every run of some experiments once, in their order, with all that any of them measures of it."""
    from experiments.runner import in_rounds

    runs: dict[Path, Run] = {}
    measures: dict[Path, dict[str, None]] = {}
    for experiment in chosen:
        for run in (run for row in in_rounds(experiment.runs(scale)) for run in row):
            runs.setdefault(run.folder, run)
            measures.setdefault(run.folder, {}).update(dict.fromkeys(experiment.measures))
    return [(run, tuple(measures[folder])) for folder, run in runs.items()]


class Stopped(EndedEarly):
    """All runs were asked to stop, and have saved where they were."""

    exit_code = 130


def side_by_side(jobs: int, work: Sequence[Work], scale: Scale) -> None:
    """Do all of it, `jobs` at a time. What fails is shown, and left to the experiments that need it."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(threads, stop)) as pool:
        try:
            futures: Mapping = {pool.submit(_do, run, measures, scale): run for run, measures in work}
            for future in as_completed(futures):
                if error := future.exception():
                    print(f"    failed: {futures[future].folder.name}: {error}", flush=True)
        except KeyboardInterrupt:  # those at work had the signal too, and save where they are
            stop.set()
        except BrokenProcessPool as error:
            raise OSError(f"a process of --jobs {jobs} is gone ({error}); memory may be short") from error
    if stop.is_set():
        raise Stopped("interrupted")


def _begin(threads: int, stop: Event) -> None:
    import torch

    from lipflow.machine import settle

    global _stop
    _stop = stop
    settle()
    torch.set_num_threads(threads)


_stop: Event | None = None  # of a worker: set once anybody was asked to stop, so that nobody begins another run


def _do(run: Run, measures: tuple[str, ...], scale: Scale) -> None:
    from experiments.runner import ensure, measured

    assert _stop is not None
    if _stop.is_set():
        return
    try:
        ensure(run)
        measured(run, measures, scale)
    except (EndedEarly, KeyboardInterrupt):
        _stop.set()
    except Exception as error:
        traceback.print_exc()
        raise RuntimeError(str(error)) from None  # of a kind that another process can read
