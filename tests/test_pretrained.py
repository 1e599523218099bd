"""The networks that come with the package, `lipflow.load`, and the folders of runs by name."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lipflow
from lipflow import pretrained
from lipflow.cli import main
from lipflow.pretrained.pack import pack
from lipflow.train import train
from lipflow.train.record import FINAL
from tests.train.tiny import before_call, fail, tiny

NAME = "cpl-fast-cifar10"
HOME = Path(pretrained.__file__).parent


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    return train(tiny(tmp_path_factory.mktemp("runs") / "tiny", epochs=1)).folder


@pytest.fixture
def cwd(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", pretrained.NAMES)
def test_a_pretrained_network_is_small_and_has_the_stored_weights(name):
    assert (HOME / name / FINAL).stat().st_size <= 20 * 2**20
    network, stored = lipflow.load(name), load_file(HOME / name / FINAL)
    assert not network.training
    assert network(torch.rand(2, *network.in_shape)).shape == (2, network.classes)
    for key, parameter in network.named_parameters():
        assert stored[key].dtype == torch.bfloat16
        assert torch.equal(parameter, stored[key].float())
    record = json.loads((HOME / name / "run.json").read_text())
    assert record["run"]["out"] is record["run"]["data_dir"] is None


def test_load_takes_a_folder_a_file_and_a_name_in_runs(cwd, run_folder):
    shutil.copytree(run_folder, "runs/first")
    pack(run_folder, Path("packed"))
    assert set(json.loads(Path("packed/run.json").read_text())["environment"]) == set(pretrained.pack.VERSIONS)
    expected = load_file(run_folder / FINAL)
    for source in (run_folder, str(run_folder), run_folder / FINAL, "first", "packed"):
        for key, parameter in lipflow.load(source).named_parameters():
            assert torch.equal(parameter, expected[key].bfloat16().float() if source == "packed" else expected[key])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("cpl-fast", f"did you mean {NAME}?"),
        ("frist", "did you mean first?"),
        ("nowhere.safetensors", f"the pretrained networks are {NAME}"),
        ("", "holds no run"),
        ("w.pt", "w.pt is not a .safetensors file"),
        ("frozen.safetensors", "use lipflow.Frozen.load"),
    ],
)
def test_load_says_what_would_work(source, message, cwd, run_folder):
    Path("runs/first").mkdir(parents=True)
    Path("w.pt").touch()
    lipflow.freeze(lipflow.load(run_folder)).save("frozen.safetensors")
    with pytest.raises(ValueError, match=re.escape(message)):
        lipflow.load(source)
    with pytest.raises(ValueError, match=r"use lipflow.freeze\(lipflow.load"):
        lipflow.Frozen.load(run_folder / FINAL)


def test_a_command_copies_a_pretrained_network_once(cwd, monkeypatch, capsys):
    """A copy that was interrupted after its first file is completed."""
    with monkeypatch.context() as patch:
        before_call(patch, shutil, "copyfile", 2, lambda: fail(OSError("No space left on device")))
        assert main(["report", NAME]) == 2
    assert [path.name for path in (cwd / "runs" / NAME).iterdir()] == ["run.json"]
    for copied in (True, False):
        assert main(["report", NAME, "--out", "report.html"]) == 0
        assert ("copied the pretrained network" in capsys.readouterr().out) == copied
    assert (cwd / "runs" / NAME / FINAL).read_bytes() == (HOME / NAME / FINAL).read_bytes()


@pytest.mark.parametrize("name", ["run.json", "certificate.json"])
def test_folder_of_finds_runs_and_overwrites_none(name, cwd):
    other = cwd / "runs" / NAME / name
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    with pytest.raises(ValueError, match="is not the pretrained network"):
        pretrained.folder_of(Path(NAME))
    assert [p.read_text() for p in other.parent.iterdir()] == ["{}"]
    with pytest.raises(ValueError, match="there is no folder other"):
        pretrained.folder_of(Path("other"))
    (cwd / "runs" / "mine").mkdir()
    assert pretrained.folder_of(Path("mine")) == Path("runs/mine")
    for name in (NAME, "mine"):  # a folder in the current one comes first
        (cwd / name).mkdir()
        assert pretrained.folder_of(Path(name)) == Path(name)
