"""Start programs in subprocesses."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TIMEOUT_SECONDS = 600
REPOSITORY = Path(__file__).parents[1]


def start(*words: str, settings: Mapping[str, str] | None = None, **options) -> subprocess.Popen[str]:
    """Start `python …` in the repository, with stdout and stderr in one stream and `settings` in the environment."""
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path, **(settings or {})},
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
    """Run `lipflow …`."""
    return finish(start("-m", "lipflow", *words))


def torchrun(*words: str, fails: bool = False) -> str:
    """Run `python …` in two distributed processes."""
    return finish(start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words), fails)
