"""What runs, what is not run again, what goes on; and one end-to-end smoke of the shared loop."""

import json
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from experiments.draw import save
from experiments.runner import DIVERGED, ensure, experiments, main, placed, state, work_of
from experiments.runner import Options as RunnerOptions
from experiments.scale import EVALUATION, SCALES, SMALL, cost, total
from lipflow.report.published import BATCH_SIZES_CIFAR10, CIFAR10, RELAXED
from lipflow.train.loop import train
from lipflow.train.run import differences
from lipflow.train.schedule import Plan
from lipflow.train.signals import Interrupted, NonFiniteLoss
from tests.processes import TIMEOUT_SECONDS, start

FILES = sorted(p.stem for p in (Path(__file__).parents[2] / "experiments").glob("*.py"))
ROOMS = {
    "__init__",
    "__main__",
    "draw",
    "experiment",
    "fast",
    "fast_page",
    "measure",
    "parallel",
    "provenance",
    "results",
    "rivals",
    "runner",
    "scale",
    "sources",
}


def small_run(folder):
    return replace(SCALES["smoke"], folder=folder, data_dir=folder).run("cpl-s", "cifar10")


def words(folder, *more):
    places = ("runs", "results", "docs")
    return ["--scale", "smoke", *(w for p in places for w in (f"--{p}", str(folder / p))), *more]


def test_every_file_is_an_experiment_or_a_room():
    from experiments.runner import MODULES

    assert set(MODULES) | ROOMS == set(FILES)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("experiment", experiments(), ids=lambda e: e.name)
def test_every_experiment_says_what_it_runs(experiment, scale):
    planned = experiment.runs(SCALES[scale])
    assert experiment.claims
    assert experiment.columns
    assert planned or experiment.fixed()
    for run in (run for row in planned.values() for run in row):
        assert str(run.folder).startswith(f"runs/experiments/{scale}/")
        assert run.certify_validation == 0
        assert cost(SCALES[scale], run) > 0


def test_runs_of_one_name_are_one_run():
    for scale in SCALES.values():
        named = {}
        for run in (run for e in experiments() for row in e.runs(scale).values() for run in row):
            assert named.setdefault(run.folder, run) == run
        assert total(scale, list(named.values()) * 2) == total(scale, list(named.values()))


def test_the_small_scale_keeps_its_promise_of_time():
    runs = [r for e in experiments() if e.data == "cifar10" for row in e.runs(SMALL).values() for r in row]
    seconds = {run.folder.name: cost(SMALL, run) - EVALUATION[run.model] for run in runs}
    (deepest,) = (name for name in seconds if "depth=1000" in name)
    assert 20 * 60 < seconds.pop(deepest) <= 32 * 60
    assert max(seconds.values()) <= 20 * 60
    assert total(SMALL, runs) <= 6.5 * 3600


def test_the_paper_scale_is_as_published():
    runs = [run for row in experiments(["cifar10"])[0].runs(SCALES["paper"]).values() for run in row]
    assert {run.model for run in runs} == set(CIFAR10)
    assert {run.seed for run in runs} == {0, 1, 2}
    assert {run.recipe.epochs for run in runs} == {200}
    assert all(run.model_args == {} and run.recipe.lln is run.model.startswith("soc+") for run in runs)
    (table,) = experiments(["cifar100"])
    lln = [run for row in table.runs(SCALES["paper"]).values() for run in row if "+" not in run.model]
    assert all(run.recipe.lln for run in lln)


def test_published_numbers_are_those_of_the_report():
    by_name = {e.name: e.published for e in experiments()}
    assert by_name["cifar10"]["CPL-S"] == {
        "clean": 75.6,
        "36/255": 62.3,
        "72/255": 46.9,
        "108/255": 32.2,
        "s/epoch": CIFAR10["cpl-s"].seconds,
    }
    assert by_name["relaxed"]["h = 1"]["clean"] == RELAXED[1.0][0]
    assert by_name["batch-size-cifar10"]["CPL-XL, 64"]["108/255"] == BATCH_SIZES_CIFAR10["cpl-xl", 64][3]


def test_what_is_done_is_not_run_again_and_what_was_interrupted_goes_on(tmp_path, capsys):
    run, asked = small_run(tmp_path), []

    def interrupted(run, resume):
        asked.append(resume)
        run.folder.mkdir(parents=True)
        from lipflow.train.record import Record

        Record(run, Plan.of(1), {}).write(run.folder)
        raise Interrupted(2, 0, run.folder)

    assert state(run) == "to do"
    with pytest.raises(Interrupted):
        ensure(run, interrupted)
    assert state(run) == "interrupted"
    ensure(run, lambda run, resume: asked.append(resume))
    assert asked == [False, True]
    (run.folder / "model.safetensors").touch()
    ensure(run, lambda run, resume: asked.append("again"))
    assert asked == [False, True]
    assert "done already" in capsys.readouterr().out
    other = replace(run, recipe=run.recipe.vary(margin=9.0))
    with pytest.raises(ValueError, match=r"holds another run: --margin 9.0 \(the run has 0.7\)"):
        ensure(other)


def test_a_run_that_diverges_is_a_result(tmp_path):
    run = small_run(tmp_path)

    def diverging(run, resume):
        from lipflow.train.record import Record

        run.folder.mkdir(parents=True)
        Record(run, Plan.of(1), {}).write(run.folder)
        raise NonFiniteLoss("the loss is nan")

    ensure(run, diverging)
    assert state(run) == "diverged"
    assert "nan" in (run.folder / DIVERGED).read_text()
    ensure(run, diverging)  # and is not tried again


def test_listing_runs_nothing(tmp_path, capsys):
    assert main(words(tmp_path, "--list")) == 0
    text = capsys.readouterr().out
    assert all(e.name in text for e in experiments())
    assert "shared" in text
    assert "to do: about" in text
    assert not list(tmp_path.rglob("run.json"))


def test_unknown_names_and_missing_data_are_said(tmp_path, capsys):
    assert main(words(tmp_path, "--only", "margins")) == 2
    assert "there is no experiment 'margins'" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    more = ["--scale", "small", "--data-dir", str(tmp_path / "empty"), "--only", "cifar100"]
    assert main([*words(tmp_path)[2:], *more]) == 0
    assert "passed over: there is no cifar100 here" in capsys.readouterr().out


def test_a_smoke_run_end_to_end(tmp_path, capsys):
    """CPL and its rivals on both data sets, a relaxed step, very deep networks: certified, attacked, probed, drawn."""
    names = ["architectures", "relaxed", "margin-cifar100", "depth", "gradient"]
    names += ["cifar100", "certified-cifar100", "pgd-cifar100", "batch-size-cifar100", "effective"]
    assert main(words(tmp_path, "--only", *names)) == 0
    assert "Traceback" not in capsys.readouterr().err
    results = {name: json.loads((tmp_path / f"results/smoke/{name}.json").read_text()) for name in names}
    for name, result in results.items():
        assert (tmp_path / f"results/smoke/{name}-smoke.png").stat().st_size > 1000
        assert {c["verdict"] for c in result["claims"]} == {"cannot be judged"}
        assert {"commit", "lipflow", "torch", "python", "machine", "command", "day"} <= result["provenance"].keys()
        assert result["provenance"]["command"].startswith("python -m experiments --scale smoke")
    assert not (tmp_path / "docs").exists()
    (found,) = results["margin-cifar100"]["rows"]["m = 0.7"]
    assert found["seed"] == 0
    assert 0 <= found["certified"]["0.8"] <= found["certified"]["36/255"] <= found["clean"] <= 1
    assert found["contradictions"] == []
    assert found["attacked"].keys() == {"36/255", "0.6", "0.8"}
    (deep,) = results["gradient"]["rows"]["6 layers"]
    assert len(deep["gradient"]["trained"]) == 6 + 1
    assert max(deep["gradient"]["fresh"]) <= 1.01
    assert [row[0]["conv. layers"] for row in results["architectures"]["rows"].values()] == [20, 30, 90, 120]
    again = (tmp_path / "runs/smoke/cpl-s-cifar10-synthetic-h=1.0-seed=0/log.jsonl").stat().st_mtime_ns
    assert main(words(tmp_path, "--only", "relaxed")) == 0
    assert "done already" in capsys.readouterr().out
    assert (tmp_path / "runs/smoke/cpl-s-cifar10-synthetic-h=1.0-seed=0/log.jsonl").stat().st_mtime_ns == again


def test_side_by_side_is_the_same_and_nothing_is_done_twice(tmp_path, capfd):
    names = ["--only", "margin-cifar10", "relaxed"]
    work = work_of(experiments(names[1:]), placed(RunnerOptions("smoke", runs=tmp_path / "runs")))
    assert len(work) == 8  # five margins and three steps; the run that both name is one
    assert main(words(tmp_path, *names, "--jobs", "2")) == 0
    told = capfd.readouterr().out
    assert told.count("    training ") == 8
    assert told.count("done already") == 5 + 4
    assert {p.name for p in (tmp_path / "results" / "smoke").glob("*.json")} == {"margin-cifar10.json", "relaxed.json"}
    assert main(words(tmp_path, "--jobs", "0")) == 2


def test_an_experiment_is_written_as_soon_as_its_last_run_has_ended(tmp_path, monkeypatch):
    seen = []

    def one_by_one(jobs, function, work, after):
        for name, arguments in work.items():
            function(*arguments)
            after(name)
            seen.append((name, sorted(p.stem for p in (tmp_path / "results" / "smoke").glob("*.json"))))

    monkeypatch.setattr("experiments.runner.side_by_side", one_by_one)
    assert main(words(tmp_path, "--only", "relaxed", "margin-cifar10", "--jobs", "2")) == 0
    assert [name for name, _ in seen].index("cpl-s-cifar10-synthetic-h=0.01-seed=0") == 3
    assert [written for _, written in seen] == [[]] * 3 + [["relaxed"]] * 4 + [["margin-cifar10", "relaxed"]]


def test_ctrl_c_stops_all_of_them_and_begins_no_other():
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
    assert "experiments: interrupted; the same command goes on" in output
    assert output.count("begun: ") == 2


def test_rivals_are_measured_from_below(tmp_path):
    from experiments.measure import measure

    options = RunnerOptions(scale="smoke", runs=tmp_path / "runs")
    scale = placed(options)
    for model in ("cayley-kw3", "soc-10"):
        run = scale.run(model, "cifar10")
        ensure(run)
        found = measure(run.folder, ("certified", "effective"), scale)
        assert 0 < found["used_mean"] <= found["used"] <= 1
        assert found["effective_lipschitz"] <= found["certified_lipschitz"]


def test_an_interrupted_run_resumes_for_real(tmp_path):
    scale = placed(RunnerOptions(scale="smoke", runs=tmp_path / "runs"))
    run = scale.run("cpl-s", "cifar10")
    ensure(run)
    (run.folder / "model.safetensors").unlink()  # as if it had been stopped after its last checkpoint
    assert state(run) == "interrupted"
    ensure(run, train)
    assert state(run) == "done"
    assert not differences(run, scale.run("cpl-s", "cifar10"))


def test_figures_say_what_they_need(monkeypatch, tmp_path, capsys):
    import builtins

    real = builtins.__import__

    def refuse(name, *rest, **more):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert main(words(tmp_path, "--only", "architectures")) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_stored_verdicts_are_those_of_the_rules_as_they_are(tmp_path):
    stored = Path(__file__).parents[2] / "experiments" / "results" / "small"
    expected = {path.name: json.loads(path.read_text()) for path in stored.glob("*.json")}
    (tmp_path / "small").mkdir()
    (tmp_path / "docs").mkdir()
    for name, result in expected.items():
        (tmp_path / "small" / name).write_text(json.dumps({**result, "claims": []}))
    assert main(["--scale", "small", "--judge", "--results", str(tmp_path), "--docs", str(tmp_path / "docs")]) == 0
    assert {path.name: json.loads(path.read_text()) for path in (tmp_path / "small").glob("*.json")} == expected
    assert (tmp_path / "docs" / "results.md").is_file()


@pytest.mark.parametrize("experiment", experiments(), ids=lambda e: e.name)
def test_every_figure_can_be_drawn_of_nothing_but_its_rows(experiment, tmp_path):
    columns = [c._asdict() for c in experiment.columns]
    rows = {"3 layers": [{"run": "x", "diverged": True}], **experiment.fixed()}
    kept = {"title": experiment.title, "scale": "smoke", "columns": columns, "published": {}, "rows": rows}
    save(experiment.draw, kept, tmp_path / "f.png")
    assert (tmp_path / "f.png").is_file()
