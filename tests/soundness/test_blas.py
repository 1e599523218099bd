"""A certificate that one machine writes is loaded and accepted on another one, whose BLAS rounds differently.

A setting that the processor does not know has no effect, so each test also asserts that some norm changes.
"""

import json
from pathlib import Path

import pytest

from tests.processes import finish, start
from tests.soundness import blas

# MKL is the BLAS of torch, OpenBLAS that of NumPy.
SETTINGS = [
    dict(MKL_CBWR="COMPATIBLE"),
    dict(MKL_CBWR="AVX2"),
    dict(MKL_ENABLE_INSTRUCTIONS="SSE4_2"),
    dict(OPENBLAS_CORETYPE="Prescott"),
    dict(OPENBLAS_CORETYPE="Haswell"),
    dict(OPENBLAS_CORETYPE="SkylakeX"),
    dict(OPENBLAS_NUM_THREADS="2"),
    dict(OMP_NUM_THREADS="2"),
    dict(MKL_CBWR="COMPATIBLE", OPENBLAS_CORETYPE="Prescott"),
]


def _there_and_back(folder: Path, setting: dict[str, str], seeds: int) -> tuple[bool, dict[str, str]]:
    """Whether norms differ under a setting; and what is refused: there of ours, and here of theirs."""
    theirs = folder / "-".join(setting.values())
    words = "-m", "tests.soundness.blas", str(theirs), str(folder / "ours"), str(seeds)
    found = json.loads(finish(start(*words, settings=setting)).splitlines()[-1])
    here = {f"{name}, written there": why for name, why in blas.read(theirs).items()}
    return found["norms"] != json.loads((folder / "norms.json").read_text()), {**found["refused"], **here}


def _write_ours(folder: Path, seeds: int) -> None:
    (folder / "norms.json").write_text(json.dumps(blas.write(folder / "ours", seeds)))


def test_certificates_are_accepted_under_another_blas(tmp_path):
    _write_ours(tmp_path, seeds=5)
    differs, refused = _there_and_back(tmp_path, SETTINGS[-1], seeds=5)
    assert not refused
    assert differs


@pytest.mark.campaign
def test_many_certificates_are_accepted_under_every_blas_setting(tmp_path):
    _write_ours(tmp_path, seeds=40)
    effect = {}
    for setting in SETTINGS:
        differs, refused = _there_and_back(tmp_path, setting, seeds=40)
        effect[" ".join(f"{name}={value}" for name, value in setting.items())] = differs
        assert not refused, setting
    count = len(list((tmp_path / "ours").iterdir()))
    print(f"\n{count} networks, written and read under {len(SETTINGS)} settings; norms that differ: {effect}")
    assert sum(effect.values()) >= 3, effect
