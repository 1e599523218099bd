"""Programs that tests start in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

PATIENCE = 600  # seconds after which a process is taken to hang; on a busy machine one may need a minute
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
    """All that a process printed. It must succeed, or fail if it `fails`."""
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.terminate()  # if it hangs
    assert (process.returncode != 0) == fails, output
    return output


def lipflow(*words: str) -> str:
    """`lipflow …` to its end."""
    return finish(start("-m", "lipflow", *words))


def torchrun(*words: str, fails: bool = False) -> str:
    """`python …` in two processes that know of each other, to their end."""
    return finish(start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words), fails)
