"""The networks that come with the package, and `lipflow.load`."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import lipflow
from lipflow import pretrained
from lipflow.cli import main
from lipflow.pretrained.pack import pack
from lipflow.train import train
from lipflow.train.record import FINAL
from tests.train.tiny import tiny

NAME = "cpl-fast-cifar10"
HOME = Path(pretrained.__file__).parent


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    return train(tiny(tmp_path_factory.mktemp("runs") / "tiny", epochs=1)).folder


@pytest.mark.parametrize("name", pretrained.NAMES)
def test_each_is_small_and_loads(name):
    assert (HOME / name / FINAL).stat().st_size <= 20 * 2**20
    network = lipflow.load(name)
    assert not network.training
    assert network(torch.rand(2, *network.in_shape)).shape == (2, network.classes)


def test_there_is_one_for_cifar10():
    assert NAME in pretrained.NAMES


def test_weights_are_the_stored_bfloat16_values():
    with safe_open(HOME / NAME / FINAL, "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
    network = lipflow.load(NAME)
    for name, parameter in network.named_parameters():
        assert stored[name].dtype == torch.bfloat16
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, stored[name].float())


def test_nothing_says_where_it_was_made():
    values = json.loads((HOME / NAME / "run.json").read_text())
    assert values["run"]["out"] is None
    assert values["run"]["data_dir"] is None


def test_a_folder_and_a_file_load_as_well(tmp_path, run_folder):
    name = next(name for name, _ in lipflow.load(run_folder).named_parameters())
    expected = lipflow.load(run_folder).state_dict()[name]
    assert torch.equal(lipflow.load(run_folder / FINAL).state_dict()[name], expected)
    assert torch.equal(lipflow.load(str(run_folder)).state_dict()[name], expected)
    pack(run_folder, tmp_path / "packed")
    assert torch.equal(lipflow.load(tmp_path / "packed").state_dict()[name], expected.bfloat16().float())
    told = json.loads((tmp_path / "packed" / "run.json").read_text())
    assert set(told["environment"]) == {"lipflow", "commit", "torch", "python"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "cpl-fast",
            f"no folder cpl-fast, here or in runs/, and no trained network of that name; did you mean {NAME}?",
        ),
        ("nowhere.safetensors", f"there is no folder nowhere.safetensors.*trained networks are {NAME}"),
        ("", "holds no run"),
        ("w.pt", "w.pt is not a .safetensors file; load a state dict"),
    ],
)
def test_what_is_not_there_is_said(source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("w.pt").touch()
    with pytest.raises(ValueError, match=message):
        lipflow.load(source)


def test_a_run_is_found_by_its_name_in_runs(tmp_path, monkeypatch, run_folder):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run_folder, "runs/first")
    assert lipflow.load("first").in_shape == lipflow.load(run_folder).in_shape
    with pytest.raises(ValueError, match="did you mean first"):
        lipflow.load("frist")


def test_frozen_and_live_files_are_told_apart(tmp_path, run_folder):
    lipflow.freeze(lipflow.load(run_folder)).save(tmp_path / "frozen.safetensors")
    with pytest.raises(ValueError, match=r"it is a frozen network: use lipflow.Frozen.load"):
        lipflow.load(tmp_path / "frozen.safetensors")
    with pytest.raises(ValueError, match=r"is a network that is not frozen: use lipflow.freeze\(lipflow.load"):
        lipflow.Frozen.load(run_folder / FINAL)


def test_commands_take_its_name(tmp_path, monkeypatch, capsys):
    """It is copied to runs/ once."""
    monkeypatch.chdir(tmp_path)
    assert main(["report", NAME, "--out", "report.html"]) == 0
    assert "copied the pretrained network" in capsys.readouterr().out
    assert (tmp_path / "runs" / NAME / FINAL).read_bytes() == (HOME / NAME / FINAL).read_bytes()
    assert main(["report", NAME, "--out", "report.html"]) == 0
    assert "copied" not in capsys.readouterr().out


def test_nobody_s_run_is_written_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "runs" / NAME / "run.json"
    mine.parent.mkdir(parents=True)
    mine.write_text("{}")
    with pytest.raises(ValueError, match="is not the pretrained network"):
        pretrained.folder_of(Path(NAME))
    assert mine.read_text() == "{}"
    assert [p.name for p in mine.parent.iterdir()] == ["run.json"]
    (tmp_path / NAME).mkdir()
    assert pretrained.folder_of(Path(NAME)) == Path(NAME), "a folder of that name goes first"


def test_a_disk_that_is_full_is_said_and_nothing_is_left(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left"):
        pretrained.folder_of(Path(NAME))
    assert not list((tmp_path / "runs").iterdir())


def test_whoever_is_second_finds_it_whole(tmp_path, monkeypatch):
    """Two processes copy at once: the one whose folder cannot be renamed takes the other's."""
    monkeypatch.chdir(tmp_path)
    rename = Path.rename

    def late(self, target):
        shutil.copytree(self, target)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    folder = pretrained.folder_of(Path(NAME))
    assert sorted(p.name for p in folder.iterdir()) == sorted(pretrained.FILES)
    assert [p.name for p in folder.parent.iterdir()] == [NAME]


def test_a_run_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert pretrained.folder_of(Path("mine")) == Path("runs/mine")
    with pytest.raises(ValueError, match="there is no folder other, here or in runs/"):
        pretrained.folder_of(Path("other"))
    (tmp_path / "mine").mkdir()
    assert pretrained.folder_of(Path("mine")) == Path("mine")
