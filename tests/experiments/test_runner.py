"""The runs of the experiments, and the runner: what it trains, resumes and writes."""

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from experiments.draw import save
from experiments.runner import MODULES, Options, as_trained, ensure, experiments, main, scale_of, state, work_of
from experiments.scale import DEEP, EVALUATION, OPERATIONS, SCALES, SMALL, cost, parallel, total
from lipflow.models import build
from lipflow.report.published import CIFAR10
from lipflow.train.record import Record
from lipflow.train.schedule import Plan
from lipflow.train.signals import Interrupted, NonFiniteLoss
from tests.processes import TIMEOUT_SECONDS, start, torchrun

ROOT = Path(__file__).parents[2]


def runs_of(experiment, scale):
    return [run for row in experiment.runs(SCALES[scale]).values() for run in row]


@pytest.fixture
def smoke(tmp_path):
    return scale_of(Options("smoke", runs=tmp_path / "runs"))


@pytest.fixture
def words(tmp_path):
    """The words of a command at the smoke scale, in a temporary folder."""
    folders = [word for place in ("runs", "results", "docs") for word in (f"--{place}", str(tmp_path / place))]
    return lambda *more: ["--scale", "smoke", *folders, *more]


# The runs


def test_every_module_with_experiments_is_listed():
    texts = {path.stem: path.read_text() for path in (ROOT / "experiments").glob("*.py")}
    assert {name for name, text in texts.items() if "\nEXPERIMENTS = " in text} == set(MODULES)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("experiment", experiments(), ids=lambda e: e.name)
def test_every_experiment_has_claims_columns_and_runs(experiment, scale):
    runs = runs_of(experiment, scale)
    assert experiment.claims
    assert experiment.columns
    assert runs or experiment.fixed()
    for run in runs:
        assert str(run.folder).startswith(f"runs/experiments/{scale}/")
        assert run.certify_validation == 0
        assert cost(SCALES[scale], run) > 0


@pytest.mark.parametrize("scale", SCALES)
def test_a_folder_is_that_of_one_run(scale):
    named = {}
    for run in (run for experiment in experiments() for run in runs_of(experiment, scale)):
        assert named.setdefault(run.folder, run) == run
    once, twice = list(named.values()), list(named.values()) * 2
    assert total(SCALES[scale], twice) == total(SCALES[scale], once) == pytest.approx(parallel(SCALES[scale], once, 1))
    longest = max(cost(SCALES[scale], run) for run in once)
    assert longest <= parallel(SCALES[scale], twice, 8) <= total(SCALES[scale], once) / 8 + longest


def test_the_small_scale_takes_twenty_minutes_a_run_except_for_deep_networks():
    runs = [run for experiment in experiments() if experiment.data == "cifar10" for run in runs_of(experiment, "small")]
    seconds = {run.folder.name: cost(SMALL, run) - EVALUATION[run.model] for run in runs}
    (deepest,) = (name for name in seconds if "depth=1000" in name)
    assert seconds[deepest] == max(seconds.values()) <= 75 * 60
    assert max(taken for name, taken in seconds.items() if "depth=" not in name) <= 20 * 60
    assert total(SMALL, runs) <= 6.5 * 3600


def test_the_paper_scale_has_the_published_runs():
    runs = runs_of(*experiments(["cifar10"]), "paper")
    assert {run.model for run in runs} == set(CIFAR10)
    assert {(run.seed, run.recipe.epochs) for run in runs} == {(0, 200), (1, 200), (2, 200)}
    assert all(run.model_args == {} and run.recipe.lln is run.model.startswith("soc+") for run in runs)
    assert all(run.recipe.lln for run in runs_of(*experiments(["cifar100"]), "paper"))


# The runner


@pytest.mark.parametrize("error", [NonFiniteLoss("the loss is nan"), Interrupted(2, 0, Path("r")), None], ids=str)
def test_ensure_resumes_an_interrupted_run_and_repeats_no_other(error, smoke, monkeypatch):
    run, resumed = smoke.run("cpl-s", "cifar10"), []

    def train(run, resume, watch):
        resumed.append(resume)
        run.folder.mkdir(parents=True, exist_ok=True)
        Record(run, Plan.of(1), {}).write(run.folder)
        if error is not None and not resume:
            raise error
        (run.folder / "model.safetensors").touch()

    monkeypatch.setattr("lipflow.train.loop.train", train)
    assert state(run) == "to do"
    if isinstance(error, Interrupted):
        with pytest.raises(Interrupted):
            ensure(run)
        assert state(run) == "interrupted"
    for _ in range(2):
        ensure(run)
        assert state(run) == ("diverged" if isinstance(error, NonFiniteLoss) else "done")
    assert resumed == ([False, True] if isinstance(error, Interrupted) else [False])
    with pytest.raises(ValueError, match=r"holds another run: --margin 9.0 \(the run has 0.7\)"):
        ensure(replace(run, recipe=run.recipe.vary(margin=9.0)))


def test_list_trains_nothing(tmp_path, words, capsys):
    assert main(words("--list")) == 0
    text = capsys.readouterr().out
    assert all(experiment.name in text for experiment in experiments())
    assert "shared" in text
    assert "to do: about" in text
    assert not list(tmp_path.rglob("run.json"))


@pytest.mark.parametrize(
    ("more", "message"),
    [(["--only", "margins"], "there is no experiment 'margins'"), (["--jobs", "0"], "--jobs is at least 1")],
)
def test_mistakes_print_one_line(more, message, words, capsys):
    assert main(words(*more)) == 2
    assert message in capsys.readouterr().err


def test_an_experiment_without_its_images_is_skipped(tmp_path, words, capsys):
    assert main(words("--scale", "small", "--data-dir", str(tmp_path), "--only", "cifar100")) == 0
    assert "skipped: cifar100 was not found" in capsys.readouterr().out


def test_without_matplotlib_the_error_names_it(monkeypatch, words, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(words("--only", "architectures")) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_smoke_run_end_to_end(tmp_path, words, capsys):
    """CPL, Cayley and SOC, relaxed steps and very deep networks are trained, measured and drawn."""
    names = ["architectures", "relaxed", "margin-cifar100", "depth", "gradient"]
    names += ["cifar100", "certified-cifar100", "pgd-cifar100", "batch-size-cifar100", "effective"]
    assert main(words("--only", *names)) == 0
    assert "Traceback" not in capsys.readouterr().err
    results = {name: json.loads((tmp_path / f"results/smoke/{name}.json").read_text()) for name in names}
    for name, result in results.items():
        assert (tmp_path / f"results/smoke/{name}-smoke.png").stat().st_size > 1000
        assert {c["verdict"] for c in result["claims"]} == {"cannot be judged"}
        assert {"commit", "lipflow", "torch", "python", "machine", "day"} <= result["provenance"].keys()
        assert result["provenance"]["command"].startswith("python -m experiments --scale smoke")
    assert not (tmp_path / "docs").exists()
    (found,) = results["margin-cifar100"]["rows"]["m = 0.7"]
    assert 0 <= found["certified"]["0.8"] <= found["certified"]["36/255"] <= found["clean"] <= 1
    assert found["contradictions"] == []
    assert found["attacked"].keys() == {"36/255", "0.6", "0.8"}
    (deep,) = results["gradient"]["rows"]["6 layers"]
    assert len(deep["gradient"]["trained"]) == 6 + 1
    assert max(deep["gradient"]["fresh"]) <= 1.01
    assert [row[0]["conv. layers"] for row in results["architectures"]["rows"].values()] == [20, 30, 90, 120]
    for rows in results["effective"]["rows"].values():
        assert all(0 < row["used_mean"] <= row["used"] <= 1 for row in rows)
        assert all(row["effective_lipschitz"] <= row["certified_lipschitz"] for row in rows)

    log = tmp_path / "runs/smoke/cpl-s-cifar10-synthetic-h=1.0-seed=0/log.jsonl"
    written = log.stat().st_mtime_ns
    assert main(words("--only", "relaxed")) == 0
    assert "done already" in capsys.readouterr().out
    assert log.stat().st_mtime_ns == written


def test_parallel_jobs_train_each_run_once(tmp_path, words, smoke, capfd):
    names = ["margin-cifar10", "relaxed"]
    assert len(work_of(experiments(names), smoke)) == 8  # five margins and three steps, and one that both share
    assert main(words("--only", *names, "--jobs", "2")) == 0
    assert capfd.readouterr().out.count("    training ") == 8
    assert {path.stem for path in (tmp_path / "results" / "smoke").glob("*.json")} == set(names)


def test_parallel_jobs_write_an_experiment_once_its_last_run_has_ended(smoke, monkeypatch):
    monkeypatch.setattr("experiments.runner.has_data", lambda experiment, scale: experiment.name != "cifar10")
    chosen = experiments(["cifar10", "relaxed", "margin-cifar10"])
    relaxed, margin = (set(work_of([experiment], smoke)) for experiment in chosen[1:])
    ended = []
    monkeypatch.setattr("experiments.runner.in_parallel", lambda jobs, function, work: ended_of(work, ended))
    found = {}
    for experiment in as_trained(chosen, smoke, jobs=2):
        found[experiment.name] = set(ended)
    assert list(found) == ["relaxed", "margin-cifar10", "cifar10"]
    assert found["relaxed"] == relaxed
    assert found["margin-cifar10"] == relaxed | margin


def ended_of(work, ended):
    for name in work:
        ended.append(name)
        yield name


def test_ctrl_c_stops_all_jobs_and_begins_no_other():
    process = start(
        "tests/experiments/waiting.py",
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    assert process.stdout is not None
    begun = [process.stdout.readline() for _ in range(2)]
    os.killpg(process.pid, signal.SIGINT)
    output = "".join(begun) + process.communicate(timeout=TIMEOUT_SECONDS)[0]
    assert process.returncode == 130, output
    assert "experiments: interrupted; the same command continues" in output
    assert output.count("begun: ") == 2


def test_judge_reproduces_the_stored_verdicts(tmp_path):
    stored = ROOT / "experiments" / "results" / "small"
    expected = {path.name: json.loads(path.read_text()) for path in stored.glob("*.json")}
    (tmp_path / "small").mkdir()
    for name, result in expected.items():
        (tmp_path / "small" / name).write_text(json.dumps({**result, "claims": []}))
    assert main(["--scale", "small", "--judge", "--results", str(tmp_path), "--docs", str(tmp_path / "docs")]) == 0
    assert {path.name: json.loads(path.read_text()) for path in (tmp_path / "small").glob("*.json")} == expected
    assert (tmp_path / "docs" / "results.md").is_file()


@pytest.mark.parametrize("experiment", experiments(), ids=lambda e: e.name)
def test_a_figure_can_be_drawn_without_measurements(experiment, tmp_path):
    columns = [column._asdict() for column in experiment.columns]
    rows = {"3 layers": [{"run": "x", "diverged": True}], **experiment.fixed()}
    result = {"title": experiment.title, "scale": "smoke", "columns": columns, "published": {}, "rows": rows}
    save(experiment.draw, result, tmp_path / "f.png")
    assert (tmp_path / "f.png").is_file()


def test_two_processes_of_torchrun_measure_what_one_does(tmp_path, words):
    assert main(words("--only", "depth", "gradient")) == 0
    alone = json.loads((tmp_path / "results" / "smoke" / "gradient.json").read_text())["rows"]
    shutil.rmtree(tmp_path / "runs")
    output = torchrun("-m", "experiments", *words("--only", "depth", "gradient"))
    assert output.count("training cpl") == output.count("==>") == 2  # only the first process prints
    together = json.loads((tmp_path / "results" / "smoke" / "gradient.json").read_text())["rows"]
    assert list(together) == list(alone)
    for label, (one,) in alone.items():
        (two,) = together[label]
        assert (one["recorded"]["processes"], two["recorded"]["processes"]) == (1, 2)
        for key in ("loss", "first_fresh", "first_trained"):
            assert two[key] == pytest.approx(one[key], rel=1e-4)
        assert len(two["first_gradients"]) == 1


def test_operations_of_very_deep_networks_are_those_that_torch_counts():
    def count(layers, images):
        network = build("cpl", 10, (3, 32, 32), depth=layers).train()
        with FlopCounterMode(display=False) as counter:
            network(torch.zeros(images, 3, 32, 32)).sum().backward()
        return counter.get_total_flops() / 1e9

    of_images = [count(layers, 3) - count(layers, 1) for layers in (2, 4)]
    assert (of_images[1] - of_images[0]) / 4 == pytest.approx(OPERATIONS[DEEP], rel=0.01)
