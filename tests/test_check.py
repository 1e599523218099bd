"""The independent checker accepts true certificates and rejects all others, with NumPy alone."""

import io
import json
import math
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import lipflow
from lipflow import blocks, check
from lipflow.certificate import file as certificate_file
from lipflow.operators import ConvOperator, DenseOperator
from lipflow.operators.fourier import phases
from lipflow.primitives import Householder
from lipflow.primitives.series import is_skew
from tests import contract
from tests.contract import FREEZABLE
from tests.operators.geometry import matrix_of
from tests.soundness import graphs
from tests.soundness.forging import (
    bytes_of,
    certificate,
    change_rows,
    changed,
    claims_of,
    forge,
    lowered,
    rejected,
    sign,
)

WEIGHTS, CLAIMS, ROWS = certificate_file.WEIGHTS, certificate_file.CLAIMS, certificate_file.ROWS


def _user_network() -> nn.Module:
    return nn.Sequential(
        blocks.Normalize(0.5, 0.25),
        nn.Conv2d(1, 4, 3, padding=1),
        blocks.MaxMin(),
        nn.MaxPool2d(3, stride=2, padding=1),
        lipflow.cpl_conv(4, 8, stride=2, padding=1),
        blocks.Householder(4),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def _reflection() -> nn.Module:
    """An orthogonal matrix: μI - WWᵀ is nothing but rounding, so the slack of μ must cover it."""
    v = nn.functional.normalize(torch.randn(1600, dtype=torch.float64), dim=0)
    layer = nn.Linear(1600, 1600, bias=False, dtype=torch.float64)
    layer.weight = nn.Parameter(torch.eye(1600, dtype=torch.float64) - 2 * v[:, None] * v)
    return nn.Sequential(layer, blocks.Truncate(2))


def _of_layer(name: str) -> lipflow.Frozen:
    layer = contract.make(name, trained=True)
    return lipflow.freeze(nn.Sequential(layer, nn.Flatten()), contract.LAYERS[name].shape)


CERTIFIED: dict[str, Callable[[], lipflow.Frozen]] = {
    "digits": lambda: lipflow.freeze(lipflow.build("cpl-digits")),
    "lln": lambda: lipflow.freeze(lipflow.build("cpl-digits", lln=True, h=None)),
    "relaxed": lambda: lipflow.freeze(lipflow.build("cpl-digits", h=1.9, std=0.5)),
    "identity": lambda: lipflow.freeze(nn.Identity(), (10,)),
    "a user's network": lambda: lipflow.freeze(_user_network(), (1, 8, 8)),
    "a wide orthogonal matrix": lambda: lipflow.freeze(_reflection(), (1600,)),
    **{f"branches, {name}": lambda name=name: lipflow.freeze(*graphs.module(name)) for name in graphs.MODULES},
    **{f"branches, {seed}": lambda seed=seed: lipflow.freeze(*graphs.module(seed)) for seed in range(12)},
    **{f"random graph, {seed}": partial(graphs.random_graph, seed) for seed in range(16, 40)},
}
LEDGERS: dict[str, Callable[[], lipflow.Frozen]] = {
    **{name: partial(_of_layer, name) for name in FREEZABLE},
    # In a tiny domain, reaches are errors, of which the checker counts half.
    **{f"random graph, {s}": partial(graphs.random_graph, s, domain=graphs.DOMAINS[s % 7]) for s in range(16)},
    "a long direction": lambda: graphs.chain((2,), Householder(torch.ones(1).double(), torch.ones(1).double())),
}


def _certify(folder, frozen, count=5):
    images = bytes_of(frozen, count) if frozen.domain == (0.0, 1.0) else graphs.points(frozen, count)
    return certificate(folder, frozen, images)


@pytest.mark.parametrize("name", CERTIFIED)
def test_true_certificates_are_accepted(name, tmp_path):
    _certify(tmp_path, CERTIFIED[name]())
    assert not rejected(tmp_path)


@pytest.mark.parametrize("name", LEDGERS)
def test_true_ledgers_are_accepted_and_no_number_can_be_lowered(name, tmp_path):
    """For every kind of layer and for random graphs."""
    _certify(tmp_path, LEDGERS[name]())
    assert not rejected(tmp_path)
    tried = 0
    for path, claims in lowered(claims_of(tmp_path)):
        sign(tmp_path, claims)
        assert rejected(tmp_path, sample=0), path
        tried += 1
    assert tried >= 5


@pytest.mark.parametrize(
    "domain", [(-1.0, 1.0), (0.0, 255.0), (-2.5, -0.5), (0.1, 0.1 + 2.0**-30), (-1e30, 1.0)], ids=str
)
def test_certificates_hold_for_their_domain_and_for_no_larger_one(domain, tmp_path):
    frozen = lipflow.freeze(nn.Sequential(lipflow.cpl_dense(4, 5), nn.Linear(4, 3)), (4,), domain)
    certificate(tmp_path, frozen, graphs.points(frozen, 6))
    assert not rejected(tmp_path)
    low, high = domain
    larger = dict(domain=[low - 4 * (high - low), high])
    forge(tmp_path, frozen, lambda description, tensors, claims: (description.update(larger), claims.update(larger)))
    assert "too low" in rejected(tmp_path)


# Parts of the checker by themselves


@pytest.mark.parametrize("dilation", [3, 2**31, 2**45 + 1, 2**62 - 1])
def test_phases_of_far_taps_are_exact_in_both_programs(dilation):
    """Integers of 64 bits would wrap around, and give the symbol of another frequency."""
    side, kernel = 2**28 + 3, np.array([0.0, 1.0]).reshape(1, 1, 2, 1)
    found = check.symbols_of(kernel, [dict(dilation=dilation), dict(dilation=1)], [(side, 1, 1), (4, 1, 1)], (1, 0))
    cosine, sine = phases((2, 1), (dilation, 1), (side, 4), (torch.arange(6), torch.arange(4)), (1, 0))
    for f, symbol in zip(range(6), found, strict=False):
        angle = 2 * math.pi * float(Fraction((2 * f + 1) * dilation % (2 * side), 2 * side))
        expected = [math.cos(angle), math.sin(angle)]
        assert symbol[0, :, 0] == pytest.approx(expected, rel=0, abs=1e-14)
        assert [float(cosine[1, f, 0]), float(sine[1, f, 0])] == pytest.approx(expected, rel=0, abs=1e-14)


_K = torch.randn(2, 2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
_SKEW = _K - _K.transpose(0, 1).flip(2, 3)
SKEW: dict[str, tuple[DenseOperator | ConvOperator, bool]] = {
    "matrix": (DenseOperator(_SKEW[:, :, 1, 1]), True),
    "another matrix": (DenseOperator(_K[:, :, 1, 1]), False),
    "wide matrix": (DenseOperator(torch.zeros(1, 2)), False),
    "convolution": (ConvOperator(_SKEW, (3, 4)), True),
    "circular": (ConvOperator(_SKEW, (3, 4), padding_mode="circular"), True),
    "groups": (ConvOperator(torch.cat([_SKEW, 2 * _SKEW]), (3, 4), groups=2), True),
    "groups, only turned": (ConvOperator(torch.cat([_K - _K.flip(2, 3)] * 2), (3, 4), groups=2), False),
    "stride": (ConvOperator(_SKEW, (3, 4), stride=2), False),
    "uneven padding": (ConvOperator(_SKEW, (3, 4), ((1, 1), (2, 0))), False),
    "no padding": (ConvOperator(_SKEW, (3, 4), 0), False),
}


@pytest.mark.parametrize("name", SKEW)
def test_both_programs_take_only_skew_maps_for_skew(name):
    op, skew = SKEW[name]
    held = check.Linear(op.weight.numpy(), op.geometry if isinstance(op, ConvOperator) else None)
    assert held.skew() == is_skew(op) == skew
    assert not skew or torch.equal(matrix_of(op), -matrix_of(op).T)


def test_the_slack_of_a_long_band_grows_with_the_root_of_its_length():
    """2000 strips of 16 rows."""
    diagonal, below = np.broadcast_to(np.eye(16), (1, 2000, 16, 16)), np.zeros((1, 1999, 16, 16))
    check.verify_band(diagonal, below, Fraction(0), 1 + Fraction(1, 2**36), "it")
    with pytest.raises(check.Rejected, match="it: the claimed norm is below the true one"):
        check.verify_band(diagonal, below, Fraction(0), 1 - Fraction(1, 2**36), "it")


def test_sizes_are_integers_and_steps_are_floats():
    """A width of 4.0 would make errors rounded floats. A step of 2⁵³ + 3 is rounded by the program, and not in L."""
    operator = dict(kind="fourier", adjoint=False, geometry=dict(in_size=[4, 4]), real="re", imaginary="im")
    step = dict(kind="descent", op=operator, bias=None, sigma="relu", h=2.0**53 + 4, follows=False)
    assert check.matches(step, check.PRIMITIVE)
    assert not check.matches(dict(step, h=2**53 + 3), check.PRIMITIVE)
    assert not check.matches(dict(operator, geometry=dict(in_size=[4, 4.0])), check.OPERATOR)


# Changed files: without a new digest every change is noticed; with one, the false claim is


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("good")
    _certify(folder, lipflow.freeze(lipflow.build("cpl-digits", lln=True)), 40)
    return folder


@pytest.fixture
def copied(good, tmp_path):
    shutil.copytree(good, tmp_path / "copy")
    return tmp_path / "copy"


def test_main_returns_0_for_true_certificates_and_says_why_others_are_rejected(good, tmp_path, capsys):
    for arguments, code, words in (
        (
            [str(good)],
            0,
            "accepted: 40 radii follow from their scores; the scores of 32 of 40 images were recomputed (--",
        ),
        ([str(good), "--full"], 0, "the scores of 40 of 40 images were recomputed; L = "),
        ([str(good)], 0, "; the true labels, and so the accuracy, are not verified\n"),
        ([str(tmp_path)], 1, "certificate.json is missing"),
        ([str(good / CLAIMS)], 1, "cannot be read: NotADirectoryError"),
        ([], 2, "python -m lipflow.check FOLDER"),
    ):
        assert check.main(arguments) == code
        assert words in capsys.readouterr().out


def test_the_checker_runs_without_torch(good):
    code = (
        "import runpy, sys\n"
        "for name in ('torch', 'safetensors', 'rich', 'tyro', 'matplotlib'): sys.modules[name] = None\n"
        "sys.argv = ['check', sys.argv[1], '--full']\n"
        "runpy.run_module('lipflow.check', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(good)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("accepted: 40 radii")


def _paths(value, path=()):
    """The paths of all numbers and strings in a JSON value."""
    if not isinstance(value, dict | list):
        return [path]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [found for key, inner in items for found in _paths(inner, (*path, key))]


def test_every_field_is_under_the_digest(good, copied):
    claims = claims_of(good)
    paths = _paths(claims)
    assert len(paths) > 100
    for path in paths:
        lie = changed(claims, path, lambda v: v * 1.5 + 1 if isinstance(v, int | float) else v + "!")
        (copied / CLAIMS).write_text(json.dumps(lie))
        assert re.search(r"digest|float64|schema", rejected(copied)), path


@pytest.mark.parametrize("name", [WEIGHTS, ROWS])
def test_every_byte_is_under_the_digest(copied, name):
    path = copied / name
    raw = path.read_bytes()
    flips = [raw[:i] + bytes([raw[i] ^ 1]) + raw[i + 1 :] for i in (0, len(raw) // 3, len(raw) // 2, len(raw) - 1)]
    for content in (*flips, raw[:-1]):
        path.write_bytes(content)
        assert f"{name} was changed" in rejected(copied)
    path.unlink()
    assert "is missing" in rejected(copied)


def test_a_norm_claimed_too_high_is_rejected_with_the_radii(copied):
    """It is a true bound, but h·B² > 2, so the layer may expand."""
    claims = claims_of(copied)
    next(p for p in claims["primitives"] if p["kind"] == "descent")["norm"] *= 1.01
    sign(copied, claims)
    assert rejected(copied)


def test_smaller_radii_are_accepted(copied):
    change_rows(copied, radius=lambda r: r * 0.5)
    assert not rejected(copied)


@pytest.mark.parametrize(
    "changes",
    [
        dict(images=lambda x: 255 - x),
        dict(logits=lambda f: f + 1e-6 * np.arange(10)),
        dict(logits=lambda f: f * 2, radius=lambda r: r * 2, paper_radius=lambda r: r * 2),
    ],
    ids=["other images", "other scores", "raised scores and radii"],
)
def test_scores_that_are_not_those_of_the_images_are_rejected(copied, changes):
    change_rows(copied, **changes)
    assert re.search(r"more than can be derived|not those of this network|greatest score", rejected(copied))


def _at_seven(value):
    """A change of the row of image 7."""
    return lambda column: np.where((np.arange(len(column)) == 7).reshape(-1, *[1] * (column.ndim - 1)), value, column)


OUTSIDE, TOO_LARGE = "outside of [0.0, 1.0]", "more than can be derived"


@pytest.mark.parametrize(
    ("column", "change", "words"),
    [
        ("radius", lambda r: r * (1 + 1e-6), TOO_LARGE),
        ("radius", lambda r: np.where(np.arange(len(r)) == 7, r + 1e-9, r), "image 7: R = "),
        ("radius", lambda r: np.full_like(r, np.nan), "image 0: R = nan is more than can be derived"),
        ("radius", lambda r: np.full_like(r, np.inf), TOO_LARGE),
        ("radius", lambda r: r[:-1], "do not fit the claims"),
        ("radius", lambda r: r.astype(np.float32), "are not float64"),
        ("label", lambda y: (y + 1) % 10, "greatest score"),
        ("label", _at_seven(-1), "greatest score"),
        ("label", lambda y: y * 1.0, "labels are not integers"),
        ("logits", lambda f: f[:, ::-1] * 1.0, "greatest score"),
        ("logits", _at_seven(np.nan), "greatest score"),
        ("logits", _at_seven(np.inf), "greatest score"),
        ("logits", lambda f: f + 0j, "are not float64"),
        ("images", lambda x: _at_seven(np.nan)(x / 255), OUTSIDE),
        ("images", lambda x: _at_seven(np.nextafter(1, 2))(x / 255), OUTSIDE),
        ("images", lambda x: x.astype(complex), "images are neither uint8 nor floats"),
        ("images", lambda x: (x / 255).astype(np.longdouble), "images are neither uint8 nor floats"),
        ("images", lambda x: (x // 255).astype(np.int64), "images are neither uint8 nor floats"),
        ("truth", _at_seven(-7), "one of the classes"),
        ("truth", _at_seven(10), "one of the classes"),
        ("truth", lambda y: y[:-1], "do not fit the claims"),
        ("paper_radius", _at_seven(1e9), "by the paper's rule"),
        ("paper_radius", _at_seven(np.nan), "by the paper's rule"),
        ("paper_radius", lambda r: np.nextafter(r, np.inf), "by the paper's rule"),
        ("paper_radius", lambda r: r[:-1], "do not fit the claims"),
    ],
)
def test_every_row_is_checked_whatever_the_sample(copied, column, change, words):
    """Everything but the scores is verified for every image."""
    change_rows(copied, **{column: change})
    assert words in rejected(copied, sample=0)


def test_forged_scores_are_rejected_if_their_image_is_in_the_sample(copied):
    """Scores, label and radii of image 7 follow from each other, but not from the image."""
    paper = (1e6 / np.delete(np.array(claims_of(copied)["pair_bounds"])[3], 3)).min()
    scores = _at_seven(np.where(np.arange(10) == 3, 1e6, 0.0))
    radii = dict(radius=_at_seven(paper * 0.999), paper_radius=_at_seven(paper))
    change_rows(copied, logits=scores, label=_at_seven(3), **radii)
    drawn = [7 in np.random.default_rng(seed).permutation(40)[:20] for seed in range(4)]
    assert 0 < sum(drawn) < 4
    for seed, found in enumerate(drawn):
        assert ("not those of this network" in rejected(copied, sample=20, seed=seed)) == found
    assert "not those of this network" in rejected(copied)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [0, 3])
def test_floats_of_every_size_are_read(dtype, count, tmp_path):
    certificate(tmp_path, lipflow.freeze(nn.Linear(5, 3), (5,)), torch.rand(count, 5).to(dtype))
    assert check.check(tmp_path, full=True).startswith(f"{count} radii")


@pytest.mark.parametrize("domain", [(-1.0, 0.5), (0.25, 1.0)], ids=str)
def test_bytes_are_rejected_unless_the_domain_contains_0_and_1(domain, tmp_path):
    certificate(tmp_path, lipflow.freeze(nn.Linear(3, 2), (3,), domain), torch.full((2, 3), 0.5, dtype=torch.float64))
    assert not rejected(tmp_path)
    change_rows(tmp_path, images=lambda x: np.full(x.shape, 128, np.uint8))
    assert "outside of" in rejected(tmp_path)


def _of_shape(shape):
    """An .npz file whose header states a shape, without data."""
    header, file = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(header, dict(descr="<f8", fortran_order=False, shape=shape))
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("images.npy", header.getvalue())
    return file.getvalue()


RUBBISH = [b"", b"hello", b"\xff" * 100, b"PK\x03\x04garbage", b"\x93NUMPY\x01\x00"]
RUBBISH += [(100_000).to_bytes(8, "little") + b"[" * 100_000, _of_shape((2**60,)), _of_shape((2**70,))]
NO_CLAIMS = [b"", b"{}", b"[1]", b"[" * 100_000, b'{"digest": ' * 100_000, b"\x00", b"1", b"NaN", b'"' * 3]


@pytest.mark.parametrize(
    ("name", "content"),
    [*((name, content) for name in (WEIGHTS, ROWS) for content in RUBBISH), *((CLAIMS, text) for text in NO_CLAIMS)],
    ids=[*(f"{name}-{i}" for name in (WEIGHTS, ROWS) for i in range(len(RUBBISH))), *map(str, range(len(NO_CLAIMS)))],
)
def test_damaged_files_are_rejected_in_one_line(copied, name, content, capsys):
    claims = claims_of(copied)
    (copied / name).write_bytes(content)
    if name != CLAIMS:
        sign(copied, claims)
    assert check.main([str(copied)]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("rejected: ")
    assert printed.count("\n") == 1


@pytest.mark.parametrize("value", ["1e999999999", "2", None, [2.0], {}])
@pytest.mark.parametrize(
    "path", [("lipschitz",), ("rounding",), ("vertices", 2, "reach"), ("primitives", "descent", "norm"), ("domain", 1)]
)
def test_only_numbers_are_numbers(copied, path, value):
    """A string of a number with 10⁹ digits is not converted."""
    claims = claims_of(copied)
    kinds = [p["kind"] for p in claims["primitives"]]
    path = tuple(kinds.index(key) if key == "descent" else key for key in path)
    sign(copied, changed(claims, path, lambda _: value))
    assert re.search(r"is not a number|domains do not agree", rejected(copied))


@pytest.mark.parametrize("other", ["../good", "/dev/zero", "more"])
def test_no_other_file_is_read(copied, other):
    stated = claims_of(copied)
    stated.pop("digest")
    stated["files"][other] = "0" * 64
    (copied / CLAIMS).write_text(json.dumps(dict(stated, digest=certificate_file.digest(stated))))
    assert "list of files" in rejected(copied)


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (dict(schema=3), "schema 2, not 3"),
        (dict(schema=1), "schema 2, not 1: certify the network again"),
        (dict(dtype="float32"), "float64 only"),
        (dict(norm="Linf"), "L2 norm only"),
        (dict(domain=[0, 2]), "domains do not agree"),
        (dict(in_shape=[1, 8, 9]), "shapes do not agree"),
        (dict(classes=9), "10 classes"),
        (dict(primitives=[]), "does not list every primitive"),
        (dict(vertices=[]), "does not list every vertex"),
    ],
    ids=str,
)
def test_a_false_header_is_rejected(copied, lie, words):
    sign(copied, claims_of(copied) | lie)
    assert words in rejected(copied)


def test_a_network_of_another_schema_is_rejected(tmp_path):
    frozen = lipflow.freeze(nn.Linear(3, 2), (3,))
    _certify(tmp_path, frozen)
    forge(tmp_path, frozen, lambda description, tensors, claims: description.update(schema=1))
    assert "networks of schema 2, not 1" in rejected(tmp_path)
