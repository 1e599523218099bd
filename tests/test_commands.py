"""The commands on a finished run: certify, check, attack, in the order that a user types them."""

import json

import pytest

from lipflow import cli

TINY = ["--sizes", "depth=1", "channels=2", "inner=2", "depth_linear=1", "features=8", "--epochs", "2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert cli.main(["train", "--model", "cpl-digits", "--data", "digits", "--out", str(folder), *TINY]) == 0
    return folder


def test_certify_check_attack(run, capsys):
    assert cli.main(["certify", str(run), "--images", "40", "--radii", "36/255", "0.5"]) == 0
    said = capsys.readouterr().out
    assert "40 test images of digits" in said
    assert "36/255" in said
    assert "average radius" in said
    assert cli.main(["check", str(run), "--full"]) == 0
    assert capsys.readouterr().out.startswith("accepted: 40 radii verified, 40 of them from the image")
    assert cli.main(["attack", str(run), "--epsilon", "0.5", "36/255", "--steps", "3", "--images", "20"]) == 0
    assert "under attack" in capsys.readouterr().out
    outcome = json.loads((run / "attack.json").read_text())
    assert (outcome["steps"], list(outcome["standing"])) == (3, ["36/255", "0.5"])
    assert len(outcome["clean"]) == len(outcome["standing"]["0.5"]) == 20
    assert sum(outcome["standing"]["0.5"]) <= sum(outcome["standing"]["36/255"]) <= sum(outcome["clean"])


def test_a_tampered_certificate_is_rejected(run, capsys):
    assert cli.main(["certify", str(run), "--images", "10"]) == 0
    path = run / "certificate.json"
    path.write_text(path.read_text().replace('"rounding": ', '"rounding": 0', 1))
    capsys.readouterr()
    assert cli.main(["check", str(run)]) == 1
    assert capsys.readouterr().out.startswith("rejected: ")


@pytest.mark.parametrize("command", ["certify", "attack"])
def test_a_folder_without_a_run(command, tmp_path, capsys):
    assert cli.main([command, str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
