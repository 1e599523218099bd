"""The commands on a finished run: certify, check, attack, in the order that a user types them; report is in report/."""

import json
import os
import pkgutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import lipflow
from lipflow import cli
from lipflow.commands.parts import PartCache
from lipflow.commands.terminal import with_progress_bar
from lipflow.train.writer import images_pace
from tests.processes import TIMEOUT_SECONDS, torchrun

TINY = ["--model-args", "depth=1", "channels=2", "inner=2", "depth_linear=1", "features=8", "--epochs", "2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert cli.main(["train", "--model", "cpl-digits", "--data", "digits", "--out", str(folder), *TINY]) == 0
    return folder


def test_certify_check_attack(run, capsys):
    assert cli.main(["certify", str(run), "--limit", "40", "--radii", "36/255", "0.5"]) == 0
    said = " ".join(capsys.readouterr().out.split())  # a title is wrapped wherever the path lets it
    assert "40 test images of digits" in said
    assert "36/255" in said
    assert "average radius" in said
    claims = json.loads((run / "certificate.json").read_text())
    assert (claims["split"], claims["network"]) == ("test", "final")
    assert cli.main(["check", str(run), "--full"]) == 0
    assert capsys.readouterr().out.startswith("accepted: 40 radii follow from their scores; the scores of 40 of 40")
    assert cli.main(["attack", str(run), "--radii", "0.5", "36/255", "--steps", "3", "--limit", "20"]) == 0
    assert "under attack" in capsys.readouterr().out
    outcome = json.loads((run / "attack.json").read_text())
    assert (outcome["steps"], list(outcome["robust"])) == (3, ["36/255", "0.5"])
    assert len(outcome["clean"]) == len(outcome["robust"]["0.5"]) == 20
    assert len(outcome["certificate"]) == 64
    assert sum(outcome["robust"]["0.5"]) <= sum(outcome["robust"]["36/255"]) <= sum(outcome["clean"])


def test_the_tables_are_of_the_rows(run, capsys):
    """Certified means right, and R above the radius, of the images of the split."""
    words = ["--limit", "60", "--radii", "0.3", "--split", "validation", "--network", "best"]
    assert cli.main(["certify", str(run), *words]) == 0
    said = capsys.readouterr().out
    claims = json.loads((run / "certificate.json").read_text())
    assert (claims["split"], claims["network"]) == ("validation", "best")
    with np.load(run / "certified.npz") as rows:
        right, radius = rows["label"] == rows["truth"], rows["radius"]
        assert np.array_equal(rows["images"], lipflow.data.load("digits").validation.images[:60].numpy())
    certified = right & (radius > 0.3)
    assert 0 < certified.sum() < (radius > 0.3).sum() < 60, "a table that forgot who is right would say the same"
    assert (line_of(said, "0 (clean)")[0], line_of(said, "0.3")[0]) == tuple(
        f"{100 * flags.mean():.2f}%" for flags in (right, certified)
    )
    assert cli.main(["attack", str(run), "--radii", "0.3", "--steps", "2", "--gallery", "0"]) == 0
    standing = np.array(json.loads((run / "attack.json").read_text())["robust"]["0.3"])
    assert line_of(capsys.readouterr().out, "0.3") == [f"{100 * flags.mean():.2f}%" for flags in (certified, standing)]
    assert cli.main(["certify", str(run), "--limit", "40"]) == 0


def line_of(said: str, radius: str) -> list[str]:
    """The cells of the row of a radius, in a table that was printed."""
    (row,) = (line for line in said.splitlines() if line.startswith(f"│ {radius} "))
    return [cell.strip() for cell in row.strip("│").split("│")][1:]


@pytest.mark.parametrize("where", ["table", "inside", "nearest"])
def test_a_broken_certificate_is_an_alarm_at_once(run, where, monkeypatch, capsys):
    """Also if the gallery alone broke it: its attack inside of the certified ball is the hardest of all."""
    assert cli.main(["certify", str(run), "--limit", "40"]) == 0
    real = lipflow.attack.pgd, lipflow.attack.nearest

    def pgd(model, images, labels, epsilons, attack=None, indices=None):
        found = real[0](model, images, labels, epsilons, attack, indices)
        inside = isinstance(epsilons[0], torch.Tensor)
        if where == "table" and not inside:
            return replace(found, success=torch.ones_like(found.success))
        return replace(found, label=found.label + 1) if where == "inside" and inside else found

    def nearest(model, images, labels, **more):
        found = real[1](model, images, labels, **more)
        return replace(found, distance=0 * found.distance) if where == "nearest" else found

    monkeypatch.setattr("lipflow.attack.pgd", pgd)
    monkeypatch.setattr("lipflow.attack.nearest", nearest)
    assert cli.main(["attack", str(run), "--radii", "0.05", "--steps", "2", "--gallery", "6"]) == 1
    said = {
        "table": "yet broken there",
        "inside": "inside of the certified ball",
        "nearest": "nearer than the certified",
    }
    assert f"{said[where]}" in capsys.readouterr().err


def test_images_of_no_class_are_not_attacked(run, tmp_path, capsys):
    assert cli.main(["certify", str(run), "--limit", "3"]) == 0
    frozen = lipflow.Frozen.load(run / "frozen.safetensors")
    images = lipflow.data.load("digits").test.images[:3]
    found = lipflow.certify(frozen, images)
    lipflow.certificate.save(tmp_path, frozen, found, images, torch.full((3,), -1))
    assert cli.main(["attack", str(tmp_path)]) == 2
    assert "true class is none of the 10" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["models"], ["report", "RUN", "--out", "PAGE"]], ids=lambda words: words[0])
def test_a_reader_who_leaves_is_no_contradiction(run, words, tmp_path):
    """`lipflow models | head -0`: 141, as of any program, where 1 would say that a certificate is wrong."""
    places = {"RUN": str(run), "PAGE": str(tmp_path / "page.html")}
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "lipflow", *(places.get(word, word) for word in words)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_SECONDS)
    os.close(write)
    assert done.returncode == 141, done.stderr
    assert not {"Traceback", "BrokenPipe", "Exception"} & set(done.stderr.replace(":", " ").split())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it finds the file of a descriptor in /proc")
@pytest.mark.parametrize("file", ["frozen.safetensors", "certified.npz", "certificate.json"])
def test_a_certificate_stays_until_another_is_whole(run, file, monkeypatch, capsys):
    """The disk may be full at any of the three files."""
    assert cli.main(["certify", str(run), "--limit", "40"]) == 0
    fsync = os.fsync

    def full(number):
        if file in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError(28, "No space left on device")
        return fsync(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert cli.main(["certify", str(run), "--limit", "20"]) == 2
    assert "No space left" in capsys.readouterr().err
    assert cli.main(["check", str(run)]) == 0
    assert "accepted: 40 radii" in capsys.readouterr().out
    assert not list(run.glob(".*.part"))


def test_images_that_changed_since_the_training_are_not_certified_unawares(tmp_path, capsys):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    pixels = np.random.default_rng(0).integers(0, 256, (31, 8, 8, 3), dtype=np.uint8)
    paths = [tmp_path / "images" / "ab"[i % 2] / f"{i}.png" for i in range(31)]
    for path, picture in zip(paths, pixels, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(picture).save(path)
    paths[-1].rename(tmp_path / "later.png")
    folder, where = str(tmp_path / "run"), ["--data-dir", str(tmp_path / "images")]
    words = ["--model", "cpl-digits", "--data", "folder", *where, "--out", folder, *TINY, "--epochs", "1"]
    assert cli.main(["train", *(word.replace("channels=2", "channels=4") for word in words)]) == 0
    assert cli.main(["certify", folder]) == 0
    assert "not those" not in capsys.readouterr().out
    (tmp_path / "later.png").rename(paths[-1])
    assert cli.main(["certify", folder]) == 2
    assert "the test images are not those that" in capsys.readouterr().err
    assert cli.main(["certify", folder, *where]) == 0
    out = capsys.readouterr().out
    assert "the test images are not those that" in out
    assert "other images of folder" in out
    assert json.loads(Path(folder, "certificate.json").read_text())["split"] == "other"
    (tmp_path / "images" / "a").rename(tmp_path / "images" / "z")
    assert cli.main(["certify", folder, *where]) == 2, "b would be the first class now"
    assert "was trained on the classes a, b, and these images are of b, z" in capsys.readouterr().err


def test_a_gallery_is_attacked_inside_and_outside_of_its_balls(run):
    assert cli.main(["certify", str(run), "--limit", "30"]) == 0
    assert cli.main(["attack", str(run), "--steps", "3", "--gallery", "5"]) == 0
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
    assert cli.main(["attack", str(run), "--steps", "1", "--gallery", "0"]) == 0
    assert not (run / "attack.npz").exists()
    assert "examples" not in json.loads((run / "attack.json").read_text())


def test_an_interrupted_gallery_costs_only_the_gallery(run, monkeypatch, capsys):
    """The outcome is written before, whole; and it does not speak of examples that are not there."""
    assert cli.main(["certify", str(run), "--limit", "30"]) == 0
    assert cli.main(["attack", str(run), "--radii", "0.5", "--steps", "1", "--gallery", "5"]) == 0
    calls, nearest = [], lipflow.attack.nearest

    def interrupted(*arguments, **options):
        calls.append(len(arguments[1]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return nearest(*arguments, **options)

    monkeypatch.setattr("lipflow.attack.nearest", interrupted)
    monkeypatch.setattr("lipflow.train.writer.SECONDS_BETWEEN_LINES", 0.0)
    capsys.readouterr()
    assert cli.main(["attack", str(run), "--radii", "0.25", "--steps", "2", "--gallery", "9"]) == 130
    assert calls == [4, 4]
    assert "attacking for the gallery: 4/9 images" in capsys.readouterr().out
    outcome = json.loads((run / "attack.json").read_text())
    assert (outcome["steps"], list(outcome["robust"]), len(outcome["clean"])) == (2, ["0.25"], 30)
    assert "examples" not in outcome
    assert [path.name for path in run.glob("*attack*")] == ["attack.json"]  # no old examples, no half of a file
    assert cli.main(["attack", str(run), "--radii", "0.25", "--steps", "2", "--gallery", "9"]) == 0
    assert "30 of 30 images were done before an interruption" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["certify", "RUN", "--limit", "0"], "--limit must be at least 1, not 0"),
        (["certify", "RUN", "--limit=-3"], "--limit must be at least 1, not -3"),
        (["attack", "RUN", "--limit", "0"], "--limit must be at least 1, not 0"),
        (["attack", "RUN", "--limit=-3"], "--limit must be at least 1, not -3"),
        (["attack", "RUN", "--gallery=-1"], "--gallery must be at least 0, not -1"),
        (["attack", "RUN", "--steps=-1"], "--steps must be at least 0, not -1"),
        (["attack", "RUN", "--restarts", "0"], "--restarts must be at least 1, not 0"),
    ],
)
def test_counts_that_are_none(run, capsys, words, said):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as ended:
        cli.main([str(run) if word == "RUN" else word for word in words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_certificate_without_a_run_is_attacked(tmp_path, capsys):
    frozen, x = lipflow.freeze(lipflow.build("cpl-digits")), torch.rand(4, 1, 8, 8)
    certificates = lipflow.certify(frozen, x)
    lipflow.certificate.save(tmp_path, frozen, certificates, x, certificates.label)
    assert cli.main(["attack", str(tmp_path), "--steps", "1", "--gallery", "0"]) == 0
    assert list(json.loads((tmp_path / "attack.json").read_text())["robust"]) == ["36/255", "72/255", "108/255"]
    assert cli.main(["attack", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    (tmp_path / "none").mkdir()
    assert cli.main(["attack", str(tmp_path / "none")]) == 2
    assert "holds no certificate" in capsys.readouterr().err


def test_a_certificate_of_vectors_is_attacked(tmp_path):
    frozen, x = lipflow.freeze(torch.nn.Linear(6, 3), in_shape=(6,)), torch.rand(4, 6)
    certificates = lipflow.certify(frozen, x)
    lipflow.certificate.save(tmp_path, frozen, certificates, x, certificates.label.int())
    assert cli.main(["attack", str(tmp_path), "--steps", "1", "--gallery", "2"]) == 0


def test_a_changed_certificate_is_not_attacked(run, capsys):
    assert cli.main(["certify", str(run), "--limit", "2"]) == 0
    with np.load(run / "certified.npz") as rows:
        np.savez(run / "certified.npz", **{name: column[:0] for name, column in rows.items()})
    assert cli.main(["attack", str(run)]) == 2
    assert f"{run / 'certified.npz'} cannot be read: it was changed after it was written" in capsys.readouterr().err


def test_another_network_than_the_certified_one_is_not_attacked(run, capsys):
    assert cli.main(["certify", str(run), "--limit", "2"]) == 0
    lipflow.freeze(lipflow.build("cpl-digits")).save(run / "frozen.safetensors")
    assert cli.main(["attack", str(run)]) == 2
    assert f"{run / 'frozen.safetensors'} is not the network of" in capsys.readouterr().err


def test_a_tampered_certificate_is_rejected(run, capsys):
    assert cli.main(["certify", str(run), "--limit", "10"]) == 0
    path = run / "certificate.json"
    path.write_text(path.read_text().replace('"rounding": ', '"rounding": 0', 1))
    capsys.readouterr()
    assert cli.main(["check", str(run)]) == 1
    assert capsys.readouterr().out.startswith("rejected: ")


def test_a_certificate_is_found_by_its_name(run, tmp_path, monkeypatch, capsys):
    """As pretrained networks are certified: in runs/NAME."""
    assert cli.main(["certify", str(run), "--limit", "5"]) == 0
    (tmp_path / "runs").symlink_to(run.parent)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert cli.main(["check", run.name]) == 0
    assert capsys.readouterr().out.startswith("accepted: 5 radii")


@pytest.mark.parametrize("name", ["empty", "file", "cpl-fast-cifar10"])
def test_no_certificate_is_no_rejection(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert cli.main(["check", name]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith("lipflow: there is no certificate in ")
    assert said.err.endswith(f": lipflow certify {name}\n")


def test_the_command_checks_without_torch(run):
    assert cli.main(["certify", str(run), "--limit", "5"]) == 0
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name in ('torch', 'safetensors', 'matplotlib'): raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from lipflow.cli import main\n"
        "print([main(['check', sys.argv[1]]), main(['check', 'missing'])])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[0, 2]\n")


ATTACK = ["attack", "RUN", "--radii", "0.5", "1", "--steps", "2", "--gallery", "0"]


@pytest.mark.parametrize(
    ("words", "size", "work", "written"),
    [
        (["certify", "RUN", "--limit", "35"], "certificate.CHUNK_IMAGES", "frozen.Frozen.receive", "certified.npz"),
        (ATTACK, "commands.attack.CHUNK_IMAGES", "attack.pgd", "attack.json"),
    ],
)
def test_whoever_is_interrupted_goes_on(run, words, size, work, written, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lipflow.data.network.own_cache", lambda: tmp_path)
    words = [str(run) if word == "RUN" else word for word in words]
    assert cli.main(["certify", str(run), "--limit", "35"]) == 0
    monkeypatch.setattr(f"lipflow.{size}", 10)
    assert cli.main(words) == 0
    whole = (run / written).read_bytes()
    (run / written).unlink()
    real, calls = pkgutil.resolve_name(f"lipflow.{work}"), []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(f"lipflow.{work}", interrupted)
    capsys.readouterr()
    assert cli.main(words) == 130
    assert "20 of 35 images are done; the same command continues from there" in capsys.readouterr().err
    assert not (run / written).exists()
    parts = sorted((tmp_path / "parts").glob("*/*"))
    assert len(parts) == 2
    parts[0].write_bytes(parts[0].read_bytes()[:-1])  # damaged, it is done again
    assert cli.main(words) == 0
    assert "10 of 35 images were done before an interruption; continuing" in capsys.readouterr().out
    assert len(calls) == 3 + 3
    assert (run / written).read_bytes() == whole
    assert not list((tmp_path / "parts").iterdir())


def test_a_part_is_taken_only_for_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("lipflow.data.network.own_cache", lambda: tmp_path)
    calls = []

    def work(x, y):
        calls.append(x.tolist())
        return {"sum": x + y}

    def sums(x, y, about="a", size=2):
        return torch.cat([part["sum"] for part in PartCache(about).run(work, [x, y], size, "")]).tolist()

    x, y = torch.arange(5), torch.ones(5)
    assert sums(x, y) == sums(x, y) == [1, 2, 3, 4, 5]
    assert calls == [[0, 1], [2, 3], [4]]
    assert sums(x + 2, y) == [3, 4, 5, 6, 7]  # 2 and 3 are known; 4 has another neighbour
    assert calls[3:] == [[4, 5], [6]]
    for other in ({"y": 2 * y}, {"y": y.double()}, {"about": "b"}, {"size": 5}):
        before = len(calls)
        sums(**({"x": x, "y": y} | other))
        assert sum(len(part) for part in calls[before:]) == 5
    PartCache("a").clear()
    assert len(list((tmp_path / "parts").iterdir())) == 1  # of "b"


def test_what_cannot_be_kept_is_done_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "parts").write_text("a file where a folder should be")
    monkeypatch.setattr("lipflow.data.network.own_cache", lambda: tmp_path)
    (part,) = PartCache("").run(lambda x: {"x": x}, [torch.arange(3)], 5, "")
    assert part["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("command", ["certify", "attack"])
def test_a_folder_without_a_run(command, tmp_path, capsys):
    assert cli.main([command, str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_attack_does_not_depend_on_the_number_of_processes(run):
    """Two ranks certify and attack halves, and the first writes what one process writes."""
    certify, attack = (["certify", str(run), "--limit", "31"], ["attack", str(run), "--radii", "36/255", "1"])
    written = []
    for command in (lambda words: [cli.main(words)], lambda words: torchrun("-m", "lipflow", *words)):
        spoken = [command(words) for words in (certify, [*attack, "--restarts", "2", "--steps", "5"])]
        with np.load(run / "certified.npz") as rows:
            outcome = json.loads((run / "attack.json").read_text())
            written.append((rows["label"].tolist(), outcome["clean"], outcome["robust"]))
            radii = rows["radius"]
    assert written[0] == written[1]
    assert len(radii) == len(written[0][1]) == 31
    assert spoken[0].count("froze cpl-digits") == 1  # only the first rank speaks
    assert spoken[1].count("under attack") == 1


def test_threads_are_those_of_the_recipe_and_given_back(run, monkeypatch):
    """cpl-digits is trained with one thread, and is certified and attacked with one."""
    assert cli.main(["certify", str(run), "--limit", "5"]) == 0
    seen, before = [], torch.get_num_threads()
    run_it = lipflow.Frozen.__call__
    monkeypatch.setattr(
        lipflow.Frozen, "__call__", lambda self, x: seen.append(torch.get_num_threads()) or run_it(self, x)
    )
    torch.set_num_threads(2)
    try:
        assert cli.main(["certify", str(run), "--limit", "5"]) == 0
        assert cli.main(["attack", str(run), "--radii", "0.1", "--steps", "1"]) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


def test_progress_says_rate_and_time_left(monkeypatch, capsys):
    monkeypatch.setattr("lipflow.train.writer.SECONDS_BETWEEN_LINES", 0.0)
    parts = torch.arange(25).split(10)
    assert torch.equal(torch.cat(list(with_progress_bar(parts, "attacking"))), torch.arange(25))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["attacking 10/25 images", "attacking 20/25 images"]
    assert all("images/s" in line and line.endswith("left") for line in lines)
    list(with_progress_bar(parts, "attacking", shown=False))
    assert not capsys.readouterr().out
    assert images_pace("certifying", 200, 1000, 10.0) == "certifying 200/1000 images  20 images/s  40s left"
