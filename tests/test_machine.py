import subprocess
import sys

import pytest

from lipflow.machine import keep_freed_memory, processor

FAULTS = """
import resource, sys
import torch
from lipflow.machine import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(12_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_keep_freed_memory_avoids_page_faults():
    if not keep_freed_memory():
        pytest.skip("this C library has no mallopt")
    faults = [int(subprocess.check_output([sys.executable, "-c", FAULTS, mode])) for mode in ("keep", "default")]
    assert faults[0] < faults[1] / 10


def test_keep_freed_memory_does_nothing_on_other_systems(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False


def test_processor_has_a_name(monkeypatch):
    assert processor()
    monkeypatch.setattr("lipflow.machine.Path.read_text", lambda self: "vendor : x\nmodel name\t: A: fine one\n")
    assert processor() == "A: fine one"
