"""Memory kept in the process: freed tensors are reused without faulting their pages in again."""

import subprocess
import sys

import pytest

from lipflow.machine import keep_freed_memory, processor

FAULTS = """
import resource, sys
import torch
from lipflow.machine import keep_freed_memory

if sys.argv[1] == "settled":
    assert keep_freed_memory()
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(12_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    run = subprocess.run([sys.executable, "-c", FAULTS, how], check=True, capture_output=True, text=True)
    return int(run.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_freed_memory_is_reused():
    if not keep_freed_memory():
        pytest.skip("this C library has no mallopt")
    assert faults("settled") < faults("as it is") / 10


def test_elsewhere_nothing_is_done(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False


def test_the_processor_has_a_name(monkeypatch):
    assert processor()
    monkeypatch.setattr("lipflow.machine.Path.read_text", lambda self: "vendor : x\nmodel name\t: A: fine one\n")
    assert processor() == "A: fine one"
