"""Work side by side, each piece in a process of its own with its share of the cores: `--jobs 2`.

Small networks leave most of a second thread idle, so two runs on a core each end sooner than one after the other on
two. What a worker finds it leaves on disk.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.synchronize import Event
from typing import Any

from lipflow.train.signals import EndedEarly


class Stopped(EndedEarly):
    """All were asked to stop, and have saved where they were."""

    exit_code = 130


def side_by_side(
    jobs: int,
    function: Callable[..., object],
    work: Mapping[str, tuple[Any, ...]],
    after: Callable[[str], object] = lambda name: None,
) -> None:
    """function(*arguments) for all of `work`, by name, `jobs` at a time, and `after(name)` here when it has ended.

    What fails is shown, and the rest goes on.
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
                    after(futures[future])
        except KeyboardInterrupt:  # those at work had the signal too, and save where they are
            stop.set()
        except BrokenProcessPool as error:
            raise OSError(f"a process of --jobs {jobs} is gone ({error}); memory may be short") from error
    if stop.is_set():
        raise Stopped("interrupted")


_stop: Event | None = None  # of a worker: set once anybody was asked to stop, so that nobody begins another piece


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
        raise RuntimeError(str(error)) from None  # of a kind that another process can read
