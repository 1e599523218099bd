"""How a run ends, and who may work on it: in this process."""

import signal
from dataclasses import replace

import pytest

from lipflow.train import load_run, train
from lipflow.train import loop as loop_module
from lipflow.train.signals import Interrupted
from tests.train.tiny import log, tiny


def test_a_signal_during_the_last_validation_is_obeyed(tmp_path, monkeypatch):
    usual = loop_module.estimate

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return usual(*arguments)

    monkeypatch.setattr(loop_module, "estimate", interrupted)
    run = tiny(tmp_path, epochs=1)
    with pytest.raises(Interrupted):
        train(run)
    assert not (tmp_path / "model.safetensors").exists()
    monkeypatch.setattr(loop_module, "estimate", usual)
    train(run, resume=True)
    assert (tmp_path / "model.safetensors").exists()
    assert len(log(tmp_path, "step")) == 3


def test_one_process_trains_in_a_folder(tmp_path):
    with (
        loop_module._lock(tmp_path),
        pytest.raises(ValueError, match="another process trains in"),
        loop_module._lock(tmp_path),
    ):
        pass
    with loop_module._lock(tmp_path):
        pass


def test_a_resumed_run_remembers_where_it_is(tmp_path, monkeypatch):
    """The next one to resume it, and `lipflow certify`, look where the data was last."""
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
    stored = load_run(tmp_path)[0]
    assert (stored.data_dir, stored.certify_validation) == (tmp_path / "moved", 3)
    assert not left.exists()
