"""The command line: help at once, errors in one line, and commands that do what they print."""

import ast
import dataclasses
import inspect
import itertools
import subprocess
import sys
import textwrap
import typing
from collections.abc import Iterator

import pytest

import lipflow
from lipflow import cli
from lipflow.commands.train import Choices, chosen
from lipflow.data import DataError
from lipflow.losses import MultiMargin
from lipflow.train import Run
from lipflow.train.recipe import CHOICES, SGD, Adam, numbers
from lipflow.train.schedule import MultiStep
from lipflow.train.signals import Interrupted, NonFiniteLoss
from tests.processes import TIMEOUT_SECONDS

TINY = ["--model-args", "depth=1", "channels=2", "inner=2", "depth_linear=1", "features=8", "--epochs", "1"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lipflow", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)


# Help


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["train", "--model", "cpl-s", "--help"]])
def test_help_needs_no_torch(words):
    """It answers at once, as nothing heavy is imported."""
    code = f"""
import sys
from lipflow.cli import main
try:
    main({words!r})
except SystemExit as error:
    assert not error.code
assert not {{"torch", "numpy", "matplotlib", "safetensors", "PIL"}} & set(sys.modules)
"""
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "train" in output


def test_help_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert f"{name} " in said
        assert command.summary in said
    assert cli.main([]) == 2
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.endswith(f"lipflow {lipflow.__version__}\n")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_is_there_and_every_flag_is_explained(name, capsys, monkeypatch):
    command = cli.COMMANDS[name]
    assert callable(cli._resolve(command.function))
    arguments = cli._resolve(command.arguments)
    monkeypatch.setenv("COLUMNS", "500")  # no line is broken
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    for flag, help_line in flags(arguments):
        assert flag in said
        assert help_line in said


def flags(kind: type) -> Iterator[tuple[str, str]]:
    """The flags of a frozen dataclass and of those in it, each with the docstring that must follow its field."""
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
    explained = {
        node.target.id: after.value.value
        for node, after in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }
    for field in dataclasses.fields(kind):
        if field.name in CHOICES and kind is not Choices:  # its flags are those of Choices
            continue
        inner = typing.get_type_hints(kind)[field.name]
        if dataclasses.is_dataclass(inner):
            yield from flags(inner)
            continue
        assert field.name in explained, f"{kind.__name__}.{field.name} has no help line"
        required = field.default is field.default_factory is dataclasses.MISSING
        yield "" if required else f"--{field.name.replace('_', '-')}", str(explained[field.name])


# Flags


def test_flags_start_from_the_recipe_of_the_model():
    def parsed(*words: str) -> Run:
        return chosen(cli.parse("train", words))

    assert parsed() == Run()
    assert parsed("--model", "cpl-s", "--data=cifar10") == Run.of("cpl-s", "cifar10")
    words = "--model cpl-s --data digits --lr 0.5 --no-flip --model-args depth=3 h=0.1 sigma=tanh lln=True"
    run = parsed(*words.split())
    assert (run.recipe.optimiser, run.recipe.flip, run.recipe.loss) == (Adam(lr=0.5), False, MultiMargin(0.7))
    assert run.model_args == {"depth": 3, "h": 0.1, "sigma": "tanh", "lln": True}
    assert parsed("--model", "cpl-fast", "--data", "cifar10", "--budget=2h") == Run.of("cpl-fast", "cifar10", "2h")
    assert parsed("--model", "cpl-fast", "--data", "cifar10", "--budget=2h", "--cutout", "0").recipe.cutout == 0
    assert parsed("--budget", "None").budget is None
    soc = parsed("--model", "soc-10", "--data", "cifar10", "--momentum", "0.8", "--milestones", "0.2", "0.9").recipe
    assert soc.optimiser == SGD(lr=0.1, weight_decay=5e-4, momentum=0.8)
    assert soc.schedule == MultiStep((0.2, 0.9), decay=0.1)
    assert parsed("--radii", "1/10", "0.5").recipe.radii == ("1/10", "0.5")


def test_flags_are_the_numbers_of_the_choices():
    """Choices names what `Recipe` chooses from: each optimiser, schedule and loss, and each of their fields."""
    hints = typing.get_type_hints(Choices)
    for choice, kinds in CHOICES.items():
        assert typing.get_args(hints.pop(choice)) == tuple(kinds)
        for kind in kinds.values():
            for number in numbers(kind):
                assert hints[number.name] == typing.get_type_hints(kind)[number.name]
                assert getattr(Choices, number.name) == number.default
    assert set(hints) == {
        number.name for kinds in CHOICES.values() for kind in kinds.values() for number in numbers(kind)
    }


# Errors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "there is no command 'trian'; did you mean train?"),
        (["x"], f"there is no command 'x'; there are {', '.join(cli.COMMANDS)}"),
        (["train", "--model", "resnet"], "there is no recipe for a model 'resnet'"),
        (["train", "--model", "cpl-xxl", "--data", "digits", "--out", "OUT"], "there is no model 'cpl-xxl'"),
        (["train", "--model", "cpl-fast", "--data", "mnist", "--out", "OUT"], "no dataset is called 'mnist'"),
        (["train", "--model", "cpl-fast"], "--model cpl-fast needs --data, such as --data cifar10; without it"),
        (["train", "--data", "cifar10"], "--data cifar10 needs --model, such as --model cpl-fast; without it"),
        (["train", "--gamma", "2"], "--gamma is for --loss certificate; this run has --loss multi-margin"),
        (["certify", "OUT"], "here or in runs/, and no trained network of that name; trained networks are"),
        (["attack", "cpl-fast"], "did you mean cpl-fast-cifar10?"),
        (["check", "OUT"], ", and no folder of that name here or in runs/: lipflow certify"),
        (["train", "--model-args", "depth=3", "depth=4", "--out", "OUT"], "the model argument depth is given twice"),
        (["train", "--model-args", "dept=3", "--out", "OUT"], "cpl-digits has no argument 'dept'; it has channels"),
        (["train", "--budget", "soon"], "a duration is written as 90s, 30m, 2h or 1h30m, not 'soon'"),
        (["train", "--resume", "--out", "OUT"], "holds no run"),
        (
            ["train", "--model", "cpl-s", "--data", "cifar10", "--data-dir", "OUT", "--out", "OUT"],
            "does not exist; check --data-dir",
        ),
        (["data", "mnist"], "no dataset is called 'mnist'"),
    ],
)
def test_a_mistake_is_answered_in_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # where no run has a name that is near
    try:
        code = cli.main([word.replace("OUT", str(tmp_path / "r")) for word in words])
    except SystemExit as error:  # tyro's own, for values that it parses
        code = error.code
    out, err = capsys.readouterr()
    assert code == 2
    assert said in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in out + err
    assert not (tmp_path / "r").exists()
    if err.startswith("lipflow:"):
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    "words", [["train", "--lr", "fast"], ["train", "--loss", "l2"], ["train", "--model-args", "depth"]]
)
def test_values_that_cannot_be_parsed(words, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert words[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("v"), 2),
        (DataError("d"), 2),
        (TypeError("t"), 2),
        (FileNotFoundError("f"), 2),
        (NonFiniteLoss("the loss is nan"), 1),
        (Interrupted(2, 3, "runs/x"), 130),
        (Interrupted(15, 3, "runs/x"), 143),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(error, code, monkeypatch, capsys):
    def fail(arguments):
        raise error

    monkeypatch.setattr("lipflow.commands.models.models", fail)
    monkeypatch.delenv("LIPFLOW_DEBUG", raising=False)
    assert cli.main(["models"]) == code
    err = capsys.readouterr().err
    assert err.startswith("lipflow: ")
    assert "Traceback" not in err
    monkeypatch.setenv("LIPFLOW_DEBUG", "1")
    assert cli.main(["models"]) == code
    assert ("Traceback" in capsys.readouterr().err) == isinstance(error, Exception)


def test_an_error_of_ours_is_not_hidden(monkeypatch):
    monkeypatch.setattr("lipflow.commands.models.models", lambda arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["models"])


# Commands


def test_models(capsys):
    assert cli.main(["models"]) == 0
    said = capsys.readouterr().out
    assert "41,342,616" in said
    for name in lipflow.list_models():
        assert name in said
    table, trained = said.rsplit("trained", 1)
    assert all(name in trained for name in lipflow.pretrained.NAMES)
    assert "bound" not in table  # it is 3.99 for some, and depends on their arguments: freeze knows


def test_data(capsys):
    assert cli.main(["data", "digits"]) == 0
    said = capsys.readouterr().out
    assert "1197" in said
    assert "1×8×8" in said


def test_train_and_resume(tmp_path, capsys):
    out = str(tmp_path / "r")
    assert cli.main(["train", "--out", out, *TINY]) == 0
    assert (tmp_path / "r" / "model.safetensors").is_file()
    assert cli.main(["train", "--out", out, *TINY]) == 2
    assert "holds a run already; add --resume" in capsys.readouterr().err
    assert cli.main(["train", "--out", out, "--resume"]) == 0
    assert "has ended already" in capsys.readouterr().out
    assert cli.main(["train", "--out", out, "--resume", "--epochs", "7", "--device", "cpu"]) == 2
    assert "--epochs 7 (the run has 1)" in capsys.readouterr().err


def test_a_run_may_move(tmp_path, capsys):
    assert cli.main(["train", "--out", str(tmp_path / "a"), *TINY]) == 0
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").unlink()
    assert cli.main(["train", "--out", str(tmp_path / "b"), "--resume"]) == 0
    assert (tmp_path / "b" / "model.safetensors").is_file()
    assert not (tmp_path / "a").exists()


def test_demo_shows_what_it_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = cli.demo_commands

    def tiny(out):
        return [[*words, *(TINY if words[0] == "train" else [])] for words in commands(out)]

    monkeypatch.setattr(cli, "demo_commands", tiny)
    assert cli.main(["demo"]) == 0
    said = capsys.readouterr().out
    assert "$ lipflow train --model cpl-digits --data digits --out runs/demo" in said
    assert "$ lipflow certify runs/demo" in said
    assert "0 (clean)" in said
    assert "average radius" in said
    assert "accepted: 300 radii follow from their scores; the scores of 32 of 300 images were recomputed" in said
    assert "$ lipflow report runs/demo --out runs/demo/report.html" in said
    ending = said[said.index("$ lipflow report") :]
    assert all(word in ending for word in ("0 (clean)", "certified", "under attack"))
    assert ending.endswith("wrote runs/demo/report.html: open it in a browser\n")
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
    assert cli.main(["demo"]) == 0
    assert (tmp_path / "runs" / "demo-2" / "model.safetensors").is_file()


def test_python_dash_m():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"lipflow {lipflow.__version__}\n")
    assert run("train", "--lr", "fast").returncode == 2
