"""The time of a call and the memory of a process, as the benchmarks measure them."""

import resource
import sys
import time
from collections.abc import Callable


def seconds(function: Callable[[], object]) -> float:
    """The time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def least_seconds(function: Callable[[], object], times: int = 3) -> float:
    """The least time of some calls, after one to warm up: other processes can only add time."""
    function()
    return min(seconds(function) for _ in range(times))


def peak_megabytes() -> float:
    """The greatest resident size of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3)  # bytes on macOS, kilobytes elsewhere
