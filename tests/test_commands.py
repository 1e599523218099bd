"""certify, check and attack on a finished run; report is in tests/report."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import lipflow
from lipflow import cli
from lipflow.commands.parts import PartCache
from tests.processes import TIMEOUT_SECONDS, torchrun
from tests.train.tiny import FLAGS, before_call, fail

TINY = [*FLAGS, "--epochs", "2"]


def lipflow_command(*words: object) -> int:
    return cli.main(list(map(str, words)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert lipflow_command("train", "--model", "cpl-digits", "--data", "digits", "--out", folder, *TINY) == 0
    return folder


@pytest.fixture
def certified(run, capsys):
    """The run, with a certificate of 40 test images."""
    assert lipflow_command("certify", run, "--limit", 40) == 0
    capsys.readouterr()
    return run


def stated(path: Path) -> dict:
    return json.loads(path.read_text())


def test_check_accepts_what_certify_wrote(certified, tmp_path, monkeypatch, capsys):
    claims = stated(certified / "certificate.json")
    assert (claims["split"], claims["network"]) == ("test", "final")
    assert lipflow_command("check", certified, "--full") == 0
    assert capsys.readouterr().out.startswith("accepted: 40 radii follow from their scores; the scores of 40 of 40")
    (tmp_path / "runs").symlink_to(certified.parent)
    monkeypatch.chdir(tmp_path)
    assert lipflow_command("check", certified.name) == 0
    assert capsys.readouterr().out.endswith("the accuracy, are not verified\n")


def test_tables_show_the_rows_of_the_files(run, capsys):
    """Certified means a right label and R above the radius; the same images are attacked."""
    words = ["--limit", 60, "--radii", "0.3", "0.1", "--split", "validation", "--network", "best"]
    assert lipflow_command("certify", run, *words) == 0
    printed = capsys.readouterr().out
    claims = stated(run / "certificate.json")
    assert (claims["split"], claims["network"]) == ("validation", "best")
    with np.load(run / "certified.npz") as rows:
        right, radius = rows["label"] == rows["truth"], rows["radius"]
        assert np.array_equal(rows["images"], lipflow.data.load("digits").validation.images[:60].numpy())
    proved = right & (radius > 0.3)
    assert 0 < proved.sum() < (radius > 0.3).sum() < 60  # right labels and radii both matter
    assert line_of(printed, "0 (clean)")[0] == f"{right.mean():.2%}"
    assert line_of(printed, "0.3")[0] == f"{proved.mean():.2%}"
    assert line_of(printed, "average radius")[0] == f"{(radius * right).mean():.4f}"
    words = ["--radii", "0.3", "36/255", "--steps", 2, "--gallery", 0, "--limit", 50]
    assert lipflow_command("attack", run, *words) == 0
    outcome = stated(run / "attack.json")
    assert (outcome["steps"], list(outcome["robust"])) == (2, ["36/255", "0.3"])
    clean, small, large = (np.array(flags) for flags in (outcome["clean"], *outcome["robust"].values()))
    assert np.array_equal(clean, right[:50])
    assert (proved[:50] <= large).all()
    assert (large <= small).all()
    assert (small <= clean).all()
    row = line_of(capsys.readouterr().out, "0.3")
    assert row == [f"{flags.mean():.2%}" for flags in (proved[:50], large)]


def line_of(printed: str, radius: str) -> list[str]:
    """The cells of the row of a radius, in a printed table."""
    (row,) = (line for line in printed.splitlines() if line.startswith(f"│ {radius} "))
    return [cell.strip() for cell in row.strip("│").split("│")][1:]


@pytest.mark.parametrize(
    ("where", "message"),
    [("table", "broken"), ("inside", "inside of the certified ball"), ("nearest", "nearer than the certified")],
)
def test_attack_reports_a_broken_certificate(certified, where, message, monkeypatch, capsys):
    real_pgd, real_nearest = lipflow.attack.pgd, lipflow.attack.nearest

    def pgd(model, images, labels, epsilons, attack=None, indices=None):
        found = real_pgd(model, images, labels, epsilons, attack, indices)
        of_gallery = isinstance(epsilons[0], torch.Tensor)
        if where == "table" and not of_gallery:
            return replace(found, success=torch.ones_like(found.success))
        return replace(found, label=found.label + 1) if where == "inside" and of_gallery else found

    def nearest(*arguments, **options):
        found = real_nearest(*arguments, **options)
        return replace(found, distance=0 * found.distance) if where == "nearest" else found

    monkeypatch.setattr("lipflow.attack.pgd", pgd)
    monkeypatch.setattr("lipflow.attack.nearest", nearest)
    assert lipflow_command("attack", certified, "--radii", "0.05", "--steps", 2, "--gallery", 6) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["models"], ["report", "RUN", "--out", "PAGE"]], ids=lambda words: words[0])
def test_a_closed_pipe_has_exit_code_141(run, words, tmp_path):
    """`lipflow models | head -0`: the exit code 1 would mean that a certificate is wrong."""
    places = {"RUN": str(run), "PAGE": str(tmp_path / "page.html")}
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "lipflow", *(places.get(word, word) for word in words)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_SECONDS)
    os.close(write)
    assert done.returncode == 141, done.stderr
    assert not re.search("Traceback|BrokenPipe|Exception", done.stderr)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it finds the file of a descriptor in /proc")
@pytest.mark.parametrize("file", ["frozen.safetensors", "certified.npz", "certificate.json"])
def test_certify_keeps_the_old_certificate_when_the_disk_is_full(certified, file, monkeypatch, capsys):
    fsync = os.fsync

    def full(number):
        if file in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError(28, "No space left on device")
        return fsync(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert lipflow_command("certify", certified, "--limit", 20) == 2
    assert "No space left" in capsys.readouterr().err
    assert lipflow_command("check", certified) == 0
    assert "accepted: 40 radii" in capsys.readouterr().out
    assert not list(certified.glob(".*.part"))


def test_certify_refuses_images_that_changed_since_the_training(tmp_path, capsys):
    pixels = np.random.default_rng(0).integers(0, 256, (31, 8, 8, 3), dtype=np.uint8)
    images, folder = tmp_path / "images", tmp_path / "run"
    for letter in "ab":
        (images / letter).mkdir(parents=True)
    for i, picture in enumerate(pixels[1:]):
        Image.fromarray(picture).save(images / "ab"[i % 2] / f"{i}.png")
    words = ["--model", "cpl-digits", "--data", "folder", "--data-dir", images, "--out", folder]
    tiny = [word.replace("channels=2", "channels=4") for word in TINY]  # RGB images have three
    assert lipflow_command("train", *words, *tiny) == 0
    assert lipflow_command("certify", folder) == 0
    assert "not those" not in capsys.readouterr().out
    Image.fromarray(pixels[0]).save(images / "a" / "later.png")
    assert lipflow_command("certify", folder) == 2
    assert "the test images are not those" in capsys.readouterr().err
    assert lipflow_command("certify", folder, "--data-dir", images) == 0
    out = capsys.readouterr().out
    assert "the test images are not those" in out
    assert "other images of folder" in out
    assert stated(folder / "certificate.json")["split"] == "other"
    (images / "a").rename(images / "z")  # so that b is the first class
    assert lipflow_command("certify", folder, "--data-dir", images) == 2
    assert "was trained on the classes a, b" in capsys.readouterr().err


def test_the_gallery_has_images_inside_and_beyond_the_certified_balls(certified):
    run = certified
    assert lipflow_command("attack", run, "--steps", 3, "--gallery", 5) == 0
    with np.load(run / "certified.npz") as rows, np.load(run / "attack.npz") as found:
        index = found["index"]
        radius, label = rows["radius"][index], rows["label"][index]
        images = rows["images"][index] / 255
        assert len(set(index.tolist())) == 5
        assert rows["radius"].min() == radius[0] <= radius[-1] == rows["radius"].max()
        assert (np.diff(radius) >= 0).all()
        assert (found["inside_label"] == label).all()
        assert ((found["inside_distance"] < radius) | (radius == 0)).all()
        assert (found["inside_margin"] > 0).all()
        assert (found["nearest_label"] != label)[found["found"]].all()
        assert (found["nearest_distance"] >= radius)[found["found"]].all()
        for kind in ("inside", "nearest"):
            away = np.sqrt(((found[kind] - images) ** 2).sum((1, 2, 3)))
            assert np.allclose(away, found[f"{kind}_distance"])
    assert lipflow_command("attack", run, "--steps", 1, "--gallery", 0) == 0
    assert not (run / "attack.npz").exists()
    assert "examples" not in stated(run / "attack.json")


def test_an_interrupted_gallery_keeps_the_outcome(certified, monkeypatch, capsys):
    """No examples of a previous attack are left beside it."""
    words = ["attack", certified, "--steps", 2, "--gallery", 9, "--radii", "0.25"]
    assert lipflow_command(*words, "0.5") == 0
    monkeypatch.setattr("lipflow.train.writer.SECONDS_BETWEEN_LINES", 0.0)
    before_call(monkeypatch, lipflow.attack, "nearest", 2, lambda: fail(KeyboardInterrupt()))
    capsys.readouterr()
    assert lipflow_command(*words) == 130
    assert "attacking for the gallery: 4/9 images" in capsys.readouterr().out
    outcome = stated(certified / "attack.json")
    assert (list(outcome["robust"]), len(outcome["clean"]), "examples" in outcome) == (["0.25"], 40, False)
    assert [path.name for path in certified.glob("*attack*")] == ["attack.json"]
    assert lipflow_command(*words) == 0
    assert "40 of 40 images were done before an interruption" in capsys.readouterr().out


@pytest.mark.parametrize("shape", [(1, 4, 4), (6,)])
def test_attack_needs_no_run(shape, tmp_path):
    x = torch.rand(4, *shape)
    frozen = lipflow.freeze(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(x[0].numel(), 3)), in_shape=shape)
    lipflow.certificate.save(tmp_path, frozen, lipflow.certify(frozen, x), x, torch.zeros(4, dtype=torch.int64))
    assert lipflow_command("attack", tmp_path, "--steps", 1, "--gallery", 2) == 0
    assert list(stated(tmp_path / "attack.json")["robust"]) == ["36/255", "72/255", "108/255"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("certified.npz", "it was changed after it was written"),
        ("frozen.safetensors", "is not the network of"),
        ("certificate.json", "cannot be read"),
    ],
)
def test_attack_and_check_refuse_a_changed_file(certified, file, message, capsys):
    with (certified / file).open("ab") as changed:
        changed.write(b"x")
    assert lipflow_command("attack", certified) == 2
    assert message in capsys.readouterr().err
    assert lipflow_command("check", certified) == 1
    assert capsys.readouterr().out.startswith("rejected: ")
    (certified / file).unlink()
    assert lipflow_command("attack", certified) == 2
    assert "holds no certificate" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["attack.json", "attack.npz"])
def test_attack_refuses_to_write_to_a_pipe(certified, name, capsys):
    """It would wait for a reader."""
    (certified / name).unlink(missing_ok=True)
    os.mkfifo(certified / name)
    assert lipflow_command("attack", certified) == 2
    assert f"{name} is not a regular file" in capsys.readouterr().err
    (certified / name).unlink()


@pytest.mark.parametrize("name", ["empty", "file", "cpl-fast-cifar10"])
def test_check_does_not_reject_a_missing_certificate(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert lipflow_command("check", name) == 2
    assert capsys.readouterr().err.startswith("lipflow: there is no certificate in ")


def test_check_needs_no_torch(certified):
    code = """
import sys
class Absent:
    def find_spec(self, name, *_):
        if name in ("torch", "safetensors", "matplotlib"): raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from lipflow.cli import main
print([main(["check", sys.argv[1]]), main(["check", "missing"])])
"""
    done = subprocess.run([sys.executable, "-c", code, str(certified)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[0, 2]\n")


CERTIFY = ["certify", "RUN", "--limit", 35]
ATTACK = ["attack", "RUN", "--radii", "0.5", 1, "--steps", 2, "--gallery", 0, "--limit", 35]


@pytest.mark.parametrize(
    ("words", "size", "owner", "work", "file"),
    [
        (CERTIFY, "certificate.CHUNK_IMAGES", lipflow.Frozen, "receive", "certified.npz"),
        (ATTACK, "commands.attack.CHUNK_IMAGES", lipflow.attack, "pgd", "attack.json"),
    ],
)
def test_an_interrupted_command_resumes(certified, words, size, owner, work, file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lipflow.data.downloads.user_cache_dir", lambda: tmp_path)
    monkeypatch.setattr(f"lipflow.{size}", 10)
    words, path = [certified if word == "RUN" else word for word in words], certified / file
    assert lipflow_command(*words) == 0
    expected = path.read_bytes()
    path.unlink()
    before_call(monkeypatch, owner, work, 3, lambda: fail(KeyboardInterrupt()))
    capsys.readouterr()
    assert lipflow_command(*words) == 130
    assert "20 of 35 images are done" in capsys.readouterr().err
    assert not path.exists()
    parts = sorted((tmp_path / "parts").glob("*/*"))
    assert len(parts) == 2
    parts[0].write_bytes(parts[0].read_bytes()[:-1])  # a damaged part is computed again
    assert lipflow_command(*words) == 0
    assert "10 of 35 images were done before an interruption" in capsys.readouterr().out
    assert path.read_bytes() == expected
    assert not list((tmp_path / "parts").iterdir())


def test_part_cache_finds_only_equal_work(tmp_path, monkeypatch):
    monkeypatch.setattr("lipflow.data.downloads.user_cache_dir", lambda: tmp_path)
    calls = []

    def work(x, y):
        calls.append(x.tolist())
        return {"sum": x + y}

    def sums(x, y, about="a", size=2):
        return torch.cat([part["sum"] for part in PartCache(about).run(work, [x, y], size, "")]).tolist()

    x, y = torch.arange(5), torch.ones(5)
    assert sums(x, y) == sums(x, y) == [1, 2, 3, 4, 5]
    assert calls == [[0, 1], [2, 3], [4]]
    assert sums(x + 2, y) == [3, 4, 5, 6, 7]  # the part of 2 and 3 is stored; 4 has another neighbour
    assert calls[3:] == [[4, 5], [6]]
    for other in ({"y": 2 * y}, {"y": y.double()}, {"about": "b"}, {"size": 5}):
        before = len(calls)
        sums(**({"x": x, "y": y} | other))
        assert sum(len(part) for part in calls[before:]) == 5
    PartCache("a").clear()
    assert len(list((tmp_path / "parts").iterdir())) == 1  # of "b"


def test_part_cache_works_without_a_folder_to_write_to(tmp_path, monkeypatch):
    (tmp_path / "parts").write_text("a file in the place of the folder")
    monkeypatch.setattr("lipflow.data.downloads.user_cache_dir", lambda: tmp_path)
    (part,) = PartCache("").run(lambda x: {"x": x}, [torch.arange(3)], 5, "")
    assert part["x"].tolist() == [0, 1, 2]


def test_results_do_not_depend_on_the_number_of_processes(run):
    """Each of two ranks certifies and attacks its half, and the first writes what one process writes."""
    certify = ["certify", str(run), "--limit", "31"]
    attack = ["attack", str(run), "--radii", "36/255", "1", "--restarts", "2", "--steps", "5"]
    written = []
    for command in (lambda words: cli.main(words), lambda words: torchrun("-m", "lipflow", *words)):
        printed = [command(words) for words in (certify, attack)]
        with np.load(run / "certified.npz") as rows:
            outcome = stated(run / "attack.json")
            written.append((rows["label"].tolist(), outcome["clean"], outcome["robust"]))
    assert written[0] == written[1]
    assert len(written[0][0]) == len(written[0][1]) == 31
    assert printed[0].count("froze cpl-digits") == 1  # only the first rank prints
    assert printed[1].count("under attack") == 1


def test_the_recipes_number_of_threads_is_used_and_restored(certified, monkeypatch):
    """cpl-digits is trained with one thread, and is certified and attacked with one."""
    seen, call = [], lipflow.Frozen.__call__
    monkeypatch.setattr(
        lipflow.Frozen, "__call__", lambda self, x: seen.append(torch.get_num_threads()) or call(self, x)
    )
    torch.set_num_threads(2)
    assert lipflow_command("certify", certified, "--limit", 5) == 0
    assert lipflow_command("attack", certified, "--radii", "0.1", "--steps", 1) == 0
    assert torch.get_num_threads() == 2
    assert set(seen) == {1}
