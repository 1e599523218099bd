"""The name of the processor, and a setting of malloc that makes large tensors cheaper.

By default, glibc maps new memory for every large tensor and unmaps it when the tensor is freed. Each training step then
has page faults for all of its memory, which take as long as a convolution. With this setting, freed memory stays in the
heap and is reused until the process ends. The command line program applies it; importing lipflow does not.
"""

import ctypes
import platform
import sys
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of malloc.h
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Keep freed memory in this process, and return whether that was possible (only glibc has these settings)."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _NEVER))


def processor() -> str:
    """The name of the processor, or else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
