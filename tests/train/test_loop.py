"""A run from its first step to its last, in this process."""

import json
import signal
from dataclasses import asdict, replace

import pytest
import torch

import lipflow
from lipflow.data import load
from lipflow.train import loop as loop_module
from lipflow.train import train
from lipflow.train.learner import Learner
from lipflow.train.record import Record
from lipflow.train.signals import Interrupted, NonFiniteLoss
from tests.train.tiny import before_call, digest, fail, log, tiny


def interrupt_first_validation(monkeypatch, run):
    """Train until a signal comes during the first validation; it is handled when that has ended."""
    with monkeypatch.context() as patch:
        before_call(patch, loop_module, "estimate", 1, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Interrupted):
            train(run)
    assert not (run.folder / "model.safetensors").exists()


def test_the_files_and_messages_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lipflow.train.writer.SECONDS_BETWEEN_LINES", 0.0)
    run = tiny(tmp_path / "r", epochs=3)
    result = train(run)
    files = {"run.json", "log.jsonl", "checkpoints", "model.safetensors", "best.safetensors"}
    assert {p.name for p in result.folder.iterdir()} - {"tensorboard"} == files
    record = Record.read(result.folder)
    assert (record.run, record.steps) == (run, 9)
    assert record.environment["torch"] == torch.__version__
    network = lipflow.load(result.folder)
    assert all(torch.equal(v, result.network.state_dict()[k]) for k, v in network.state_dict().items())
    assert torch.allclose(network.stages.center.mean, torch.tensor(load("digits", validation=1437).mean))
    output = capsys.readouterr().out
    for text in ("epoch 3/3", "(estimated) 36/255", "(exact) 36/255", "steps/s", "certifying 250/1437 images"):
        assert text in output


def test_a_run_without_validation_images_has_no_best_network(tmp_path):
    run = replace(tiny(tmp_path, epochs=1, batch_size=500), validation_images=0)
    assert train(run).validation is None
    assert "validation" not in log(tmp_path, "epoch")[0]
    with pytest.raises(ValueError, match=r"has no best\.safetensors"):
        lipflow.load(tmp_path, "best")


def test_a_run_logs_the_accuracy_of_its_batches_and_shows_gradients_to_a_watch(tmp_path):
    steps = []

    def watch(step, network):
        steps.append(step)
        assert all(float(p.grad.abs().max()) > 0 for p in network.parameters())

    train(replace(tiny(tmp_path, epochs=1, batch_size=25), certify_validation=0), watch=watch)
    assert steps == [1, 2, 3]
    counts = [line["accuracy"] * size for line, size in zip(log(tmp_path, "step"), (25, 25, 10), strict=True)]
    assert counts == pytest.approx([round(count) for count in counts])
    assert any(counts)


# The folder of a run


def test_an_existing_run_is_not_overwritten(tmp_path):
    train(tiny(tmp_path, epochs=1))
    before = digest(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds a run already; add --resume"):
        train(tiny(tmp_path, epochs=1))
    (tmp_path / "run.json").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors of a run without its run\.json"):
        train(tiny(tmp_path, epochs=1))
    assert digest(tmp_path / "model.safetensors") == before


def test_a_run_without_a_step_is_overwritten(tmp_path, monkeypatch):
    before_call(monkeypatch, Learner, "gradients", 1, lambda: fail(RuntimeError("not enough memory")))
    with pytest.raises(RuntimeError, match="not enough memory"):
        train(tiny(tmp_path, batch_size=30))
    assert (tmp_path / "run.json").exists()
    train(tiny(tmp_path, epochs=1))
    assert Record.read(tmp_path).run.recipe.batch_size == 20


def test_a_folder_that_another_process_has_changed_is_not_overwritten(tmp_path, monkeypatch):
    """The other process trains after this one has read the folder, and before it locks it."""
    run = tiny(tmp_path / "r", epochs=1)
    before_call(monkeypatch, loop_module, "_lock", 1, lambda: train(replace(run, seed=1)))
    with pytest.raises(ValueError, match="holds a run already"):
        train(run)
    assert Record.read(run.folder).run.seed == 1


def test_a_folder_is_locked_while_a_process_trains_in_it(tmp_path):
    with loop_module._lock(tmp_path), pytest.raises(ValueError, match="another process"), loop_module._lock(tmp_path):
        pass
    with loop_module._lock(tmp_path):
        pass


# Resuming


def test_a_run_is_resumed_with_the_same_images_only(tmp_path, monkeypatch):
    run = tiny(tmp_path)
    interrupt_first_validation(monkeypatch, run)
    data = load("digits", validation=run.validation_images)
    other = replace(data, validation=data.validation.take(torch.arange(1, len(data.validation))))
    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "load", lambda *_, **__: other)
        with pytest.raises(ValueError, match="the validation images are not those"):
            train(run, resume=True)
    train(run, resume=True)


def test_a_run_that_another_process_has_resumed_meanwhile_is_not_overwritten(tmp_path, monkeypatch):
    """The other process replans after this one has read run.json, and ends before this one locks the folder."""
    run = tiny(tmp_path)
    interrupt_first_validation(monkeypatch, run)
    stored = Record.read(tmp_path)
    replanned = replace(stored, plan=stored.plan.replan(1, stored.steps + 1))
    before_call(monkeypatch, loop_module, "_lock", 1, lambda: replanned.write(tmp_path))
    with pytest.raises(ValueError, match="another process has resumed"):
        train(run, resume=True)
    assert Record.read(tmp_path).plan == replanned.plan
    train(run, resume=True)


def test_a_resumed_run_must_have_the_same_flags(tmp_path, capsys):
    run = tiny(tmp_path / "r", epochs=1)
    with pytest.raises(ValueError, match="holds no run"):
        train(run, resume=True)
    train(run)
    with pytest.raises(ValueError, match=r"--seed 3 \(the run has 0\), --lr 0.5 \(the run has 0.01\)"):
        train(replace(run, seed=3, recipe=run.recipe.vary(lr=0.5)), resume=True)
    assert train(run, resume=True).validation is not None
    assert "has ended already" in capsys.readouterr().out
    for path in (run.folder / "checkpoints").glob("*.safetensors"):
        path.write_bytes(b"damaged")
    assert train(run, resume=True).validation is None  # but the network is complete
    (run.folder / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a record of a run"):
        train(run, resume=True)


def test_a_resumed_run_has_the_same_threads_and_prints_what_has_changed(tmp_path, monkeypatch, capsys):
    run = tiny(tmp_path, threads=1)
    before_call(monkeypatch, Learner, "gradients", 4, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Interrupted):
        train(run)
    record = Record.read(tmp_path)
    replace(record, environment={**record.environment, "torch": "1.0"}).write(tmp_path)
    used = []
    before_call(monkeypatch, Learner, "gradients", 1, lambda: used.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    train(run, resume=True)
    assert (used, torch.get_num_threads()) == ([1], 2)
    assert f"the result may differ from that of an uninterrupted run: torch 1.0 → {torch.__version__}" in (
        capsys.readouterr().out
    )


def test_a_resumed_run_stores_its_new_flags_and_removes_partial_files(tmp_path, monkeypatch):
    """The next `--resume`, and `lipflow certify`, read the data from its new folder."""
    run, part = tiny(tmp_path, epochs=1), tmp_path / ".best.safetensors.123.part"
    interrupt_first_validation(monkeypatch, run)
    part.touch()
    monkeypatch.setattr(loop_module, "load", lambda name, data_dir, **options: load(name, **options))
    train(replace(run, data_dir=tmp_path / "moved", certify_validation=3), resume=True)
    stored = Record.read(tmp_path).run
    assert (stored.data_dir, stored.certify_validation) == (tmp_path / "moved", 3)
    assert not part.exists()


# NaN and infinite numbers


def make_nan(monkeypatch, after):
    """Make a weight NaN after a number of steps."""
    update, rates = Learner.update, []

    def updated(self, rate):
        update(self, rate)
        rates.append(rate)
        if len(rates) == after:
            self.network.stages.linear[0].field.weight.weight.data[0, 0] = float("nan")

    monkeypatch.setattr(Learner, "update", updated)


def test_nan_weights_are_not_saved(tmp_path, monkeypatch):
    """The error names the step and the layers, and the run can be resumed from the checkpoint before it."""
    run = replace(tiny(tmp_path, epochs=4), save_every="0s")
    with monkeypatch.context() as patch:
        make_nan(patch, after=5)
        with pytest.raises(NonFiniteLoss, match="after step 5 there are NaN or infinite weights") as caught:
            train(run)
    assert "not finite: stages.linear.0.field.weight.weight" in str(caught.value)
    assert "stages.convolutions.0.field.weight: " in str(caught.value)
    assert max(path.name for path in (tmp_path / "checkpoints").iterdir()) == "step-00000004.sha256"
    train(run, resume=True)


def test_nan_weights_are_not_validated(tmp_path, monkeypatch):
    make_nan(monkeypatch, after=3)
    monkeypatch.setattr(loop_module, "estimate", lambda *_: pytest.fail("NaN weights were validated"))
    with pytest.raises(NonFiniteLoss, match="after step 3"):
        train(replace(tiny(tmp_path, images=9, batch_size=3), save_every="1h"))
    assert not (tmp_path / "best.safetensors").exists()


def test_an_infinite_loss_stops_the_run(tmp_path, monkeypatch):
    losses = iter([0.5, 0.4, float("inf")])
    monkeypatch.setattr(Learner, "gradients", lambda *_: (next(losses), 0.0))
    with pytest.raises(NonFiniteLoss, match=r"the loss is inf at step 3 of 6 .*(?s:.*)not finite: no parameter"):
        train(tiny(tmp_path))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(model_args={"dept": 3}), TypeError, "has no argument 'dept'"),
        (dict(data="mnist"), ValueError, "no dataset is called 'mnist'; use one of digits, cifar10, cifar100, folder"),
        (dict(model="cpl-xxl"), ValueError, "there is no model 'cpl-xxl'"),
        (dict(device="gpu"), ValueError, "there is no device 'gpu'"),
        (dict(device="meta"), ValueError, "--device meta cannot be used here"),
        (dict(recipe=tiny("r", cutout=9).recipe), ValueError, "cannot erase a square of side 9"),
        (dict(recipe=tiny("r", crop_padding=8).recipe), ValueError, "cannot reflect-pad 8×8 images by 8"),
    ],
)
def test_train_refuses_mistakes_before_it_writes_anything(change, error, words, tmp_path):
    with pytest.raises(error, match=words):
        train(replace(tiny(tmp_path / "r"), **change))
    assert not (tmp_path / "r").exists()


# The exact result


def test_the_exact_accuracy_is_that_of_the_frozen_network(tmp_path):
    run = tiny(tmp_path)
    result = train(run)
    split = load("digits", validation=1437).validation
    found = lipflow.certify(lipflow.freeze(lipflow.load(tmp_path)), split.images)
    right = found.label == split.labels
    certified = {text: float((right & found.certified(text)).double().mean()) for text in run.recipe.radii}
    exact = dict(images=1437, clean=float(right.double().mean()), certified=certified)
    assert result.exact is not None
    assert asdict(result.exact) == exact
    assert log(tmp_path, "exact") == [dict(kind="exact", step=6, **exact)]
    assert json.loads((tmp_path / "run.json").read_text())["validation_exact"] == exact
    assert train(run, resume=True).exact == result.exact  # it has ended, and is read


@pytest.mark.parametrize(("number", "images"), [(0, None), (5, 5), (10**6, 1437)])
def test_certify_validation_is_the_number_of_certified_images(number, images, tmp_path):
    result = train(replace(tiny(tmp_path, epochs=1), certify_validation=number))
    assert (result.exact and result.exact.images) == images
    assert len(log(tmp_path, "exact")) == (images is not None)
    assert (Record.read(tmp_path).exact is not None) == (images is not None)


@pytest.mark.parametrize("why", [TypeError("σ = tanh rounds"), RuntimeError("not enough memory"), MemoryError("full")])
def test_a_network_that_cannot_be_certified_is_saved(why, tmp_path, monkeypatch, capsys):
    before_call(monkeypatch, loop_module, "certify_split", 1, lambda: fail(why))
    assert train(tiny(tmp_path, epochs=1)).exact is None
    assert f"there is no exact result: {why}" in capsys.readouterr().out
    lipflow.load(tmp_path)


def test_a_run_that_was_stopped_while_certifying_resumes_there(tmp_path, monkeypatch):
    whole, run = tiny(tmp_path / "whole"), tiny(tmp_path / "run")
    train(whole)
    before_call(monkeypatch, loop_module, "certify_split", 1, lambda: fail(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        train(run)
    assert not (run.folder / "model.safetensors").exists()
    train(run, resume=True)
    assert digest(run.folder / "model.safetensors") == digest(whole.folder / "model.safetensors")
    assert len(log(run.folder, "step")) == 6
    assert log(run.folder, "exact") == log(whole.folder, "exact")
