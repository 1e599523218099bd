"""What the first rank writes: progress on the screen, the log, checkpoints and the best network."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from lipflow.train.accuracy import Accuracy
from lipflow.train.checkpoint import Checkpoint, Checkpoints, save_model
from lipflow.train.diagnosis import require_finite
from lipflow.train.duration import parse_duration
from lipflow.train.learner import Learner
from lipflow.train.log import Log
from lipflow.train.progress import make_progress
from lipflow.train.record import BEST, Record


@dataclass
class Standing:
    """Where a run stands, besides its tensors: what a checkpoint keeps of the loop."""

    step: int = 0  # steps done
    epoch_loss: float = 0.0  # summed over the images seen so far in this epoch
    epoch_images: int = 0
    best: float = -1.0  # the greatest score on validation images so far
    best_epoch: int = 0
    validation: Accuracy | None = None  # the last one
    seconds: float = 0.0  # spent on steps, over all processes that have worked on this run
    elapsed: float = 0.0  # spent in all, from the start of each
    checking: float | None = None  # what the last validation took
    log: int = 0  # bytes of log.jsonl

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Standing":
        validation = values["validation"]
        return cls(**{**values, "validation": None if validation is None else Accuracy(**validation)})


class Scribe:
    """Writes a run down, from where it stands."""

    def __init__(self, learner: Learner, standing: Standing, record: Record, checkpoints: Checkpoints) -> None:
        self.learner, self.standing, self.record, self.checkpoints = learner, standing, record, checkpoints
        self.folder: Path = learner.run.folder
        self.log = Log(self.folder, standing.log, standing.step)
        self.progress = make_progress(standing.step, record.steps)
        self.every, self.saved = parse_duration(learner.run.checkpoint_every), time.monotonic()

    def plan(self, record: Record) -> None:
        """The run has decided on another number of steps, which the next step is taken by."""
        self.record = record
        record.write(self.folder)
        self.progress.expect(record.steps)

    def step(self, epoch: int, loss: float, rate: float) -> None:
        """A step is done."""
        self.log.write("step", self.standing.step, epoch=epoch + 1, loss=loss, lr=rate)
        self.progress.advance(self.standing.step, loss)

    def epoch(self, epoch: int, loss: float, validation: Accuracy | None) -> None:
        """An epoch is done. The best network so far is the one that certifies most validation images, by estimate."""
        epochs = -(-self.record.steps // self.learner.steps_per_epoch)
        line, values = f"epoch {epoch + 1}/{epochs}  loss {loss:.4f}", {}
        if validation is not None:
            line += f"  {validation.told('estimated')}"
            values = {"validation": {"clean": validation.clean, "certified_estimated": validation.certified}}
            if validation.score >= self.standing.best:  # of equals the later one, which has learned longer
                self.standing.best, self.standing.best_epoch = validation.score, epoch + 1
                save_model(self.learner.network, self.folder / BEST)
        seconds = round(self.standing.seconds, 3)
        self.log.write("epoch", self.standing.step, epoch=epoch + 1, loss=loss, seconds=seconds, **values)
        self.progress.epoch(line)

    def exact(self, found: Accuracy) -> None:
        """The schedule has ended, and the validation images are certified."""
        self.log.write("exact", self.standing.step, images=found.images, clean=found.clean, certified=found.certified)

    @property
    def due(self) -> bool:
        """Whether the last checkpoint is older than a crash may cost."""
        return time.monotonic() - self.saved >= self.every

    def save(self) -> None:
        """Write a checkpoint, of weights that are numbers."""
        require_finite(self.learner.network, self.standing.step)
        self.standing.log = self.log.position()
        self.checkpoints.save(Checkpoint(self.standing.step, self.learner.tensors(), asdict(self.standing)))
        self.saved = time.monotonic()

    def say(self, text: str) -> None:
        self.progress.say(text)

    def __enter__(self) -> "Scribe":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.close()
        self.log.close()
