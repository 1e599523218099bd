"""Model files: loading gives the saved network bit for bit, and refuses damaged or foreign files."""

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file

import lipflow
from lipflow.files import read_tensors
from lipflow.models.file import read, save


@pytest.fixture
def network():
    sizes = dict(classes=3, in_shape=(1, 4, 4), depth=1, channels=3, features=4, lln=True, mean=[0.3])
    return lipflow.build("cpl-digits", **sizes).eval()


def test_a_loaded_network_is_equal_bit_for_bit(network, tmp_path):
    save(network, tmp_path / "m")
    before = torch.get_rng_state()
    loaded = read(tmp_path / "m")
    assert torch.equal(before, torch.get_rng_state())
    assert not loaded.training
    assert (loaded.name, loaded.classes, loaded.in_shape) == ("cpl-digits", 3, (1, 4, 4))
    assert loaded.state_dict().keys() == network.state_dict().keys()
    assert all(torch.equal(v, network.state_dict()[k]) for k, v in loaded.state_dict().items())
    x = torch.rand(2, 1, 4, 4)
    assert torch.equal(loaded(x), network(x))


def test_equal_networks_have_equal_files(network, tmp_path):
    save(network, tmp_path / "a")
    save(read(tmp_path / "a"), tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_network_that_build_did_not_make_is_refused(network, tmp_path):
    network.name = None
    with pytest.raises(ValueError, match=r"lipflow\.build"):
        save(network, tmp_path / "m")


FEW = {"depth": 0, "depth_linear": 0}  # without parameters
GOOD = {"format": 1, "model": "cpl-digits", "classes": 3, "in_shape": [1, 4, 4], "model_args": {}}


def test_a_module_of_another_class_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"lipflow\.freeze\(module, in_shape\)\.save"):
        lipflow.save(torch.nn.Linear(3, 2), tmp_path / "linear.safetensors")


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (None, "not that of a lipflow network"),
        ({}, "not that of a lipflow network"),
        ({**GOOD, "more": 1}, "not that of a lipflow network"),
        ({**GOOD, "classes": "3"}, "not that of a lipflow network"),
        ({**GOOD, "format": 2}, "it has format 2"),
        ({**GOOD, "model": "os.system"}, "there is no model 'os.system'"),
        ({**GOOD, "model_args": {"__class__": 1}}, "has no argument '__class__'"),
        ({**GOOD, "model_args": {"classes": 1}}, "cannot be loaded"),
        ({**GOOD, "model_args": {"depth": "import os"}}, "cannot be loaded"),
        ({**GOOD, "in_shape": [1, 4]}, "in_shape"),
        (GOOD, "its network needs more"),
        ({**GOOD, "model_args": {"depth": 10**4}}, "its network needs more"),
        ({**GOOD, "model_args": {"depth": 10**6}}, "depth must be at most 10000"),
        ({**GOOD, "model_args": {"features": 10**7}}, "its network needs more"),
        ({**GOOD, "in_shape": [1, 10**5, 10**5], "model_args": FEW}, "above the limit"),
        ({**GOOD, "model_args": {**FEW, "channels": 10**8}}, "above the limit"),
        ({**GOOD, "model_args": {"mean": {}}}, "cannot be loaded"),
    ],
)
def test_metadata_is_checked(metadata, words, tmp_path):
    header = {"lipflow": json.dumps(metadata)} if metadata is not None else None
    save_file({"x": torch.zeros(1)}, tmp_path / "m", header)
    with pytest.raises(ValueError, match=words):
        read(tmp_path / "m")


def test_weights_of_other_names_are_refused(network, tmp_path):
    save(network, tmp_path / "m")
    tensors, metadata = read_tensors(tmp_path / "m")
    name = next(iter(tensors))
    tensors["other"] = tensors.pop(name)
    save_file(tensors, tmp_path / "m", metadata)
    with pytest.raises(ValueError, match=f"Missing key.*{name}"):
        read(tmp_path / "m")


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: pickle.dumps(Trap())])
def test_truncated_files_and_pickles_are_refused(damage, network, tmp_path):
    save(network, tmp_path / "m")
    (tmp_path / "m").write_bytes(damage((tmp_path / "m").read_bytes()))
    with pytest.raises(ValueError, match="complete safetensors file"):
        read(tmp_path / "m")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        read(tmp_path / "absent")
