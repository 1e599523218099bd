"""`held.py STEP FILE train …`: lipflow, held at a step for as long as a file exists.

A process that is to be stopped in the middle of a run must not have ended before, however fast the machine is.
"""

import sys
import time
from pathlib import Path

from lipflow.cli import main
from lipflow.train.writer import Writer

if __name__ == "__main__":
    last, file, log_step = int(sys.argv[1]), Path(sys.argv[2]), Writer.step

    def step(self: Writer, epoch: int, loss: float, rate: float) -> None:
        log_step(self, epoch, loss, rate)
        while self.state.step >= last and file.exists():
            time.sleep(0.002)

    Writer.step = step
    sys.exit(main(sys.argv[3:]))
