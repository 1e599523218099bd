"""The command line: a table of commands, each a function over a frozen dataclass of arguments in its own room.

A command's room is imported when the command is typed, and torch when it runs, so that help answers at once.
"""

import difflib
import importlib
import itertools
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lipflow
from lipflow.machine import keep_freed_memory


class Command(NamedTuple):
    """A line of help, and where to find (as "module:name") the arguments' dataclass and the function over it.

    The function returns the exit code. `defaults`, if any, maps the words typed to the values of flags not typed.
    """

    summary: str
    arguments: str
    function: str
    defaults: str | None = None


COMMANDS: dict[str, Command] = {
    "train": Command(
        "train a network by its published recipe, or resume",
        "lipflow.commands.train:Train",
        "lipflow.commands.train:train",
        "lipflow.commands.train:defaults",
    ),
    "certify": Command(
        "freeze a trained network and certify images with it",
        "lipflow.commands.certify:Certify",
        "lipflow.commands.certify:certify",
    ),
    "check": Command(
        "verify a certificate, with NumPy alone",
        "lipflow.commands.check:Check",
        "lipflow.commands.check:check",
    ),
    "attack": Command(
        "attack the certified network with L2-PGD",
        "lipflow.commands.attack:Attack",
        "lipflow.commands.attack:attack",
    ),
    "report": Command(
        "compare runs on one page that opens offline",
        "lipflow.commands.report:Report",
        "lipflow.commands.report:report",
    ),
    "data": Command(
        "fetch a dataset and show what is in it",
        "lipflow.commands.data:Data",
        "lipflow.commands.data:data",
    ),
    "models": Command(
        "list the networks, their parameters and layers",
        "lipflow.commands.models:Models",
        "lipflow.commands.models:models",
    ),
    "demo": Command("see it work on handwritten digits, offline", "lipflow.cli:Demo", "lipflow.cli:demo"),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code. What a user can get wrong is answered in one line, with code 2.

    LIPFLOW_DEBUG=1 shows where an error came from.
    """
    words = sys.argv[1:] if words is None else list(words)
    name = words[0] if words else "--help"
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0 if words else 2
    if name in ("-V", "--version"):
        print(f"lipflow {lipflow.__version__}")
        return 0
    try:
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
            raise ValueError(f"there is no command {name!r}; {hint}")
        with _plain_warnings():
            options = parse(name, words[1:])
            keep_freed_memory()
            code = _resolve(COMMANDS[name].function)(options)
            sys.stdout.flush()
            return code
    except BrokenPipeError:  # `lipflow models | head`: whoever read us has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich noticed it first
            return 141
        raise
    except KeyboardInterrupt:
        print("lipflow: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return _answer(error)


def parse(name: str, words: Sequence[str]) -> Any:
    """The arguments of a command, as its dataclass."""
    import tyro

    command = COMMANDS[name]
    default = {"default": _resolve(command.defaults)(words)} if command.defaults else {}
    return tyro.cli(
        _resolve(command.arguments),
        args=list(words),
        prog=f"lipflow {name}",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.PositionalRequiredArgs),
        **default,
    )


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings are for the user here: one line, without the place in our code that they come from."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"lipflow: warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


def _answer(error: Exception) -> int:
    """Say what is wrong, and return the exit code; what is no user's doing is raised as it is."""
    from lipflow.train.signals import EndedEarly

    if os.environ.get("LIPFLOW_DEBUG"):
        traceback.print_exception(error)
    if not isinstance(error, EndedEarly | ValueError | TypeError | OSError):
        raise error
    if not isinstance(error, EndedEarly):
        print(f"lipflow: {error}", file=sys.stderr)
        return 2
    if os.environ.get("RANK", "0") == "0":  # all ranks end together, for one reason
        print(f"lipflow: {error}", file=sys.stderr)
    return error.exit_code


def _resolve(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "lipflow: neural networks that prove their own robustness",
            "",
            "usage: lipflow COMMAND [OPTIONS]        lipflow COMMAND --help        lipflow --version",
            "",
            *lines,
        ]
    )


# lipflow demo: it types commands, so it is here, with their table


@dataclass(frozen=True)
class Demo:
    """On handwritten digits, with the commands that you would type: each is shown, then run."""

    out: Path | None = None
    """The folder of the run (None: runs/demo, or the next one that is free)."""


def demo(arguments: Demo) -> int:
    """Run the commands of the demonstration one after the other; stop at the first that fails."""
    out = arguments.out or next(path for path in _demo_folders() if not path.exists())
    for command in demo_commands(out):
        print(f"\n$ lipflow {shlex.join(command)}", flush=True)
        if code := main(command):
            return code
    return 0


def demo_commands(out: Path) -> list[list[str]]:
    """What a user would type, in order."""
    return [
        ["train", "--model", "cpl-digits", "--data", "digits", "--out", str(out)],
        ["certify", str(out)],
        ["check", str(out)],
        ["attack", str(out)],
        ["report", str(out), "--out", str(out / "report.html")],
    ]


def _demo_folders() -> Iterator[Path]:
    yield Path("runs/demo")
    yield from (Path(f"runs/demo-{number}") for number in itertools.count(2))
