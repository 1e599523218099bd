"""A small run for the tests of reports, and functions that change copies of it."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lipflow import cli
from lipflow.certificate.file import digest

TINY = ["--model-args", "depth=1", "channels=4", "inner=4", "depth_linear=1", "features=32", "--epochs", "8"]


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """A run of digits, trained, certified and attacked. Tests must not change it."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert cli.main(["train", "--out", str(folder), *TINY]) == 0
    assert cli.main(["certify", str(folder), "--limit", "60"]) == 0
    words = ["--limit", "40", "--radii", "0.1", "0.25", "0.5", "--gallery", "6"]
    assert cli.main(["attack", str(folder), *words]) == 0
    shutil.rmtree(folder / "checkpoints")
    return folder


@pytest.fixture
def run(original, tmp_path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(original, tmp_path / "tiny")


def change_json(path: Path, **values) -> None:
    """Change values of a JSON object in a file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_claims(folder: Path, **values) -> None:
    """Change claims of the certificate, and its digest."""
    claims = {**json.loads((folder / "certificate.json").read_text()), **values}
    claims.pop("digest")
    (folder / "certificate.json").write_text(json.dumps({**claims, "digest": digest(claims)}))


def change_rows(folder: Path, **columns) -> None:
    """Replace columns of certified.npz, and the digests of it in the certificate and the attack."""
    path = folder / "certified.npz"
    with np.load(path) as before:
        np.savez(path, **{**before, **columns})
    files = json.loads((folder / "certificate.json").read_text())["files"]
    change_claims(folder, files={**files, path.name: hashlib.sha256(path.read_bytes()).hexdigest()})
    claimed = json.loads((folder / "certificate.json").read_text())["digest"]
    change_json(folder / "attack.json", certificate=claimed)


def change_examples(folder: Path, **columns) -> None:
    """Replace columns of attack.npz, and its digest in attack.json."""
    path = folder / "attack.npz"
    with np.load(path) as before:
        np.savez(path, **{**before, **columns})
    change_json(folder / "attack.json", examples=hashlib.sha256(path.read_bytes()).hexdigest())


def rows(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "certified.npz") as columns:
        return dict(columns)
