"""How a run ends, and who may work on it: in this process."""

import signal

import pytest

from lipflow.train import loop as loop_module
from lipflow.train import train
from lipflow.train.ending import Interrupted
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
        loop_module._held(tmp_path),
        pytest.raises(ValueError, match="another process trains in"),
        loop_module._held(tmp_path),
    ):
        pass
    with loop_module._held(tmp_path):
        pass
