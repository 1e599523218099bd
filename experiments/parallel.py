"""Work in parallel processes: several runs at a time with `--jobs 2`, or one run on all processes of torchrun.

With --jobs, each process has its share of the cores. Small networks gain little from a second thread, so two runs in
parallel, on one core each, take less time than one after the other on two cores. A worker stores its results on the
disk.

Under torchrun, all processes do the same: they train, certify and attack together. The first one does the rest, while
the others wait, and only it writes and prints.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.synchronize import Event
from typing import Any

from lipflow.train.signals import EndedEarly


def is_first() -> bool:
    """Whether this is the first process of torchrun, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def agree(value: int) -> int:
    """The value of the first process, on each process of torchrun. Each waits for all others."""
    from lipflow.train.distributed import join

    with join("cpu") as ranks:
        return ranks.agree(value)


class Stopped(EndedEarly):
    """All runs were interrupted and have saved their state."""

    exit_code = 130


def in_parallel(jobs: int, function: Callable[..., object], work: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """Call function(*arguments) for each entry of `work`, `jobs` at a time, and yield its name when it has ended.

    Errors are printed, and the other entries continue.
    """
    threads = max(1, (os.cpu_count() or 1) // jobs)
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(threads, stop)) as pool:
        try:
            futures = {pool.submit(_do, function, arguments): name for name, arguments in work.items()}
            for future in as_completed(futures):
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    raise error
                if error:
                    print(f"    failed: {futures[future]}: {error}", flush=True)
                elif not stop.is_set():
                    yield futures[future]
        except KeyboardInterrupt:  # the workers get the signal too, and save their state
            stop.set()
        except BrokenProcessPool as error:
            raise OSError(f"a process of --jobs {jobs} was killed ({error}), perhaps for lack of memory") from error
    if stop.is_set():
        raise Stopped("interrupted")


_stop: Event | None = None  # in a worker: set once one of them is interrupted, so that none begins other work


def _begin(threads: int, stop: Event) -> None:
    import torch

    from lipflow.machine import keep_freed_memory

    global _stop
    _stop = stop
    keep_freed_memory()
    torch.set_num_threads(threads)


def _do(function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    assert _stop is not None
    if _stop.is_set():
        return
    try:
        function(*arguments)
    except (EndedEarly, KeyboardInterrupt):
        _stop.set()
    except Exception as error:
        traceback.print_exc()
        raise RuntimeError(str(error)) from None  # because any RuntimeError can be pickled
