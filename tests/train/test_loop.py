"""A run from its first step to its last, in this process."""

import json
import signal
import sys
import time
import types
from dataclasses import asdict, replace
from itertools import islice

import pytest
import torch

import lipflow
from lipflow.data import load
from lipflow.losses import CertificateRegularisation
from lipflow.train import Run, load_run, train
from lipflow.train import loop as loop_module
from lipflow.train.distributed import Ranks
from lipflow.train.learner import Learner, make_network, make_optimiser
from lipflow.train.recipe import SGD, SOC
from lipflow.train.schedule import Plan
from lipflow.train.signals import Interrupted, NonFiniteLoss
from tests.train.tiny import ARGS, digest, log, tiny

ALONE = Ranks(0, 1, torch.device("cpu"))


def test_a_run_leaves_what_it_promises(tmp_path, capsys):
    run = tiny(tmp_path / "r", epochs=3)
    result = train(run)
    assert {p.name for p in result.folder.iterdir()} - {"tensorboard"} == {
        "run.json", "log.jsonl", "checkpoints", "model.safetensors", "best.safetensors",
    }  # fmt: skip
    record = json.loads((result.folder / "run.json").read_text())
    assert record["steps"] == 9
    assert record["environment"]["torch"] == torch.__version__
    assert record["environment"]["lipflow"] == lipflow.__version__
    stored, network = load_run(result.folder)
    assert stored == run
    assert all(torch.equal(v, result.network.state_dict()[k]) for k, v in network.state_dict().items())
    assert torch.allclose(network.stages.center.mean, torch.tensor(load("digits", validation=1437).mean))
    said = capsys.readouterr().out
    assert "epoch 3/3" in said
    assert "certified (estimated) 36/255" in said
    assert "certified (exact) 36/255" in said
    assert "steps/s" in said
    assert "left" in said


def test_the_log_has_every_step_and_its_rate(tmp_path):
    run = tiny(tmp_path, epochs=2, images=70, batch_size=20)  # the last batch of an epoch has 10 images
    train(run)
    steps = log(tmp_path, "step")
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [line["epoch"] for line in steps] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert [line["lr"] for line in steps] == [run.recipe.rate(Plan.of(8).progress(step)) for step in range(8)]
    epochs = log(tmp_path, "epoch")
    sizes = [20, 20, 20, 10]
    for number, epoch in enumerate(epochs):
        losses = [line["loss"] for line in steps[4 * number : 4 * number + 4]]
        mean = sum(loss * n for loss, n in zip(losses, sizes, strict=True)) / 70
        assert epoch["loss"] == pytest.approx(mean, rel=1e-12)
        assert set(epoch["validation"]["certified_estimated"]) == {"36/255", "0.25", "0.5", "1"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"padding_mode": "zeros", "cutout": 3, "flip": False},
        {"optimiser": "sgd", "lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 5e-2},
        {"normalize": "mean-std"},
    ],
    ids=str,
)
def test_training_is_a_plain_loop(tmp_path, changes):
    """The weights are those of ten lines of PyTorch: nothing of a recipe is lost on the way."""
    run = tiny(tmp_path, epochs=2, images=50, batch_size=20, **{"crop_padding": 1, "flip": True, **changes})
    weights, recipe = train(run).network.state_dict(), run.recipe
    data = load("digits", validation=1447)
    torch.manual_seed(0)
    std = {"std": list(data.std)} if recipe.normalize == "mean-std" else {}
    network = lipflow.build("cpl-digits", mean=list(data.mean), lln=True, **std, **ARGS)
    kind = torch.optim.SGD if isinstance(recipe.optimiser, SGD) else torch.optim.Adam
    optimiser = kind(network.parameters(), **asdict(recipe.optimiser))
    augmentation = dict(pad=recipe.crop_padding, mode=recipe.padding_mode, flip=recipe.flip, erase=recipe.cutout)
    for step in range(6):
        batch = list(lipflow.data.batches(50, 20, 0, step // 3))[step % 3]
        images = lipflow.data.augment(data.train.images[batch], batch, 0, step // 3, **augmentation)
        loss = torch.nn.functional.multi_margin_loss(
            network(lipflow.data.to_unit(images)), data.train.labels[batch], margin=recipe.loss.margin
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.param_groups[0]["lr"] = run.recipe.rate(Plan.of(6).progress(step))
        optimiser.step()
    for name, value in network.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


def test_seeds_matter_and_nothing_else_is_random(tmp_path):
    torch.manual_seed(7)
    first = train(tiny(tmp_path / "a"))
    torch.manual_seed(8)
    train(tiny(tmp_path / "b"))
    train(replace(tiny(tmp_path / "c"), seed=1))
    assert digest(first.folder / "model.safetensors") == digest(tmp_path / "b" / "model.safetensors")
    assert digest(first.folder / "model.safetensors") != digest(tmp_path / "c" / "model.safetensors")


def test_the_best_network_is_of_the_best_epoch_and_test_images_are_never_seen(tmp_path, monkeypatch):
    scores, seen = iter([0.2, 0.6, 0.6, 0.1]), []
    weights = []
    real = loop_module.estimate

    def estimate(network, split, *rest):
        seen.append(split)
        weights.append({k: v.clone() for k, v in network.state_dict().items()})
        result = real(network, split, *rest)
        return replace(result, certified={**result.certified, "36/255": next(scores)})

    monkeypatch.setattr(loop_module, "estimate", estimate)
    train(tiny(tmp_path, epochs=4))
    best, final = load_run(tmp_path, "best")[1].state_dict(), load_run(tmp_path)[1].state_dict()
    assert all(torch.equal(v, weights[2][k]) for k, v in best.items()), "of equals, the later one"
    assert all(torch.equal(v, weights[3][k]) for k, v in final.items())
    assert not any(torch.equal(v, weights[3][k]) for k, v in best.items() if k.endswith("weight"))
    test = load("digits").test.images
    assert all(len(split) == 1437 and not (split.images[0] == test).flatten(1).all(1).any() for split in seen)


def test_without_validation_images(tmp_path):
    run = replace(tiny(tmp_path, epochs=1, batch_size=500), validation_images=0)
    assert train(run).validation is None
    assert not (tmp_path / "best.safetensors").exists()
    assert "validation" not in log(tmp_path, "epoch")[0]
    with pytest.raises(ValueError, match=r"has no best\.safetensors"):
        load_run(tmp_path, "best")


@pytest.mark.parametrize(
    "recipe",
    [
        dict(optimiser="sgd", lr=0.1, nesterov=True, weight_decay=5e-4, schedule="multistep"),
        dict(loss="certificate", schedule="constant"),
        dict(loss="offset-cross-entropy", offset=0.5, temperature=0.5, normalize="mean-std"),
        dict(loss="cross-entropy", schedule="exponential", lln=False, normalize="model"),
        dict(precision="bfloat16"),
    ],
)
def test_every_choice_learns(recipe, tmp_path):
    train(tiny(tmp_path, epochs=8, **recipe))
    losses = [line["loss"] for line in log(tmp_path, "epoch")]
    assert losses[-1] < losses[0]


def test_products_in_bfloat16_are_near_those_in_float32_and_weights_stay_what_they_are(tmp_path):
    full, low = (train(tiny(tmp_path / p, epochs=1, precision=p)).network for p in ("float32", "bfloat16"))
    for ours, theirs in zip(full.parameters(), low.parameters(), strict=True):
        assert ours.dtype == theirs.dtype == torch.float32
        assert not torch.equal(ours, theirs)
        assert float((ours - theirs).detach().norm()) < 0.1 * float(ours.detach().norm())


def test_the_certificate_in_the_loss_is_in_pixels(tmp_path):
    """An input divided by std is stretched by 1/std, and radii are measured before that."""
    run = replace(tiny(tmp_path, loss="certificate", gamma=0.3), model_args={**ARGS, "std": 0.25})
    learner = Learner(make_network(run, load("digits")), run, load("digits").train, ALONE)
    assert learner.loss == CertificateRegularisation(0.3, lipschitz=4.0)


def test_angles_do_not_decay():
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), lipflow.blocks.Householder(4))
    decay = {id(p): g["weight_decay"] for g in make_optimiser(network, SOC.optimiser).param_groups for p in g["params"]}
    assert [decay[id(p)] for p in network.parameters()] == [5e-4, 5e-4, 0]


# What goes wrong


def test_an_existing_run_is_not_overwritten(tmp_path):
    train(tiny(tmp_path, epochs=1))
    before = digest(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds a run already; add --resume"):
        train(tiny(tmp_path, epochs=1))
    assert digest(tmp_path / "model.safetensors") == before
    (tmp_path / "run.json").unlink()
    with pytest.raises(ValueError, match=r"holds model\.safetensors of a run without its run\.json"):
        train(tiny(tmp_path, epochs=1))


def test_a_run_that_never_came_to_a_step_is_begun_anew(tmp_path, monkeypatch):
    def too_large(self, batch, epoch):
        raise RuntimeError("not enough memory")

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "gradients", too_large)
        with pytest.raises(RuntimeError, match="not enough memory"):
            train(tiny(tmp_path, batch_size=30))
    assert (tmp_path / "run.json").exists()
    train(tiny(tmp_path, epochs=1))
    assert load_run(tmp_path)[0].recipe.batch_size == 20


def test_a_run_goes_on_with_its_own_images_only(tmp_path, monkeypatch):
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


def test_what_another_process_did_meanwhile_is_not_overwritten(tmp_path, monkeypatch):
    """It ended the run, or began one, between the first look at the folder and the lock on it."""
    run, held = tiny(tmp_path / "r", epochs=1), loop_module._lock

    def after_another(folder):
        monkeypatch.setattr(loop_module, "_lock", held)
        train(replace(run, seed=1))
        return held(folder)

    monkeypatch.setattr(loop_module, "_lock", after_another)
    with pytest.raises(ValueError, match="holds a run already"):
        train(run)
    assert load_run(run.folder)[0].seed == 1
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


def test_a_resumed_run_has_its_threads_and_says_what_else_has_changed(tmp_path, monkeypatch, capsys):
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
    """From so many steps on a weight is no number; returns the update as it was."""
    update, steps = Learner.update, []

    def poisoned(self, rate):
        update(self, rate)
        steps.append(rate)
        if len(steps) == after:
            with torch.no_grad():
                self.network.stages.linear[0].field.weight.weight[0, 0] = float("nan")

    monkeypatch.setattr(Learner, "update", poisoned)
    return update


def test_a_loss_that_is_no_number_stops_the_run(tmp_path, monkeypatch):
    """The step and the layers are named, and the checkpoint before it is kept and good."""
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


def test_weights_that_are_no_numbers_are_not_the_best_network(tmp_path, monkeypatch):
    """Nor are they validated: the last step of an epoch is looked at before."""
    poison(monkeypatch, after=3)
    monkeypatch.setattr(loop_module, "estimate", lambda *_: pytest.fail("weights that are no numbers were validated"))
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
        (replace(run, model_args={"dept": 3}), TypeError, "has no size 'dept'"),
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


# The exact result


def test_the_exact_result_is_that_of_the_frozen_network(tmp_path):
    run = tiny(tmp_path, epochs=2)
    result = train(run)
    split = load("digits", validation=1437).validation
    found = lipflow.certify(lipflow.freeze(load_run(tmp_path)[1]), split.images)
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
def test_how_many_are_certified(asked, images, tmp_path):
    result = train(replace(tiny(tmp_path, epochs=1), certify_validation=asked))
    assert (result.exact and result.exact.images) == images
    assert len(log(tmp_path, "exact")) == (images is not None)
    assert ("validation_exact" in json.loads((tmp_path / "run.json").read_text())) == (images is not None)


def test_certifying_says_how_far_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lipflow.train.writer.SECONDS_BETWEEN_LINES", 0.0)
    train(tiny(tmp_path, epochs=1))
    said = capsys.readouterr().out
    assert "certifying 250/1437 images" in said
    assert "images/s" in said


@pytest.mark.parametrize("why", [TypeError("σ = tanh rounds"), RuntimeError("not enough memory"), MemoryError("full")])
def test_a_network_that_cannot_be_frozen_is_trained_all_the_same(why, tmp_path, monkeypatch, capsys):
    def refuse(*arguments):
        raise why

    monkeypatch.setattr(loop_module, "certify_split", refuse)
    result = train(tiny(tmp_path, epochs=1))
    assert result.exact is None
    assert f"there is no exact result: {why}" in capsys.readouterr().out
    load_run(tmp_path)


def test_a_best_network_that_was_not_kept_is_said_to_be_none(tmp_path):
    train(tiny(tmp_path, epochs=1, images=1497))
    with pytest.raises(ValueError, match=r"has no best\.safetensors: there were no validation images"):
        load_run(tmp_path, "best")


def test_whoever_is_stopped_while_certifying_goes_on_from_there(tmp_path, monkeypatch):
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


# TensorBoard


def test_tensorboard_is_used_if_installed(tmp_path, monkeypatch):
    written = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            written.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    train(tiny(tmp_path, epochs=1))
    assert written[0] == (str(tmp_path / "tensorboard"), 1)
    assert [entry[2] for entry in written[1:-1] if entry[0] == "step/loss"] == [1, 2, 3]
    assert [entry[2] for entry in written[1:-1] if entry[0] == "epoch/validation/certified_estimated/36/255"] == [3]
    assert written[-1] == "closed"


def test_tensorboard_reads_what_is_written(tmp_path, monkeypatch):
    """With the real one: also a run that crashed, and began again before the steps that it had written."""
    reason = "tensorboard is not installed: it is in the `dev` extra"
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason=reason)
    gradients, calls = Learner.gradients, []

    def crash(self, batch, epoch):
        calls.append(epoch)
        if len(calls) == 5:
            raise RuntimeError("crash")
        return gradients(self, batch, epoch)

    monkeypatch.setattr(Learner, "gradients", crash)
    with pytest.raises(RuntimeError, match="crash"):
        train(tiny(tmp_path))
    time.sleep(1.1)  # TensorBoard orders files by the second, then by a number as text: 10 before 9
    train(tiny(tmp_path), resume=True)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = events.Scalars("step/loss")
    assert [event.step for event in losses] == [line["step"] for line in log(tmp_path, "step")] == [1, 2, 3, 4, 5, 6]
    assert [event.value for event in losses] == pytest.approx([line["loss"] for line in log(tmp_path, "step")])
    names = {"epoch/loss", "epoch/validation/clean", "step/lr", "exact/clean", "exact/certified/36/255"}
    assert names <= set(events.Tags()["scalars"])


def test_visits_start_anywhere():
    run = replace(Run(), recipe=replace(Run().recipe, batch_size=30))
    data = load("digits", validation=1397)
    learner = Learner(make_network(replace(run, model_args=ARGS), data), run, data.train, ALONE)
    whole = list(islice(learner.visits(0), 11))
    assert [(step, epoch) for step, epoch, _ in whole] == [(t, t // 4) for t in range(11)]
    for start in range(12):
        part = list(islice(learner.visits(start), 11 - start))
        assert all(torch.equal(a[2], b[2]) for a, b in zip(part, whole[start:], strict=True))


def test_a_board_that_does_not_fit_is_left_out(tmp_path, monkeypatch):
    class Broken(types.ModuleType):
        def __getattr__(self, name):
            if name != "SummaryWriter":  # whoever walks over all modules asks for other names
                raise AttributeError(name)
            raise TypeError("Descriptors cannot be created directly")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Broken("torch.utils.tensorboard"))
    with pytest.warns(UserWarning, match="TensorBoard cannot be imported and is not used: Descriptors"):
        train(tiny(tmp_path, epochs=1))
