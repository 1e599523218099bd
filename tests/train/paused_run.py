"""`paused_run.py STEP FILE train …`: lipflow, paused at a step as long as a file exists.

A test that stops a run in the middle needs it to be running still, on a fast machine too.
"""

import sys
import time
from pathlib import Path

from lipflow.cli import main
from lipflow.train.writer import Writer

if __name__ == "__main__":
    last, file, log_step = int(sys.argv[1]), Path(sys.argv[2]), Writer.step

    def step(self: Writer, epoch: int, loss: float, accuracy: float, rate: float) -> None:
        log_step(self, epoch, loss, accuracy, rate)
        while self.state.step >= last and file.exists():
            time.sleep(0.002)

    Writer.step = step
    sys.exit(main(sys.argv[3:]))
