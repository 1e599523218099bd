"""The package in examples/: its tests pass, and its network is certified, saved and checked."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "lipflow_layers"


def run(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(FOLDER / "src")}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, cwd=FOLDER)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_tests_of_the_package_pass():
    assert "5 passed" in run("-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, str(FOLDER / "tests"))


def test_program_of_the_package_certifies_and_checks():
    printed = run("-m", "lipflow_layers")
    assert printed.count("descent") == 2
    assert "check accepts: 300 radii follow from their scores" in printed
    assert "refused: 1 (WrongLayer) computes something else than it was lowered to" in printed
