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
from tests.train.tiny import digest, log, tiny


def test_the_files_and_messages_of_a_run(tmp_path, capsys):
    run = tiny(tmp_path / "r", epochs=3)
    result = train(run)
    assert {p.name for p in result.folder.iterdir()} - {"tensorboard"} == {
        "run.json", "log.jsonl", "checkpoints", "model.safetensors", "best.safetensors",
    }  # fmt: skip
    record = json.loads((result.folder / "run.json").read_text())
    assert record["steps"] == 9
    assert record["environment"]["torch"] == torch.__version__
    assert record["environment"]["lipflow"] == lipflow.__version__
    stored, network = Record.read(result.folder).run, lipflow.load(result.folder)
    assert stored == run
    assert all(torch.equal(v, result.network.state_dict()[k]) for k, v in network.state_dict().items())
    assert torch.allclose(network.stages.center.mean, torch.tensor(load("digits", validation=1437).mean))
    said = capsys.readouterr().out
    assert "epoch 3/3" in said
    assert "certified (estimated) 36/255" in said
    assert "certified (exact) 36/255" in said
    assert "steps/s" in said
    assert "left" in said


def test_seeds_matter_and_nothing_else_is_random(tmp_path):
    torch.manual_seed(7)
    first = train(tiny(tmp_path / "a"))
    torch.manual_seed(8)
    train(tiny(tmp_path / "b"))
    train(replace(tiny(tmp_path / "c"), seed=1))
    assert digest(first.folder / "model.safetensors") == digest(tmp_path / "b" / "model.safetensors")
    assert digest(first.folder / "model.safetensors") != digest(tmp_path / "c" / "model.safetensors")


def test_without_validation_images(tmp_path):
    run = replace(tiny(tmp_path, epochs=1, batch_size=500), validation_images=0)
    assert train(run).validation is None
    assert not (tmp_path / "best.safetensors").exists()
    assert "validation" not in log(tmp_path, "epoch")[0]
    with pytest.raises(ValueError, match=r"has no best\.safetensors"):
        lipflow.load(tmp_path, "best")


def test_an_existing_run_is_not_overwritten(tmp_path):
    train(tiny(tmp_path, epochs=1))
    before = digest(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds a run already; add --resume"):
        train(tiny(tmp_path, epochs=1))
    assert digest(tmp_path / "model.safetensors") == before
    (tmp_path / "run.json").unlink()
    with pytest.raises(ValueError, match=r"holds model\.safetensors of a run without its run\.json"):
        train(tiny(tmp_path, epochs=1))


def test_a_run_without_a_step_is_replaced(tmp_path, monkeypatch):
    def too_large(self, batch, epoch):
        raise RuntimeError("not enough memory")

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "gradients", too_large)
        with pytest.raises(RuntimeError, match="not enough memory"):
            train(tiny(tmp_path, batch_size=30))
    assert (tmp_path / "run.json").exists()
    train(tiny(tmp_path, epochs=1))
    assert Record.read(tmp_path).run.recipe.batch_size == 20


def test_a_run_is_resumed_with_its_own_images_only(tmp_path, monkeypatch):
    run, usual = tiny(tmp_path), loop_module.estimate
    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "estimate", lambda *given: signal.raise_signal(signal.SIGINT) or usual(*given))
        with pytest.raises(Interrupted):
            train(run)
    other = load("digits", validation=run.validation_images)
    other = replace(other, validation=other.validation.take(torch.arange(1, len(other.validation))))
    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "load", lambda *_, **__: other)
        with pytest.raises(ValueError, match="the validation images are not those"):
            train(run, resume=True)
    train(run, resume=True)


def test_a_folder_that_another_process_changed_is_not_overwritten(tmp_path, monkeypatch):
    """Another process ends the run, or begins one, after the folder is read and before it is locked."""
    run, held = tiny(tmp_path / "r", epochs=1), loop_module._lock

    def after_another(folder):
        monkeypatch.setattr(loop_module, "_lock", held)
        train(replace(run, seed=1))
        return held(folder)

    monkeypatch.setattr(loop_module, "_lock", after_another)
    with pytest.raises(ValueError, match="holds a run already"):
        train(run)
    assert Record.read(run.folder).run.seed == 1
    stored = loop_module._stored(replace(run, seed=1))
    with pytest.raises(ValueError, match="another process has just trained in"):
        loop_module._require_unchanged(replace(run, seed=1), stored)


def test_a_resumed_run_must_be_the_same(tmp_path, capsys):
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
    assert train(run, resume=True).validation is None, "its network is whole all the same"
    (run.folder / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a record of a run"):
        train(run, resume=True)


def test_a_resumed_run_has_its_threads_and_prints_what_has_changed(tmp_path, monkeypatch, capsys):
    run = tiny(tmp_path, epochs=2, threads=1)
    gradients, used = Learner.gradients, []

    def look(self, batch, epoch):
        used.append(torch.get_num_threads())
        if len(used) == 4:
            signal.raise_signal(signal.SIGTERM)
        return gradients(self, batch, epoch)

    monkeypatch.setattr(Learner, "gradients", look)
    with pytest.raises(Interrupted):
        train(run)
    told = json.loads((tmp_path / "run.json").read_text())
    told["environment"]["torch"] = "1.0"
    (tmp_path / "run.json").write_text(json.dumps(told))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train(run, resume=True)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert used == [1] * 6
    assert (
        f"the result may differ from that of an uninterrupted run: torch 1.0 → {torch.__version__}"
        in capsys.readouterr().out
    )


def poison(monkeypatch, after: int):
    """Make a weight NaN after a number of steps; return the original update."""
    update, steps = Learner.update, []

    def poisoned(self, rate):
        update(self, rate)
        steps.append(rate)
        if len(steps) == after:
            with torch.no_grad():
                self.network.stages.linear[0].field.weight.weight[0, 0] = float("nan")

    monkeypatch.setattr(Learner, "update", poisoned)
    return update


def test_nan_weights_stop_the_run(tmp_path, monkeypatch):
    """The error names the step and the layers, and the checkpoint before it is complete."""
    run = replace(tiny(tmp_path, epochs=4), save_every="0s")
    update = poison(monkeypatch, after=5)
    with pytest.raises(NonFiniteLoss, match="after step 5 there are NaN or infinite weights") as caught:
        train(run)
    assert "not finite: stages.linear.0.field.weight.weight" in str(caught.value)
    assert "stages.convolutions.0.field.weight: " in str(caught.value)
    assert (tmp_path / "checkpoints" / "step-00000004.sha256").exists()
    assert not (tmp_path / "checkpoints" / "step-00000005.sha256").exists()
    monkeypatch.setattr(Learner, "update", update)
    train(run, resume=True)


def test_nan_weights_are_not_the_best_network(tmp_path, monkeypatch):
    """Nor are they validated: weights are tested after the last step of an epoch."""
    poison(monkeypatch, after=3)
    monkeypatch.setattr(loop_module, "estimate", lambda *_: pytest.fail("NaN weights were validated"))
    with pytest.raises(NonFiniteLoss, match="after step 3 there are NaN or infinite weights"):
        train(replace(tiny(tmp_path, images=9, batch_size=3), save_every="1h"))
    assert not (tmp_path / "best.safetensors").exists()


def test_an_infinite_loss_names_the_step(tmp_path, monkeypatch):
    gradients, steps = Learner.gradients, []

    def explode(self, batch, epoch):
        steps.append(batch)
        return gradients(self, batch, epoch) if len(steps) < 3 else float("inf")

    monkeypatch.setattr(Learner, "gradients", explode)
    with pytest.raises(NonFiniteLoss, match=r"the loss is inf at step 3 of 6 .*(?s:.*)not finite: no parameter"):
        train(tiny(tmp_path))


def test_bad_runs_are_answered_before_anything_is_written(tmp_path):
    run = tiny(tmp_path / "r")
    for bad, error, words in [
        (replace(run, model_args={"dept": 3}), TypeError, "has no argument 'dept'"),
        (replace(run, data="mnist"), ValueError, "no dataset is called 'mnist'"),
        (replace(run, model="cpl-xxl"), ValueError, "there is no model 'cpl-xxl'"),
        (replace(run, device="gpu"), ValueError, "there is no device 'gpu'"),
        (replace(run, device="meta"), ValueError, "--device meta cannot be used here"),
        (replace(run, recipe=replace(run.recipe, cutout=9)), ValueError, "cannot erase a square of side 9"),
        (replace(run, recipe=replace(run.recipe, crop_padding=8)), ValueError, "cannot reflect-pad 8×8 images by 8"),
    ]:
        with pytest.raises(error, match=words):
            train(bad)
    assert not (tmp_path / "r").exists()


def test_the_exact_result_is_that_of_the_frozen_network(tmp_path):
    run = tiny(tmp_path, epochs=2)
    result = train(run)
    split = load("digits", validation=1437).validation
    found = lipflow.certify(lipflow.freeze(lipflow.load(tmp_path)), split.images)
    right = found.label == split.labels
    certified = {text: float((right & found.certified(text)).double().mean()) for text in run.recipe.radii}
    assert result.exact is not None
    assert (result.exact.images, result.exact.clean) == (1437, float(right.double().mean()))
    assert result.exact.certified == certified
    (line,) = log(tmp_path, "exact")
    assert line == dict(kind="exact", step=6, images=1437, clean=result.exact.clean, certified=certified)
    assert json.loads((tmp_path / "run.json").read_text())["validation_exact"] == asdict(result.exact)
    assert train(run, resume=True).exact == result.exact  # it has ended, and is read


@pytest.mark.parametrize(("asked", "images"), [(0, None), (5, 5), (10**6, 1437)])
def test_the_number_of_certified_images(asked, images, tmp_path):
    result = train(replace(tiny(tmp_path, epochs=1), certify_validation=asked))
    assert (result.exact and result.exact.images) == images
    assert len(log(tmp_path, "exact")) == (images is not None)
    assert ("validation_exact" in json.loads((tmp_path / "run.json").read_text())) == (images is not None)


@pytest.mark.parametrize("why", [TypeError("σ = tanh rounds"), RuntimeError("not enough memory"), MemoryError("full")])
def test_a_network_that_cannot_be_frozen_is_trained_all_the_same(why, tmp_path, monkeypatch, capsys):
    def refuse(*arguments):
        raise why

    monkeypatch.setattr(loop_module, "certify_split", refuse)
    result = train(tiny(tmp_path, epochs=1))
    assert result.exact is None
    assert f"there is no exact result: {why}" in capsys.readouterr().out
    lipflow.load(tmp_path)


def test_a_run_stopped_while_certifying_resumes_there(tmp_path, monkeypatch):
    train(tiny(tmp_path / "whole"))
    real, calls = loop_module.certify_split, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(loop_module, "certify_split", interrupted)
    run = tiny(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        train(run)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert train(run, resume=True).exact is not None
    assert digest(tmp_path / "run" / "model.safetensors") == digest(tmp_path / "whole" / "model.safetensors")
    assert len(log(tmp_path / "run", "step")) == 6
    assert log(tmp_path / "run", "exact") == log(tmp_path / "whole", "exact")


def test_one_process_trains_in_a_folder(tmp_path):
    with (
        loop_module._lock(tmp_path),
        pytest.raises(ValueError, match="another process trains in"),
        loop_module._lock(tmp_path),
    ):
        pass
    with loop_module._lock(tmp_path):
        pass


def test_a_resumed_run_stores_its_new_place(tmp_path, monkeypatch):
    """The next `--resume`, and `lipflow certify`, read the data from its latest place."""
    usual, run = loop_module.estimate, tiny(tmp_path, epochs=1)
    monkeypatch.setattr(loop_module, "estimate", lambda *given: signal.raise_signal(signal.SIGINT) or usual(*given))
    with pytest.raises(Interrupted):
        train(run)
    monkeypatch.setattr(loop_module, "estimate", usual)
    left = tmp_path / ".best.safetensors.123.part"
    left.touch()
    load = loop_module.load
    monkeypatch.setattr(loop_module, "load", lambda name, data_dir, **options: load(name, **options))
    train(replace(run, data_dir=tmp_path / "moved", certify_validation=3), resume=True)
    stored = Record.read(tmp_path).run
    assert (stored.data_dir, stored.certify_validation) == (tmp_path / "moved", 3)
    assert not left.exists()
