"""The package under examples/ uses lipflow from outside: its layers pass the laws, are certified, saved and checked."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "lipflow_layers"


def run(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(FOLDER / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, cwd=FOLDER)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_own_tests_pass():
    assert "6 passed" in run("-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, str(FOLDER / "tests"))


def test_its_network_is_certified_saved_and_checked():
    printed = run("-m", "lipflow_layers")
    assert printed.count("descent") == 2
    assert "check accepts: 300 radii follow from their scores" in printed
    assert "refused: 1 (WrongLayer) computes something else than it was lowered to" in printed
