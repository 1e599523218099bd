"""The time of a call and the memory of a process, as the benchmarks measure them."""

import resource
import sys
import time
from collections.abc import Callable

import torch


def seconds(function: Callable[[], object]) -> float:
    """The time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def least_seconds(function: Callable[[], object], times: int = 3) -> float:
    """The least time of some calls, after one to warm up: other processes can only add time."""
    function()
    return min(seconds(function) for _ in range(times))


def gigaflops(size: int = 2048) -> float:
    """The rate of this machine in products of float32 matrices, to compare its times with those of another one."""
    a, b = torch.rand(size, size), torch.rand(size, size)
    return 2 * size**3 / least_seconds(lambda: a @ b, times=5) / 1e9


def peak_megabytes() -> float:
    """The greatest resident size of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3)  # bytes on macOS, kilobytes elsewhere
