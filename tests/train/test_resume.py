"""A run that is stopped and resumed ends with the same bits as one that is not stopped."""

import json
import signal
import time
from dataclasses import replace

import pytest

from lipflow.train import train
from lipflow.train.learner import Learner
from tests.processes import TIMEOUT_SECONDS, lipflow, start
from tests.train.tiny import ARGS, FLAGS, before_call, digest, fail, log, tiny

EPOCHS, STEPS = 12, 12 * 19


def stopped(folder, number, count, *words):
    """The exit code and the output of a run that gets a signal once its log has `count` more lines.

    The run is paused a few steps later, so that it cannot end first.
    """
    path, hold = folder / "log.jsonl", folder.with_suffix(".hold")

    def lines():
        return path.read_bytes().count(b"\n") if path.exists() else 0

    hold.touch()
    wanted = lines() + count
    process = start("tests/train/paused_run.py", str(wanted + 10), str(hold), *words)
    while lines() < wanted:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.002)
    process.send_signal(number)
    hold.unlink()
    output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    return process.returncode, output


def untimed(folder):
    """The lines of the log without their times."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def assert_same(folder, whole):
    for name in ("model.safetensors", "best.safetensors"):
        assert digest(folder / name) == digest(whole / name)
    assert untimed(folder) == untimed(whole)


def test_a_run_of_killed_processes_has_the_same_bits(tmp_path):
    """SIGKILL before there is a checkpoint, during steps and during writing; SIGTERM; SIGINT; a damaged file."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    flags = ["--epochs", str(EPOCHS), "--batch-size", "64", *FLAGS]
    lipflow("train", "--out", str(whole), *flags)
    assert [line["step"] for line in log(whole, "step")] == list(range(1, STEPS + 1))

    resume = ["train", "--out", str(folder), "--resume"]
    stopped(folder, signal.SIGKILL, 1, "train", "--out", str(folder), *flags, "--save-every", "0.02s")
    stopped(folder, signal.SIGKILL, 40, *resume)
    code, output = stopped(folder, signal.SIGTERM, 20, *resume, "--save-every", "1h")
    assert code == 143, output
    assert f"continue with `lipflow train --out {folder} --resume`" in output
    assert "Traceback" not in output
    last = untimed(folder)[-1]["step"]
    assert (folder / "checkpoints" / f"step-{last:08d}.sha256").exists()  # saved because of the signal: none was due
    code, output = stopped(folder, signal.SIGINT, 40, *resume)
    assert code == 130, output

    latest = max(folder.glob("checkpoints/*.sha256")).with_suffix(".safetensors")
    latest.write_bytes(latest.read_bytes()[: latest.stat().st_size // 2])
    output = lipflow(*resume)
    assert "it is damaged or was changed; continuing from step" in output
    assert "lipflow: warning: " in output
    assert_same(folder, whole)


class Crash(Exception):
    pass


KW = dict(channels=4, hidden=8, features=8)
CASES = [
    ("cpl-digits", ARGS, "adam"),
    ("cpl-digits", ARGS, "sgd"),
    ("cayley-kw3", KW, "adam"),
    ("bcop-large", KW, "adam"),
    ("soc+-10", dict(stages=2, channels=4), "sgd"),
]


@pytest.mark.parametrize(("model", "args", "optimiser"), CASES)
def test_a_crash_after_every_step_changes_no_bit(model, args, optimiser, tmp_path, monkeypatch):
    """A checkpoint each step, a crash after each step, at the ends of epochs and within."""
    recipe = dict(epochs=2, images=50, optimiser=optimiser, weight_decay=1e-3, loss="certificate", lln=False)
    whole = replace(tiny(tmp_path / "whole", **recipe), model=model, model_args=args)
    train(whole)
    run = replace(whole, out=tmp_path / "run", save_every="0s")
    for crashes in range(5):
        with monkeypatch.context() as patch:
            before_call(patch, Learner, "gradients", 2, lambda: fail(Crash()))
            with pytest.raises(Crash):
                train(run, resume=crashes > 0)
    train(run, resume=True)
    assert_same(tmp_path / "run", tmp_path / "whole")
