"""Files that claim more memory than their bytes are worth are refused at once, in one line.

The checker and the loaders run in a process with little memory and time.
"""

import json
import os
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import lipflow
from lipflow.certificate import file as certificate_file
from lipflow.operators import ConvOperator, DenseOperator
from lipflow.operators.certified import certified_operator
from lipflow.primitives import NONLINEARITIES, Affine, Gather, MaxPool, Proximal, Sum, TruncatedExponential
from tests.soundness.forging import certificate, forge, sign
from tests.soundness.graphs import matrix, points, wired

WEIGHTS, CLAIMS, ROWS = certificate_file.WEIGHTS, certificate_file.CLAIMS, certificate_file.ROWS
MEMORY_BYTES, SECONDS = 3 * 2**30, 20  # torch alone maps 2 GB


def run(*words: str, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
    """Run `python …` with little memory and time."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=seconds, preexec_fn=limit, check=False
    )


LOAD = """
import sys, lipflow
for path in sys.argv[1:]:
    try: print("loaded", lipflow.Frozen.load(path))
    except ValueError as error: print(error)
"""


def _honest() -> lipflow.Frozen:
    """Vertices: 0 input, 1 convolution, 2 max_pool, 3 gather, 4 matrix, 5 sum, 6 proximal, 7 series."""
    turn = certified_operator(DenseOperator(torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)))
    kernel = torch.ones(1, 1, 3, 3, dtype=torch.float64) / 9
    return wired(
        (1, 5, 5),
        (Affine(certified_operator(ConvOperator(kernel, (5, 5))), None), (0,)),
        (MaxPool((2, 2), (2, 2), (0, 0), (1, 1)), (1,)),
        (Gather(torch.tensor([0, 3]), [4]), (2,)),
        (matrix(torch.eye(2, dtype=torch.float64)), (3,)),
        (Sum([0.5, 0.5]), (3, 4)),
        (Proximal(turn, None, NONLINEARITIES["relu"], 1.0, 0.5, 5, False), (5,)),
        (TruncatedExponential(turn, 1.0, 5), (6,)),
    )


def _shape(*shape: int) -> Callable:
    def forgery(description: dict, tensors: dict, claims: dict) -> None:
        description["primitives"][0]["shape"] = claims["in_shape"] = list(shape)

    return forgery


def _first(count: int, description: dict, tensors: dict, claims: dict) -> None:
    """Keep the first primitives and vertices, which are numbered alike, and their tensors."""
    for listed in (*(description[name] for name in ("vertices", "names", "primitives")), claims["vertices"]):
        del listed[count:]
    del claims["primitives"][count:]
    text = json.dumps(description["primitives"])
    for name in [name for name in tensors if f'"{name}"' not in text]:
        del tensors[name]


def _input_alone(*shape: int) -> Callable:
    def forgery(description: dict, tensors: dict, claims: dict) -> None:
        _shape(*shape)(description, tensors, claims)
        _first(1, description, tensors, claims)

    return forgery


def _convolution(size: list[int], torus: list, **geometry: object) -> Callable:
    """The convolution of an image of this size, with a claimed torus."""

    def forgery(description: dict, tensors: dict, claims: dict) -> None:
        _shape(1, *size)(description, tensors, claims)
        description["primitives"][1]["op"]["geometry"].update(in_size=size, **geometry)
        claims["primitives"][1].update(norm=2.0, torus=torus)

    return forgery


def _of(place: int, **values: object) -> Callable:
    return lambda description, tensors, claims: description["primitives"][place].update(values)


def _classes(description: dict, tensors: dict, claims: dict) -> None:
    tensors[description["primitives"][4]["op"]["weight"]] = np.zeros((2**16, 2))
    _first(5, description, tensors, claims)
    claims.update(classes=2**16)


FORGED: dict[str, Callable] = {
    "a long input": _input_alone(2**30),
    "a large input": _input_alone(2**9, 2**9, 2**10),
    "an input of many axes": _input_alone(*[2**30] * 10**5),
    "sizes of a gather": _of(3, sizes=[2**30]),
    "a large image": _convolution([2**14, 2**14], [[2**14 + 1, 0], [2**14 + 1, 0]]),
    "a wide image, exact": _convolution([4, 2**20], [[0, 0], [0, 0]]),
    "a high image, exact": _convolution([2**20, 2**5], [[0, 0], [0, 0]]),
    "a high image, exact in its rows": _convolution([2**24, 4], [[0, 0], [5, 0]]),
    "a large torus": _convolution([5, 5], [[2**28, 0], [2**28, 0]]),
    "a high torus": _convolution([5, 5], [[2**28, 0], [6, 0]]),
    "a wide torus, exact in its rows": _convolution([5, 5], [[0, 0], [2**28, 0]]),
    "much padding": _convolution([5, 5], [[2**28, 0], [2**28, 0]], padding=[[2**30, 0], [0, 0]]),
    "a circular image of one row": _convolution([1, 2**24], [[1, 0], [2**24, 0]], padding_mode="circular"),
    "a far tap": _convolution([1, 1], [[0, 0], [0, 0]], padding=[[2**25, 2**25]] * 2, dilation=[2**25] * 2),
    "a large window": _of(2, stride=[3, 3], kernel=[2**30, 2**30], padding=[2**29, 2**29]),
    "many classes": _classes,
}


@pytest.fixture
def folder(tmp_path) -> Path:
    frozen = _honest()
    certificate(tmp_path, frozen, points(frozen, 3))
    return tmp_path


def refused(folder: Path, *words: str) -> None:
    """The checker rejects, and says one of the words."""
    done = run("-m", "lipflow.check", str(folder))
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("rejected: ")
    assert done.stdout.count("\n") == 1
    assert not words or any(word in done.stdout for word in words), done.stdout


def test_an_honest_certificate_is_accepted_with_little_memory_and_time(folder):
    assert run("-m", "lipflow.check", str(folder)).stdout.startswith("accepted: ")


@pytest.mark.parametrize("name", FORGED)
def test_the_checker_refuses_large_claims(name, folder):
    forge(folder, _honest(), FORGED[name])
    refused(folder, "limit", "needs a side", "for each pair of classes")


NOT_LOADED = ("a large torus", "a high torus", "a wide torus, exact in its rows")  # tori are not in the network
NOT_LOADED += ("a large window",)  # torch does not copy windows


def test_load_refuses_large_claims(tmp_path):
    """All in one process, which imports torch once."""
    honest, names = _honest(), [name for name in FORGED if name not in NOT_LOADED]
    paths = [tmp_path / f"{i}" for i in range(len(names))]
    for path, name in zip(paths, names, strict=True):
        certificate(path, honest, points(honest, 1))
        forge(path, honest, FORGED[name])
    done = run("-c", LOAD, *(str(path / WEIGHTS) for path in paths), seconds=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(" ")[0] for line in lines] == [str(path / WEIGHTS) for path in paths]


# Files that are not what their name says


def _link(target: str) -> Callable[[Path], object]:
    return lambda path: (path.unlink(), path.symlink_to(target))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _sparse(path: Path) -> None:
    os.truncate(path, 2**30)


def _columns(
    version: tuple[int, int], descr: str, shape: tuple[int, ...], compression: int = 0
) -> Callable[[Path], None]:
    """An archive whose columns have this header, and 10 MB of zeros each."""

    def forgery(path: Path) -> None:
        header = repr(dict(descr=descr, fortran_order=False, shape=shape)).encode().ljust(118) + b"\n"
        length = len(header).to_bytes(2 if version == (1, 0) else 4, "little")
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name in certificate_file.COLUMNS:
                archive.writestr(f"{name}.npy", b"\x93NUMPY" + bytes(version) + length + header + bytes(10**7))
        sign(path.parent)

    return forgery


def _overlapping(path: Path) -> None:
    """Many tensors of the same bytes."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header |= {f"x{i}": header["t0"] for i in range(1000)}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    sign(path.parent)


NO_FILE = {"a pipe": _pipe, "a device": _link("/dev/zero"), "a folder": _link("/tmp")}
FILES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    **{
        f"{kind}, {name}": (name, change, "not a regular file")
        for name in (WEIGHTS, CLAIMS, ROWS)
        for kind, change in NO_FILE.items()
    },
    "long claims": (CLAIMS, _sparse, "above the limit"),
    "a long header": (WEIGHTS, lambda path: (path.write_bytes(b"\xff" * 8), sign(path.parent)), "limit"),
    "tensors that overlap": (WEIGHTS, _overlapping, "overlap"),
    "compressed columns": (ROWS, _columns((1, 0), "<f8", (10**6,), zipfile.ZIP_DEFLATED), "compressed"),
    "columns of another version": (ROWS, _columns((2, 0), "<f8", (10**6,)), "version 1.0"),
    "columns that are larger than the file": (ROWS, _columns((1, 0), "<f8", (10**8,)), "is not in a file of that size"),
    "columns of objects": (ROWS, _columns((1, 0), "|O", (1,)), "is not in a file of that size"),
}


@pytest.mark.parametrize("name", FILES)
def test_the_checker_and_the_readers_refuse_files_that_would_not_end(name, folder):
    file, change, words = FILES[name]
    change(folder / file)
    refused(folder, words)
    loads = lipflow.Frozen.load if file == WEIGHTS else certificate_file.load
    with pytest.raises(ValueError, match=file) as caught:
        loads(folder / file if file == WEIGHTS else folder)
    assert "\n" not in str(caught.value)
