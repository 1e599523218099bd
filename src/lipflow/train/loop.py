"""The training loop, and how a run begins, resumes and ends."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lipflow.data import Dataset, Split, load
from lipflow.data.dataset import SplitName
from lipflow.models import Network
from lipflow.models.file import read, save
from lipflow.train.budget import Budget, parse_duration
from lipflow.train.checkpoint import Checkpoints
from lipflow.train.distributed import Ranks, join, threads
from lipflow.train.evaluate import Accuracy, certify_split, estimate
from lipflow.train.learner import Learner, make_network, require_finite
from lipflow.train.record import BEST, FINAL, Record, environment
from lipflow.train.run import CHANGEABLE, Run, differences
from lipflow.train.schedule import Plan
from lipflow.train.signals import Interrupted, NonFiniteLoss, Signals
from lipflow.train.writer import State, Writer, closing_message, divergence_message, opening_message, with_progress
from lipflow.untrusted import RUBBISH


@dataclass(frozen=True)
class Result:
    """A finished run: its folder, its network at the end of the schedule, and its accuracy on validation images."""

    folder: Path
    network: Network
    validation: Accuracy | None
    exact: Accuracy | None = None  # None if no images were certified


Watch = Callable[[int, Network], object]  # takes the number of a step, from 1, and the network with its gradients


def train(run: Run, resume: bool = False, watch: Watch | None = None) -> Result:
    """Train a network as `run` says, into `run.folder`, or resume the run in that folder.

    The result is the network at the end of the schedule, model.safetensors. best.safetensors is the one with the most
    certified validation images, by estimate. Test images are not used.

    `watch`, if given, is called in every step before the weights are updated, on every rank. It must not change the
    network. Steps after the last checkpoint are repeated when a run is resumed.
    """
    began, folder = time.monotonic(), run.folder
    stored = _stored(run) if resume else None
    with join(run.device) as ranks, _determinism(run, stored, ranks):
        if stored is None and ranks.first:
            _require_new(folder)
        if stored is not None and (folder / FINAL).is_file():
            return _finished(folder, stored, ranks)
        data = ranks.in_turn(
            lambda: load(run.data, run.data_dir, image_size=run.image_size, validation=run.validation_images)
        )
        if ranks.world > 1:
            _require_same_on_all(run, resume, data, ranks)
        learner = Learner(make_network(run, data), run, data.train, ranks)
        budget = Budget(parse_duration(run.budget), learner, data.validation) if run.budget else None
        if stored is None:
            steps = budget.measure(began) if budget else run.recipe.epochs * learner.steps_per_epoch
            splits: tuple[SplitName, ...] = ("train", "validation", "test") if ranks.first else ()
            digests = {split: data.digest(split) for split in splits}
            record = Record(run, Plan.of(steps), environment(ranks), data_sha256=digests, class_names=data.class_names)
        else:
            _require_same_images(stored, data)
            record = stored
        with _lock(folder) if ranks.first else nullcontext():
            if ranks.first:
                _require_unchanged(run, stored)
                record.write(folder)
            return _run(record, learner, data, budget, began, watch)


def _run(
    record: Record, learner: Learner, data: Dataset, budget: Budget | None, start: float, watch: Watch | None
) -> Result:
    """Train from the last checkpoint, or the start, to the end of the schedule."""
    ranks, checkpoints = learner.ranks, Checkpoints(learner.run.folder / "checkpoints")
    state = _restore(learner, checkpoints, record.steps)
    start -= state.elapsed
    with Writer(learner, state, record, checkpoints) if ranks.first else nullcontext() as writer:
        if writer:
            writer.say(opening_message(record, learner, data, state))
        with Signals() as signals:
            for step, epoch, batch in learner.visits(state.step):
                if step == record.steps:
                    break
                began = time.monotonic()
                state.elapsed = began - start
                decision = budget.replan(state, record.plan) if budget and ranks.first else 0
                found = (*learner.gradients(batch, epoch), signals.received, decision)
                loss, accuracy, asked_to_stop, decision = ranks.sum(found)
                if decision:
                    record = replace(record, plan=record.plan.replan(step, round(decision)))
                    if writer:
                        writer.plan(record)
                rate = learner.run.recipe.rate(record.plan.progress(step))
                if not math.isfinite(loss):
                    raise NonFiniteLoss(divergence_message(loss, step, rate, record, learner, checkpoints.steps()))
                if watch:
                    watch(step + 1, learner.network)
                learner.update(rate)
                state.step = step + 1
                state.epoch_loss += loss * len(batch)
                state.epoch_images += len(batch)
                if writer:
                    writer.step(epoch, loss, accuracy, rate)
                state.seconds += time.monotonic() - began
                if state.step % learner.steps_per_epoch == 0 or state.step == record.steps:
                    began = time.monotonic()
                    state.validation = _validate(learner, data, state.step)
                    state.validation_seconds = time.monotonic() - began
                    if writer:
                        writer.epoch(epoch, state.epoch_loss / state.epoch_images, state.validation)
                    state.epoch_loss, state.epoch_images = 0.0, 0
                state.elapsed = time.monotonic() - start
                if writer and (asked_to_stop or writer.due or state.step == record.steps):
                    writer.save()
                if asked_to_stop:
                    break
            # Also for a signal during the last validation. The sum makes every rank wait until the first one has
            # written its files, as torchrun ends all processes once one has ended.
            if ranks.sum([signals.received])[0]:
                raise Interrupted(signals.received or signal.SIGTERM, state.step, learner.run.folder)
        # The last checkpoint is written, so a run that is stopped after this line resumes here.
        found = _certify(learner, data, writer)
        if writer:
            if found is not None:
                writer.exact(found)
            replace(record, exact=found).write(learner.run.folder)
            save(learner.network, learner.run.folder / FINAL)
            writer.say(closing_message(learner, state, found))
    ranks.wait()
    return Result(learner.run.folder, learner.network.eval(), state.validation, found)


def _validate(learner: Learner, data: Dataset, step: int) -> Accuracy | None:
    require_finite(learner.network, step)
    if not len(data.validation):
        return None
    recipe = learner.run.recipe
    return estimate(learner.network, data.validation, recipe.radii, recipe.batch_size, learner.ranks)


def _certify(learner: Learner, data: Dataset, writer: Writer | None) -> Accuracy | None:
    """The exact accuracy on validation images; None if there are none, or if the network cannot be frozen."""
    run, ranks = learner.run, learner.ranks
    part = Split(data.validation.images[: run.certify_validation], data.validation.labels[: run.certify_validation])
    if not len(part):
        return None
    say = writer.say if writer else lambda line: None
    say(f"freezing the network and certifying {len(part)} validation images (--certify-validation 0: skip this)")
    try:
        return certify_split(
            learner.network, part, run.recipe.radii, ranks, lambda parts: with_progress(parts, "certifying", say)
        )
    except (ValueError, TypeError, ArithmeticError, RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError | MemoryError) and ranks.world > 1:  # perhaps on this rank only
            raise
        say(f"there is no exact result: {error}")
        return None


def _restore(learner: Learner, checkpoints: Checkpoints, steps: int) -> State:
    """Load the latest complete checkpoint, the same on every rank; without one, return the initial state."""
    ranks = learner.ranks
    checkpoint = checkpoints.latest() if ranks.first else None
    step = ranks.agree(checkpoint.step if checkpoint else 0)
    if step and checkpoint is None:
        checkpoint = checkpoints.load(step)
    ranks.wait()  # all ranks have read their checkpoint before the first one removes files
    if ranks.first:
        checkpoints.tidy(step)
        for name in ("run.json", FINAL, BEST):  # partly written files of a killed process
            for part in learner.run.folder.glob(f".{name}.*.part"):
                part.unlink(missing_ok=True)
    if checkpoint is None:
        return State()
    try:
        learner.load(checkpoint.tensors)
        state = State.from_json(checkpoint.numbers)
        if not state.step == step <= steps:
            raise ValueError(f"it is of step {state.step}, its name of step {step}, and the run has {steps} steps")
    except RUBBISH as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{checkpoints.path(step)} is not a checkpoint of this run: {reason}") from None
    return state


# The folder of a run


def _require_new(folder: Path) -> None:
    """Raise if a folder holds files of a run that has begun to train."""
    log = folder / "log.jsonl"
    begun = [name for name in (FINAL, BEST, "checkpoints") if (folder / name).exists()]
    begun += [log.name] if log.exists() and log.stat().st_size else []
    if begun and (folder / "run.json").exists():
        raise ValueError(f"{folder} holds a run already; add --resume to continue it, or give another --out")
    if begun:
        raise ValueError(f"{folder} holds {begun[0]} of a run without its run.json; give another --out")


def _require_unchanged(run: Run, stored: Record | None) -> None:
    """Raise if another process has trained in the folder since it was read, which may be minutes ago."""
    if stored is None:
        _require_new(run.folder)
    elif _stored(run) != stored:
        raise ValueError(f"another process has resumed the run in {run.folder} meanwhile; run the command again")


def _require_same_images(stored: Record, data: Dataset) -> None:
    if others := stored.other_images(data, "train", "validation"):
        raise ValueError(
            f"{stored.run.folder} cannot be resumed: the {' and '.join(others)} images are not those with which it "
            "began, or are decoded differently here; give --data-dir of those images, or train with another --out"
        )


def _require_same_on_all(run: Run, resume: bool, data: Dataset, ranks: Ranks) -> None:
    """Raise, on every rank, if the processes have different flags or images."""
    own = set(CHANGEABLE) - {"certify_validation"}  # each rank may have its own folders and device
    asked = {name: value for name, value in run.to_json().items() if name not in own}
    ranks.require_same(flags=f"{asked} {resume}", images=data.digest("train") + data.digest("validation"))


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock a folder against other training processes; the system releases the lock when this process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.jsonl"
    if log.is_symlink() or (log.exists() and not log.is_file()):  # it is written in place
        raise ValueError(f"{log} is a link, or not a regular file; remove it")
    try:
        import fcntl
    except ImportError:  # on Windows
        yield
        return
    with log.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process trains in {folder}; wait until it ends, or give another --out") from None
        except OSError:  # a file system without locks
            pass
        yield


def _stored(run: Run) -> Record:
    """The record of the run that is resumed; raise if a flag would change what it computes."""
    record = Record.read(run.folder)
    if changed := differences(record.run, run):
        raise ValueError(
            f"{run.folder} cannot be resumed with other flags: {', '.join(map(str, changed))}; drop them, or --resume"
        )
    return replace(record, run=run)  # its folder may have been moved


def _finished(folder: Path, stored: Record, ranks: Ranks) -> Result:
    if ranks.first:
        print(f"{folder} has ended already: {folder / FINAL}")
    validation = None
    with suppress(OSError, *RUBBISH):  # damaged checkpoints: the network is complete without them
        if last := Checkpoints(folder / "checkpoints").latest():
            validation = State.from_json(last.numbers).validation
    return Result(folder, read(folder / FINAL), validation, stored.exact)


@contextmanager
def _determinism(run: Run, stored: Record | None, ranks: Ranks) -> Iterator[None]:
    """Use the number of threads with which the run began, and deterministic kernels on a GPU."""
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
