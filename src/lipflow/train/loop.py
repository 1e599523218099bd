"""The training loop, and the opening and closing of a run around it."""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lipflow.data import Dataset, Split, load
from lipflow.data.dataset import SplitName
from lipflow.models import Network
from lipflow.train.accuracy import Accuracy
from lipflow.train.budget import Budget
from lipflow.train.checkpoint import Checkpoints, save_model
from lipflow.train.diagnosis import require_finite
from lipflow.train.distributed import Ranks, join, threads
from lipflow.train.duration import parse_duration
from lipflow.train.ending import Interrupted, NonFiniteLoss, Signals
from lipflow.train.estimate import estimate
from lipflow.train.exact import exact
from lipflow.train.learner import Learner, make_network
from lipflow.train.plan import Plan
from lipflow.train.record import BEST, FINAL, Record, environment, load_run
from lipflow.train.run import PLACE, Run, differences
from lipflow.train.saying import closing, lost, opening
from lipflow.train.schedule import rate_at
from lipflow.train.scribe import Scribe, Standing


@dataclass(frozen=True)
class Result:
    """A run that has ended: its folder, its network at the end of the schedule, and what validation said of it."""

    folder: Path
    network: Network
    validation: Accuracy | None
    exact: Accuracy | None = None  # None if there is nothing to certify, or nobody asked


def train(run: Run, resume: bool = False) -> Result:
    """Train a network as `run` says, into `run.folder`, or go on with the run that is there.

    The result is the network at the end of the schedule, model.safetensors. best.safetensors, beside it, is the one
    that certified most validation images, by estimate; the test images are never looked at.
    """
    began, folder = time.monotonic(), run.folder
    stored = _stored(run) if resume else None
    with join(run.device) as ranks, _determinism(run, stored, ranks):
        if stored is None and ranks.first:
            _require_new(folder)
        if stored is not None and (folder / FINAL).is_file():
            return _ended(folder, stored, ranks)
        data = ranks.in_turn(lambda: load(run.data, run.data_dir, image_size=run.image_size, validation=run.validation))
        if ranks.world > 1:
            _require_one_run(run, resume, data, ranks)
        learner = Learner(make_network(run, data), run, data.train, ranks)
        budget = Budget(parse_duration(run.budget), learner, data.validation) if run.budget else None
        if stored is None:
            steps = budget.first(began) if budget else run.recipe.epochs * learner.steps_per_epoch
            splits: tuple[SplitName, ...] = ("train", "validation", "test") if ranks.first else ()
            digests = {split: data.digest(split) for split in splits}
            record = Record(run, Plan.of(steps), environment(ranks), None, digests, data.class_names)
        else:
            _require_same_images(stored, data)
            record = stored
        with _held(folder) if ranks.first else nullcontext():
            if ranks.first:
                _require_unchanged(run, stored)  # as starting takes a while
                record.write(folder)
            return _run(record, learner, data, budget, began)


def _run(record: Record, learner: Learner, data: Dataset, budget: Budget | None, start: float) -> Result:
    """From the last checkpoint, or the start, to the end of the schedule."""
    ranks, checkpoints = learner.ranks, Checkpoints(learner.run.folder / "checkpoints")
    standing = _take_up(learner, checkpoints)
    start -= standing.elapsed
    with _scribe(learner, standing, record, checkpoints) as scribe:
        if scribe:
            scribe.say(opening(record, learner, data, standing))
        with Signals() as signals:
            for step, epoch, batch in learner.visits(standing.step):
                if step == record.steps:
                    break
                began = time.monotonic()
                standing.elapsed = began - start
                decision = budget.again(standing, record.plan) if budget and ranks.first else 0
                loss, asked_to_stop, decision = ranks.sum([learner.gradients(batch, epoch), signals.received, decision])
                if decision:
                    record = replace(record, plan=record.plan.bend(step, round(decision)))
                    if scribe:
                        scribe.plan(record)
                rate = rate_at(record.plan.progress(step), learner.run.recipe)
                if not math.isfinite(loss):
                    raise NonFiniteLoss(lost(loss, step, record.steps, rate, learner, checkpoints))
                learner.update(rate)
                standing.step = step + 1
                standing.epoch_loss += loss * len(batch)
                standing.epoch_images += len(batch)
                if scribe:
                    scribe.step(epoch, loss, rate)
                standing.seconds += time.monotonic() - began
                if standing.step % learner.steps_per_epoch == 0 or standing.step == record.steps:
                    began = time.monotonic()
                    standing.validation = _validate(learner, data, standing.step)
                    standing.checking = time.monotonic() - began
                    if scribe:
                        scribe.epoch(epoch, standing.epoch_loss / standing.epoch_images, standing.validation)
                    standing.epoch_loss, standing.epoch_images = 0.0, 0
                standing.elapsed = time.monotonic() - start
                if scribe and (asked_to_stop or scribe.due or standing.step == record.steps):
                    scribe.save()
                if asked_to_stop:
                    break
            # Also if the signal came while the last step was checked and saved. The ranks meet here: torchrun ends all
            # of them once one has ended, and the first may still be writing.
            if ranks.sum([signals.received])[0]:
                raise Interrupted(signals.received or signal.SIGTERM, standing.step, learner.run.folder)
        # The last checkpoint is written: whoever stops the run from here on may resume it, and comes back to this line.
        found = _certify(learner, data, scribe)
        if scribe:
            if found is not None:
                scribe.exact(found)
            replace(record, exact=found).write(learner.run.folder)
            save_model(learner.network, learner.run.folder / FINAL)
            scribe.say(closing(learner, standing, found))
    ranks.wait()
    return Result(learner.run.folder, learner.network.eval(), standing.validation, found)


def _validate(learner: Learner, data: Dataset, step: int) -> Accuracy | None:
    require_finite(learner.network, step)
    if not len(data.validation):
        return None
    recipe = learner.run.recipe
    return estimate(learner.network, data.validation, recipe.radii, recipe.batch_size, learner.ranks)


def _certify(learner: Learner, data: Dataset, scribe: Scribe | None) -> Accuracy | None:
    """The exact result on validation images. A network that cannot be frozen is trained all the same."""
    part = Split(data.validation.images[: learner.run.exact], data.validation.labels[: learner.run.exact])
    if not len(part):
        return None
    say = scribe.say if scribe else lambda line: None
    say(f"freezing the network, and certifying {len(part)} validation images exactly (--exact 0: skip this)")
    try:
        return exact(learner.network, part, learner.run.recipe.radii, learner.ranks, say)
    except (ValueError, TypeError, ArithmeticError, RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError | MemoryError) and learner.ranks.world > 1:  # of this rank alone, perhaps
            raise
        say(f"there is no exact result: {error}")
        return None


def _take_up(learner: Learner, checkpoints: Checkpoints) -> Standing:
    """Load the latest whole checkpoint, the same on every rank; without one, stand at the start."""
    ranks = learner.ranks
    checkpoint = checkpoints.latest() if ranks.first else None
    step = ranks.agree(checkpoint.step if checkpoint else 0)
    if step and checkpoint is None:
        checkpoint = checkpoints.load(step)
    ranks.wait()  # the first rank may remove files from here on
    if ranks.first:
        checkpoints.tidy(step)
        for name in ("run.json", FINAL, BEST):  # what a killed write left
            for part in learner.run.folder.glob(f".{name}.*.part"):
                part.unlink(missing_ok=True)
    if checkpoint is None:
        return Standing()
    learner.load(checkpoint.tensors)
    return Standing.from_json(checkpoint.numbers)


def _scribe(
    learner: Learner, standing: Standing, record: Record, checkpoints: Checkpoints
) -> Scribe | nullcontext[None]:
    return Scribe(learner, standing, record, checkpoints) if learner.ranks.first else nullcontext()


# The folder of a run


def _require_new(folder: Path) -> None:
    """Refuse a folder that holds anything of a run, but for one that has not come to its first step."""
    log = folder / "log.jsonl"
    begun = [name for name in (FINAL, BEST, "checkpoints") if (folder / name).exists()]
    begun += [log.name] if log.exists() and log.stat().st_size else []
    if begun and (folder / "run.json").exists():
        raise ValueError(f"{folder} holds a run already; add --resume to go on with it, or give another --out")
    if begun:
        raise ValueError(f"{folder} holds {begun[0]} of a run without its run.json; give another --out")


def _require_unchanged(run: Run, stored: Record | None) -> None:
    """Refuse what another process has done to the folder since it was looked at."""
    if stored is None:
        _require_new(run.folder)
    elif (run.folder / FINAL).is_file() or _stored(run) != stored:
        raise ValueError(f"another process has just trained in {run.folder}; type the command again")


def _require_same_images(stored: Record, data: Dataset) -> None:
    if others := stored.other_images(data, "train", "validation"):
        raise ValueError(
            f"{stored.run.folder} cannot go on: the {' and '.join(others)} images are not those that it began with, "
            "or are decoded differently here; give --data-dir of the old ones, or train anew with another --out"
        )


def _require_one_run(run: Run, resume: bool, data: Dataset, ranks: Ranks) -> None:
    """Refuse, on every rank, processes that were started with other flags or see other images."""
    own = set(PLACE) - {"exact"}  # each may have its own place, and not its own number of images to certify
    asked = {name: value for name, value in run.to_json().items() if name not in own}
    ranks.require_same(flags=f"{asked} {resume}", images=data.digest("train") + data.digest("validation"))


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Let no other process train in a folder meanwhile; the system lets go of it, however this process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # on Windows
        yield
        return
    with (folder / "log.jsonl").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process trains in {folder}; wait for it, or give another --out") from None
        except OSError:  # a file system without locks
            pass
        yield


def _stored(run: Run) -> Record:
    """The record of the run to go on with, unless the flags ask for another run."""
    record = Record.read(run.folder)
    if changed := differences(record.run, run):
        raise ValueError(
            f"{run.folder} cannot go on as another run: {', '.join(map(str, changed))}; drop the flag, or --resume"
        )
    return replace(record, run=run)  # it may have moved


def _ended(folder: Path, stored: Record, ranks: Ranks) -> Result:
    if ranks.first:
        print(f"{folder} has ended already: {folder / FINAL}")
    validation = None
    with suppress(ValueError, OSError):  # the network is whole, whatever became of its checkpoints
        if last := Checkpoints(folder / "checkpoints").latest():
            validation = Standing.from_json(last.numbers).validation
    return Result(folder, load_run(folder)[1], validation, stored.exact)


@contextmanager
def _determinism(run: Run, stored: Record | None, ranks: Ranks) -> Iterator[None]:
    """Compute the same bits each time: as many threads as the run began with, and on a GPU deterministic kernels."""
    began = {} if stored is None else stored.environment
    number = began.get("threads", 0) if began.get("processes") == ranks.world else run.recipe.threads
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if ranks.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with threads(number):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
