"""The command line.

The module of a command, such as `lipflow.commands.train`, has a frozen dataclass of its arguments, `Train`, and a
function of them that returns the exit code, `train`. The module is imported when its command is typed, and torch when
the function runs, so that help answers at once.
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
from types import ModuleType
from typing import Any

import lipflow
from lipflow.machine import keep_freed_memory

COMMANDS = {  # with a line of help
    "train": "train a network by its published recipe, or resume",
    "certify": "freeze a trained network and certify images with it",
    "check": "verify a certificate, with NumPy alone",
    "attack": "attack the certified network with L2-PGD",
    "report": "compare runs on one page that opens offline",
    "data": "download a dataset and print its splits",
    "models": "list the networks, their parameters and layers",
    "demo": "run these commands on handwritten digits, offline",
}


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. For a user's mistake, print one line and return 2.

    LIPFLOW_DEBUG=1 shows where an error was raised.
    """
    words = sys.argv[1:] if words is None else list(words)
    name = words[0] if words else "--help"
    if name == "help" and len(words) == 2 and words[1] in COMMANDS:
        return main([words[1], "--help"])
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
        with _one_line_warnings():
            arguments = parse(name, words[1:])
            keep_freed_memory()
            code = getattr(_module(name), name)(arguments)
            sys.stdout.flush()
            return code
    except BrokenPipeError:  # the program that reads our output has ended, as in `lipflow models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich caught it and raised SystemExit
            return 141
        raise
    except KeyboardInterrupt:
        print("lipflow: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return _print_error(error)


def parse(name: str, words: Sequence[str]) -> Any:
    """Parse the arguments of a command into its dataclass."""
    import tyro

    module = _module(name)
    default = {"default": module.defaults(words)} if name == "train" else {}  # defaults that depend on other flags
    return tyro.cli(
        getattr(module, name.capitalize()),
        args=list(words),
        prog=f"lipflow {name}",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.PositionalRequiredArgs),
        **default,
    )


def _module(name: str) -> ModuleType:
    return importlib.import_module("lipflow.cli" if name == "demo" else f"lipflow.commands.{name}")


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Print warnings in one line, without the source line that raised them."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"lipflow: warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


def _print_error(error: Exception) -> int:
    """Print an error and return its exit code; raise it if neither the user nor the machine caused it."""
    from lipflow.train.signals import EndedEarly

    if os.environ.get("LIPFLOW_DEBUG"):
        traceback.print_exception(error)
    if not isinstance(error, EndedEarly | ValueError | TypeError | OSError):
        raise error
    early = isinstance(error, EndedEarly)
    if not early or os.environ.get("RANK", "0") == "0":  # all ranks end early together, for one reason
        print(f"lipflow: {error}", file=sys.stderr)
    return error.exit_code if early else 2


def _help() -> str:
    lines = "\n".join(f"  {name:<8} {summary}" for name, summary in COMMANDS.items())
    return f"""lipflow: neural networks that prove their own robustness

usage: lipflow COMMAND [OPTIONS]        lipflow COMMAND --help        lipflow --version

{lines}"""


# The command `demo` is here because it runs the other commands.


@dataclass(frozen=True)
class Demo:
    """Train, certify, check, attack and report on handwritten digits; each command is printed, then run."""

    out: Path | None = None
    """The folder of the run (None: runs/demo, or runs/demo-2 and so on if that exists)."""


def demo(arguments: Demo) -> int:
    """Run the commands of the demonstration one after the other; stop at the first that fails."""
    folders = (Path(f"runs/demo-{number}" if number > 1 else "runs/demo") for number in itertools.count(1))
    for command in demo_commands(arguments.out or next(path for path in folders if not path.exists())):
        print(f"\n$ lipflow {shlex.join(command)}", flush=True)
        if code := main(command):
            return code
    return 0


def demo_commands(out: Path) -> list[list[str]]:
    """Return the commands as a user would type them."""
    return [
        ["train", "--model", "cpl-digits", "--data", "digits", "--out", str(out)],
        ["certify", str(out)],
        ["check", str(out)],
        ["attack", str(out)],
        ["report", str(out), "--out", str(out / "report.html")],
    ]
