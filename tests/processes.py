"""Programs that tests start in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_SECONDS = 600  # a process that takes longer hangs; on a busy machine one may need a minute
REPOSITORY = Path(__file__).parents[1]


def start(*words: str, **options) -> subprocess.Popen[str]:
    """`python …` in the repository; what it prints and its errors are one stream."""
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def finish(process: subprocess.Popen[str], fails: bool = False) -> str:
    """Wait for a process and return what it printed; assert that it succeeded, or that it failed if `fails`."""
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.terminate()  # does nothing unless the wait timed out
    assert (process.returncode != 0) == fails, output
    return output


def lipflow(*words: str) -> str:
    """`lipflow …` to its end."""
    return finish(start("-m", "lipflow", *words))


def torchrun(*words: str, fails: bool = False) -> str:
    """`python …` in two processes that know of each other, to their end."""
    return finish(start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words), fails)
