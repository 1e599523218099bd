"""The command line: help, flags, errors and exit codes."""

import re
import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path

import pytest

import lipflow
from lipflow import cli
from lipflow.commands.train import Choices, chosen
from lipflow.losses import MultiMargin
from lipflow.train import Run
from lipflow.train.recipe import CHOICES, SGD, Adam
from lipflow.train.schedule import MultiStep
from lipflow.train.signals import Interrupted, NonFiniteLoss
from tests.train.tiny import FLAGS

TINY = [*FLAGS, "--epochs", "1"]


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["train", "--model", "cpl-s", "--help"]])
def test_help_needs_no_torch(words):
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
    printed = capsys.readouterr().out
    assert all(f"{name} " in printed and summary in printed for name, summary in cli.COMMANDS.items())
    assert cli.main([]) == 2


def test_python_m_lipflow():
    """It passes on the arguments and the exit code."""
    for words, code in ((["--version"], 0), (["train", "--lr", "fast"], 2)):
        done = subprocess.run([sys.executable, "-m", "lipflow", *words], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (code, "" if code else f"lipflow {lipflow.__version__}\n")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_explains_every_flag(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")  # so that no line is broken
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    flags = re.split(r"\n[│ ] (?=--\w)", capsys.readouterr().out)[1:]
    assert [flag for flag in flags if ". (default: " not in flag] == []  # a sentence stands before the default
    assert bool(flags) == (name != "models")


def test_help_takes_a_command(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["help", "check"])
    assert caught.value.code == 0
    assert "usage: lipflow check" in capsys.readouterr().out


def test_train_flags_change_the_published_recipe():
    def parsed(words: str) -> Run:
        return chosen(cli.parse("train", words.split()))

    assert parsed("") == Run()
    assert parsed("--model cpl-s --data=cifar10") == Run.of("cpl-s", "cifar10")
    run = parsed("--model cpl-s --data digits --lr 0.5 --no-flip --model-args depth=3 h=0.1 sigma=tanh lln=True")
    assert (run.recipe.optimiser, run.recipe.flip, run.recipe.loss) == (Adam(lr=0.5), False, MultiMargin(0.7))
    assert run.model_args == {"depth": 3, "h": 0.1, "sigma": "tanh", "lln": True}
    assert parsed("--model cpl-fast --data cifar10 --budget=2h") == Run.of("cpl-fast", "cifar10", "2h")
    assert parsed("--model cpl-fast --data cifar10 --budget=2h --cutout 0").recipe.cutout == 0
    assert parsed("--budget None").budget is None
    soc = parsed("--model soc-10 --data cifar10 --momentum 0.8 --milestones 0.2 0.9").recipe
    assert soc.optimiser == SGD(lr=0.1, weight_decay=5e-4, momentum=0.8)
    assert soc.schedule == MultiStep((0.2, 0.9), decay=0.1)
    assert parsed("--radii 1/10 0.5").recipe.radii == ("1/10", "0.5")


def test_train_has_a_flag_for_every_number_of_every_choice():
    hints = typing.get_type_hints(Choices)
    for choice, kinds in CHOICES.items():
        assert typing.get_args(hints.pop(choice)) == tuple(kinds)
    of_kinds = [(kind, number) for kinds in CHOICES.values() for kind in kinds.values() for number in fields(kind)]
    for kind, number in of_kinds:
        assert hints[number.name] == typing.get_type_hints(kind)[number.name]
        assert getattr(Choices, number.name) == number.default
    assert set(hints) == {number.name for _, number in of_kinds}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian", "there is no command 'trian'; did you mean train?"),
        ("x", f"there is no command 'x'; there are {', '.join(cli.COMMANDS)}"),
        ("train --model resnet", "there is no recipe for a model 'resnet'"),
        ("train --model cpl-fast", "--model cpl-fast needs --data"),
        ("train --data cifar10", "--data cifar10 needs --model"),
        ("train --data mnist", "no dataset is called 'mnist'; use one of digits"),
        ("train --gamma 2", "--gamma is for --loss certificate"),
        ("train --lr fast", "fast"),
        ("train --loss l2", "l2"),
        ("train --model-args depth", "depth"),
        ("train --model-args depth=3 depth=4 --out OUT", "depth is given twice"),
        ("train --resume --out OUT", "holds no run"),
        ("certify OUT", "no pretrained network of that name"),
        ("attack cpl-fast", "did you mean cpl-fast-cifar10?"),
        ("certify OUT --limit 0", "--limit must be at least 1, not 0"),
        ("attack OUT --limit=-3", "--limit must be at least 1, not -3"),
        ("attack OUT --gallery=-1", "--gallery must be at least 0, not -1"),
        ("attack OUT --steps=-1", "--steps must be at least 0, not -1"),
        ("attack OUT --restarts 0", "--restarts must be at least 1, not 0"),
        ("data mnist", "no dataset is called 'mnist'"),
    ],
)
def test_a_mistake_is_answered_in_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = cli.main([word.replace("OUT", str(tmp_path / "r")) for word in words.split()])
    except SystemExit as error:  # raised by tyro for values that it parses
        code = error.code
    out, err = capsys.readouterr()
    assert code == 2
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in out + err
    assert not (tmp_path / "r").exists()
    assert err.count("\n") == 1 or not err.startswith("lipflow:")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("v"), 2),
        (TypeError("t"), 2),
        (FileNotFoundError("f"), 2),
        (NonFiniteLoss("the loss is nan"), 1),
        (Interrupted(2, 3, "runs/x"), 130),
        (Interrupted(15, 3, "runs/x"), 143),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_ends_in_one_line_and_its_exit_code(error, code, monkeypatch, capsys):
    def fail(arguments):
        raise error

    monkeypatch.setattr("lipflow.commands.models.models", fail)
    assert cli.main(["models"]) == code
    err = capsys.readouterr().err
    assert err.startswith("lipflow: ")
    assert "Traceback" not in err
    monkeypatch.setenv("LIPFLOW_DEBUG", "1")
    assert cli.main(["models"]) == code
    assert ("Traceback" in capsys.readouterr().err) == isinstance(error, Exception)


def test_a_bug_is_raised(monkeypatch):
    monkeypatch.setattr("lipflow.commands.models.models", lambda arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["models"])


def test_models_lists_every_network_and_data_describes_the_images(capsys):
    assert cli.main(["models"]) == 0
    printed = capsys.readouterr().out
    assert "41,342,616" in printed
    assert all(name in printed for name in (*lipflow.list_models(), *lipflow.pretrained.NAMES))
    assert cli.main(["data", "digits"]) == 0
    printed = capsys.readouterr().out
    assert "1197" in printed
    assert "1×8×8" in printed


def test_a_run_may_be_moved_and_resumed(tmp_path):
    assert cli.main(["train", "--out", str(tmp_path / "a"), *TINY]) == 0
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").unlink()
    assert cli.main(["train", "--out", str(tmp_path / "b"), "--resume"]) == 0
    assert (tmp_path / "b" / "model.safetensors").is_file()
    assert not (tmp_path / "a").exists()


def test_demo_runs_the_commands_that_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = cli.demo_commands

    def tiny(out):
        return [[*words, *(TINY if words[0] == "train" else [])] for words in commands(out)]

    monkeypatch.setattr(cli, "demo_commands", tiny)
    for folder in ("runs/demo", "runs/demo-2"):
        assert cli.main(["demo"]) == 0
        printed = capsys.readouterr().out
        assert all(f"$ lipflow {' '.join(words)}" in printed for words in commands(Path(folder)))
        assert "accepted: 300 radii" in printed
        assert (tmp_path / folder / "report.html").is_file()
