"""Four pieces of work, two at a time. Each waits for a signal, so none ends before it, however fast the machine is."""

import sys
import time

from experiments.parallel import in_parallel
from experiments.runner import exit_code_of


def wait(name: str) -> None:
    print(f"begun: {name}", flush=True)
    while True:  # signal.pause() would miss a signal that comes just before it
        time.sleep(0.01)


def work() -> int:
    return len(list(in_parallel(2, wait, {name: (name,) for name in ("a", "b", "c", "d")})))


if __name__ == "__main__":
    sys.exit(exit_code_of("experiments", work))
