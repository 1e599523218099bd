"""The machine: its processor by name, and settings of this process that make large tensors cheap.

The settings are applied by the command line program, and never on import.
glibc maps every large tensor afresh and gives it back when it is freed, so that each training step faults in all of its
pages again, which costs as much as a convolution. Kept in the heap, the pages are reused. What a process frees then
stays with it until it ends.
"""

import ctypes
import platform
import sys
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of malloc.h
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Keep freed memory in this process; whether that was possible (glibc alone has these settings)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _NEVER))


def processor() -> str:
    """The processor's own name, or else its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
