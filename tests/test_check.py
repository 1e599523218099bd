"""The independent checker: it accepts what is true, and nothing else; with NumPy alone."""

import io
import json
import math
import re
import shutil
import subprocess
import sys
import zipfile
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import lipflow
from lipflow import blocks, check
from lipflow.certificate import file as certificate_file
from lipflow.graph.file import describe
from lipflow.operators.fourier import phases
from tests import contract
from tests.contract import FREEZABLE
from tests.soundness import exact, graphs
from tests.soundness.forging import bytes_of, certificate, forge, rejected
from tests.soundness.forging import claims_of as _claims
from tests.soundness.forging import sign as _sign

NETWORKS = {  # and the shapes of their inputs
    "digits": (lambda: lipflow.build("cpl-digits"), None),
    "lln": (lambda: lipflow.build("cpl-digits", lln=True, h=None), None),
    "relaxed": (lambda: lipflow.build("cpl-digits", h=1.9, std=0.5), None),
    "nothing": (nn.Identity, (10,)),
    "a user's": (
        lambda: nn.Sequential(
            blocks.Normalize(0.5, 0.25),
            nn.Conv2d(1, 4, 3, padding=1),
            blocks.MaxMin(),
            nn.MaxPool2d(3, stride=2, padding=1),
            lipflow.cpl_conv(4, 8, stride=2, padding=1),
            blocks.Householder(4),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 5),
        ),
        (1, 8, 8),
    ),
}


def _certificate(folder, model, in_shape=None, count=40):
    frozen = lipflow.freeze(model, in_shape=in_shape)
    return certificate(folder, frozen, bytes_of(frozen, count))


@pytest.mark.parametrize("name", NETWORKS)
def test_accepts(name, tmp_path):
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    _certificate(tmp_path, make(), shape)
    said = check.check(tmp_path, full=True)
    assert said.startswith("40 radii follow from their scores; the scores of 40 of 40 images were recomputed; L = ")
    assert "32 of 40 images were recomputed (--full recomputes all)" in check.check(tmp_path)
    _rows(tmp_path, radius=lambda r: r * 0.5)  # a radius may be smaller than what can be derived
    _sign(tmp_path, _claims(tmp_path))
    check.check(tmp_path)


@pytest.mark.parametrize("name", FREEZABLE)
def test_accepts_every_kind_of_layer(name, tmp_path):
    shape = contract.LAYERS[name].shape
    _certificate(tmp_path, nn.Sequential(contract.make(name, trained=True), nn.Flatten()), shape, count=5)
    check.check(tmp_path, full=True)


def test_accepts_a_wide_orthogonal_matrix(tmp_path):
    """Its Cholesky factor is small, as all that is left of μI - WWᵀ is rounding: the checker's μ must know that."""
    torch.manual_seed(0)
    v = nn.functional.normalize(torch.randn(1600, dtype=torch.float64), dim=0)
    layer = nn.Linear(1600, 1600, bias=False, dtype=torch.float64)
    layer.weight = nn.Parameter(torch.eye(1600, dtype=torch.float64) - 2 * v[:, None] * v)
    _certificate(tmp_path, nn.Sequential(layer, blocks.Truncate(2)), (1600,), count=2)
    check.check(tmp_path)


@pytest.mark.parametrize("dilation", [3, 2**31, 2**45 + 1, 2**62 - 1])
def test_phases_of_far_taps_are_exact_in_both_programs(dilation):
    """Integers of 64 bits would wrap around, and a symbol be read at another frequency than its own."""
    side, kernel = 2**28 + 3, np.array([0.0, 1.0]).reshape(1, 1, 2, 1)
    found = check.symbols_of(kernel, [dict(dilation=dilation), dict(dilation=1)], [(side, 1, 1), (4, 1, 1)], (1, 0))
    cosine, sine = phases((2, 1), (dilation, 1), (side, 4), (torch.arange(6), torch.arange(4)), (1, 0))
    for f, symbol in zip(range(6), found, strict=False):
        angle = 2 * math.pi * float(Fraction((2 * f + 1) * dilation % (2 * side), 2 * side))
        expected = [math.cos(angle), math.sin(angle)]
        assert symbol[0, :, 0] == pytest.approx(expected, rel=0, abs=1e-14)
        assert [float(cosine[1, f, 0]), float(sine[1, f, 0])] == pytest.approx(expected, rel=0, abs=1e-14)


@pytest.mark.parametrize(
    "torus", [[[2**29, 0], [10, 0]], [[10, 0], [10, 1.0]], [[0, 0.0], [10, 1]], [[10, True], [10, 0]]]
)
def test_sides_and_twists_are_whole_numbers_of_a_size(torus):
    geometry = dict(
        in_size=[8, 8], padding=[[1, 1], [1, 1]], padding_mode="zeros", stride=[1, 1], dilation=[1, 1], groups=1
    )
    w = check.Linear(np.ones((1, 1, 3, 3)), geometry)
    check.verify_norm(w, dict(norm=9.5, torus=[[10, 0], [10, 1]]), "it")
    with pytest.raises(check.Rejected, match="no torus has sides"):
        check.verify_norm(w, dict(norm=9.5, torus=torus), "it")


# Graphs, domains and heads


@pytest.mark.parametrize("name", [*graphs.MODULES, *range(12)])
def test_accepts_modules_with_branches(name, tmp_path):
    module, shape = graphs.module(name)
    _certificate(tmp_path, module, shape, count=5)
    check.check(tmp_path, full=True)


@pytest.mark.parametrize("seed", range(40))
def test_accepts_graphs_that_no_lowering_makes(seed, tmp_path):
    frozen = graphs.random_graph(seed)
    certificate(tmp_path, frozen, graphs.points(frozen, 4))
    check.check(tmp_path, full=True)


HEADS = {
    "linear": lambda: nn.Linear(6, 3),
    "two matrices": lambda: nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 3)),
    "truncated": lambda: blocks.Truncate(3),
    "unit rows": lambda: blocks.LastLayerNormalization(6, 3),
    "two classes": lambda: nn.Linear(6, 2),
    "a sum of two": lambda: graphs.Of(lambda x, f, g: f(x) - 0.3 * g(x.flip(1)), nn.Linear(6, 3), nn.Linear(6, 3)),
}


@pytest.mark.parametrize("mirrored", [False, True], ids=["plain", "mirrored"])
@pytest.mark.parametrize("head", HEADS)
def test_accepts_heads_and_lowers_none_of_their_pairs(head, mirrored, tmp_path):
    torch.manual_seed(0)
    body = [lipflow.cpl_conv(1, 3), nn.Flatten()]
    _certificate(
        tmp_path, nn.Sequential(*([blocks.FlipAverage(*body)] if mirrored else body), HEADS[head]()), (1, 2, 3), 5
    )
    check.check(tmp_path, full=True)
    claims = _claims(tmp_path)
    _lower(claims, ("pair_bounds", 0, 1), 1 - 1e-8)
    _sign(tmp_path, claims)
    with pytest.raises(check.Rejected, match="pair bound"):
        check.check(tmp_path)


@pytest.mark.parametrize(
    "domain", [(-1.0, 1.0), (0.0, 255.0), (-2.5, -0.5), (0.1, 0.1 + 2.0**-30), (-1e30, 1.0)], ids=str
)
def test_accepts_other_domains(domain, tmp_path):
    """And a certificate for one domain is none for a larger one."""
    torch.manual_seed(0)
    frozen = lipflow.freeze(nn.Sequential(lipflow.cpl_dense(4, 5), nn.Linear(4, 3)), (4,), domain)
    certificate(tmp_path, frozen, graphs.points(frozen, 6))
    check.check(tmp_path, full=True)
    low, high = domain
    larger = [low - 4 * (high - low), high]

    def change(description, tensors, claims):
        description["domain"] = claims["domain"] = larger

    forge(tmp_path, frozen, change)
    assert "too low" in rejected(tmp_path)


def _network(frozen):
    """A network as the checker holds it, and its own constants: (network, L of each vertex, E of each vertex)."""
    description, tensors = describe(frozen.graph, frozen.domain)
    claims = certificate_file.claims(frozen, lipflow.certify(frozen, graphs.points(frozen, 1)), {}, "", "")
    arrays = {name: t.numpy() for name, t in tensors.items()}
    network = check.Network(json.loads(json.dumps(description)), arrays, claims)
    return network, *network.fold(claims["domain"], claims["vertices"])


@pytest.mark.parametrize("seed", range(30))
def test_what_the_checker_runs_is_within_its_own_bounds(seed):
    """Its own program, vertex by vertex, against the exact map."""
    frozen = graphs.random_graph(seed)
    network, _, errors = _network(frozen)
    for x in graphs.points(frozen, 2, seed):
        found, true = network.values(x.numpy()[None]), exact.values(frozen, exact.rational(x))
        for ours, right, error in zip(found, true, errors, strict=True):
            off = exact.square(exact.rational(torch.from_numpy(ours[0].copy())) - right)
            assert exact.fraction(off) <= (error + exact.NEGLIGIBLE) ** 2


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kinds", ["EXACT_ROWS", "LINEAR"])
def test_the_constants_of_the_checker_are_above_the_true_ones(kinds, seed):
    """Of networks that are affine, in rationals: pairs of classes, and L against a column and a row of the matrix."""
    frozen = graphs.random_graph(seed, getattr(graphs, kinds))
    network, constants, _ = _network(frozen)
    bounds, rows = network.pair_bounds(constants), exact.matrix(frozen)
    for i, j in ((0, 1), (0, 2), (2, 1)):
        assert Fraction(bounds[i, j]) ** 2 >= exact.fraction(exact.square(rows[i] - rows[j]))
    assert all(constants[-1] ** 2 >= exact.fraction(exact.square(v)) for v in (*rows, *rows.T))


def test_runs_without_torch(good):
    code = (
        "import sys\n"
        "for name in ('torch', 'safetensors', 'rich', 'tyro', 'matplotlib'): sys.modules[name] = None\n"
        "import runpy\n"
        "sys.argv = ['check', sys.argv[1], '--full']\n"
        "runpy.run_module('lipflow.check', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(good)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("accepted: 40 radii follow from their scores; the scores of 40 of 40")


# Mutations. Without a new digest each is noticed at once; with one, the claim itself is found to be false.


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("good")
    _certificate(folder, lipflow.build("cpl-digits", lln=True))
    return folder


@pytest.fixture
def copied(good, tmp_path):
    shutil.copytree(good, tmp_path / "copy")
    return tmp_path / "copy"


def _rows(folder, **changes):
    with np.load(folder / certificate_file.ROWS) as rows:
        columns = {name: rows[name] for name in rows.files}
    np.savez(folder / certificate_file.ROWS, **{**columns, **{k: f(columns[k].copy()) for k, f in changes.items()}})


def _numbers(value, path=()):
    """The paths of all numbers and strings in a JSON value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _numbers(inner, (*path, index))
    else:
        yield path


def test_every_field_is_under_the_digest(good, copied):
    claims = _claims(good)
    paths = list(_numbers(claims))
    assert len(paths) > 100
    for path in paths:
        changed = _claims(good)
        inner = changed
        for key in path[:-1]:
            inner = inner[key]
        value = inner[path[-1]]
        inner[path[-1]] = value * 1.5 + 1 if isinstance(value, int | float) else value + "!"
        (copied / certificate_file.CLAIMS).write_text(json.dumps(changed))
        with pytest.raises(check.Rejected, match=r"digest|float64|schema"):
            check.check(copied)


@pytest.mark.parametrize("name", [certificate_file.WEIGHTS, certificate_file.ROWS])
def test_every_byte_is_under_the_digest(copied, name):
    path = copied / name
    raw = bytearray(path.read_bytes())
    for position in (0, len(raw) // 3, len(raw) // 2, len(raw) - 1):
        changed = bytearray(raw)
        changed[position] ^= 1
        path.write_bytes(changed)
        with pytest.raises(check.Rejected, match=f"{re.escape(name)} was changed"):
            check.check(copied)
    path.write_bytes(raw[:-1])
    with pytest.raises(check.Rejected, match="was changed"):
        check.check(copied)
    path.unlink()
    with pytest.raises(check.Rejected, match="is missing"):
        check.check(copied)


def _lower(claims, path, factor):
    inner = claims
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] *= factor


def test_a_norm_stated_too_high_costs_the_radii(copied):
    """A looser norm is true, but then h·B² > 2, so the layer may expand and the radii no longer follow."""
    claims = _claims(copied)
    next(p for p in claims["primitives"] if p["kind"] == "descent")["norm"] *= 1.01
    _sign(copied, claims)
    with pytest.raises(check.Rejected):
        check.check(copied)


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
    _rows(copied, **changes)
    _sign(copied, _claims(copied))
    with pytest.raises(check.Rejected, match=r"more than can be derived|not those of this network|label has not"):
        check.check(copied, full=True)


def _at_seven(value):
    """Put a value into the row of image 7."""

    def change(column):
        column[7] = value
        return column

    return change


OUT_OF_THE_BOX = r"outside of \[0.0, 1.0\]"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(radius=lambda r: r * (1 + 1e-6)), "more than can be derived"),
        (dict(radius=lambda r: np.where(np.arange(len(r)) == 7, r + 1e-9, r)), "image 7: R = "),
        (dict(radius=lambda r: np.full_like(r, np.nan)), "image 0: R = nan is more than can be derived"),
        (dict(radius=lambda r: np.full_like(r, np.inf)), "more than can be derived"),
        (dict(radius=lambda r: r[:-1]), "do not fit the claims"),
        (dict(radius=lambda r: r.astype(np.float32)), "scores and radii are float64"),
        (dict(label=lambda y: (y + 1) % 10), "a label has not the greatest score"),
        (dict(label=_at_seven(-1)), "label has not"),
        (dict(label=lambda y: y * 1.0), "labels are integers"),
        (dict(logits=lambda f: f[:, ::-1] * 1.0), "label has not"),
        (dict(logits=_at_seven(np.nan)), "label has not"),
        (dict(logits=_at_seven(np.inf)), "label has not"),
        (dict(logits=lambda f: f + 0j), "scores and radii are float64"),
        (dict(images=lambda x: _at_seven(np.nan)(x / 255)), OUT_OF_THE_BOX),
        (dict(images=lambda x: _at_seven(np.nextafter(1, 2))(x / 255)), OUT_OF_THE_BOX),
        (dict(images=lambda x: x.astype(complex)), "images are bytes or floats"),
        (dict(images=lambda x: (x / 255).astype(np.longdouble)), "images are bytes or floats"),
        (dict(images=lambda x: (x // 255).astype(np.int64)), "images are bytes or floats"),
        (dict(truth=_at_seven(-7)), "a true label is none of the classes"),
        (dict(truth=_at_seven(10)), "a true label is none of the classes"),
        (dict(truth=lambda y: y[:-1]), "do not fit the claims"),
        (dict(paper_radius=_at_seven(1e9)), "by the paper's rule"),
        (dict(paper_radius=_at_seven(np.nan)), "by the paper's rule"),
        (dict(paper_radius=lambda r: np.nextafter(r, np.inf)), "by the paper's rule"),
        (dict(paper_radius=lambda r: r[:-1]), "do not fit the claims"),
    ],
)
def test_every_row_is_checked_whatever_the_sample(copied, changes, words):
    """All but the scores themselves is verified for every image."""
    _rows(copied, **changes)
    _sign(copied, _claims(copied))
    with pytest.raises(check.Rejected, match=words):
        check.check(copied, sample=0)


def _forge_image_seven(folder):
    """Scores, label and radii that follow from each other, but not from the image."""
    scores = np.where(np.arange(10) == 3, 1e6, 0.0)
    bounds = np.array(_claims(folder)["pair_bounds"])
    paper = (1e6 / np.delete(bounds[3], 3)).min()
    _rows(
        folder,
        logits=_at_seven(scores),
        label=_at_seven(3),
        radius=_at_seven(paper * 0.999),
        paper_radius=_at_seven(paper),
    )
    _sign(folder, _claims(folder))


def test_a_sample_says_that_it_is_one(copied):
    """A forged score is found if its image is drawn; if it is not, nobody was told that it was verified."""
    _forge_image_seven(copied)
    drawn = [7 in np.random.default_rng(seed).permutation(40)[:20] for seed in range(4)]
    assert 0 < sum(drawn) < 4
    for seed, found in enumerate(drawn):
        if found:
            with pytest.raises(check.Rejected, match="not those of this network"):
                check.check(copied, sample=20, seed=seed)
        else:
            said = check.check(copied, sample=20, seed=seed)
            assert "the scores of 20 of 40 images were recomputed (--full recomputes all)" in said
    with pytest.raises(check.Rejected, match="not those of this network"):
        check.check(copied, full=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [0, 3])
def test_floats_of_every_size_are_read(dtype, count, tmp_path):
    certificate(tmp_path, lipflow.freeze(nn.Linear(5, 3), (5,)), torch.rand(count, 5).to(dtype))
    assert check.check(tmp_path, full=True).startswith(f"{count} radii")


@pytest.mark.parametrize("domain", [(-1.0, 0.5), (0.25, 1.0)], ids=str)
def test_images_of_bytes_are_in_the_domain(domain, tmp_path):
    certificate(tmp_path, lipflow.freeze(nn.Linear(3, 2), (3,), domain), torch.full((2, 3), 0.5, dtype=torch.float64))
    check.check(tmp_path, full=True)
    _rows(tmp_path, images=lambda x: np.full(x.shape, 128, np.uint8))
    _sign(tmp_path, _claims(tmp_path))
    with pytest.raises(check.Rejected, match="outside of"):
        check.check(tmp_path)


def _of_shape(shape):
    """A file that says it holds an array of a shape, and holds nothing."""
    header, file = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(header, dict(descr="<f8", fortran_order=False, shape=shape))
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("images.npy", header.getvalue())
    return file.getvalue()


RUBBISH = {
    "empty": b"",
    "text": b"hello",
    "ones": b"\xff" * 100,
    "zip": b"PK\x03\x04garbage",
    "numpy": b"\x93NUMPY\x01\x00",
    "deep": (100_000).to_bytes(8, "little") + b"[" * 100_000,
    "more than memory": _of_shape((2**60,)),
    "more than numbers": _of_shape((2**70,)),
}
NO_CLAIMS = ["", "{}", "[1]", "[" * 100_000, '{"digest": ' * 100_000, "\x00", "1", "NaN", '"' * 3]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(
            (name, content)
            for name in (certificate_file.WEIGHTS, certificate_file.ROWS)
            for content in RUBBISH.values()
        ),
        *((certificate_file.CLAIMS, text.encode()) for text in NO_CLAIMS),
    ],
    ids=lambda value: str(value[:12]),
)
def test_a_file_of_rubbish_is_rejected_in_one_line(copied, name, content, capsys):
    (copied / name).write_bytes(content)
    if name != certificate_file.CLAIMS:
        _sign(copied, _claims(copied))
    assert check.main([str(copied)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("rejected: the certificate cannot be read: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("word", ["1e999999999", "2", None, [2.0], {}])
@pytest.mark.parametrize(
    "path", [("lipschitz",), ("rounding",), ("vertices", 2, "reach"), ("primitives", "descent", "norm"), ("domain", 1)]
)
def test_only_numbers_are_numbers(copied, path, word):
    """A word that stands for a number of 10⁹ digits is not computed."""
    claims = inner = _claims(copied)
    for key in path[:-1]:
        inner = next(p for p in inner if p["kind"] == key) if key == "descent" else inner[key]
    inner[path[-1]] = word
    _sign(copied, claims)
    with pytest.raises(check.Rejected, match=r"stands where a number should|domains do not agree"):
        check.check(copied)


def test_a_step_is_bounded_as_it_is_run():
    """2⁵³ + 3 is no float64: what multiplies is 2⁵³ + 4, and that is what L is about."""
    op = dict(kind="matrix", geometry={}, adjoint=False, weight="weight")
    described = dict(kind="descent", op=op, bias="bias", h=2**53 + 3, sigma="relu")
    step = check.Descent(described, dict(weight=np.ones((1, 1)), bias=np.ones(1)), dict(norm=1 + 2.0**-30), "it")
    assert Fraction(step.run(np.zeros((1, 1))).item()) == -step.h


@pytest.mark.parametrize("other", ["../good", "/dev/zero", "more"])
def test_no_other_file_is_read(copied, other):
    claims = _claims(copied)
    claims.pop("digest")
    claims["files"][other] = "0" * 64
    (copied / certificate_file.CLAIMS).write_text(json.dumps(dict(claims, digest=certificate_file.digest(claims))))
    with pytest.raises(check.Rejected, match="other files"):
        check.check(copied)


def test_the_command(good, tmp_path, capsys):
    for arguments, code, words in (
        ([str(good)], 0, "accepted: 40 radii follow from their scores"),
        ([str(tmp_path)], 1, "certificate.json is missing"),
        ([str(good / certificate_file.CLAIMS)], 1, "cannot be read: NotADirectoryError"),
        ([], 2, "python -m lipflow.check FOLDER"),
    ):
        assert check.main(arguments) == code
        assert words in capsys.readouterr().out


def test_a_long_band_leaves_room_for_the_norm_of_its_residual_only():
    """2000 strips of 16 rows: what rounding leaves grows with the root of their number."""
    diagonal, below = np.broadcast_to(np.eye(16), (1, 2000, 16, 16)), np.zeros((1, 1999, 16, 16))
    check.verify_band(diagonal, below, Fraction(0), 1 + Fraction(1, 2**36), "it")
    with pytest.raises(check.Rejected, match="it: the claimed norm is below the true one"):
        check.verify_band(diagonal, below, Fraction(0), 1 - Fraction(1, 2**36), "it")


def test_a_width_is_an_integer():
    """With 4.0 the errors would be rounded floats, and no rationals."""
    parts = np.ones((4, 3, 1, 1)), np.zeros((4, 3, 1, 1))
    check.Fourier(*parts, dict(in_size=[4, 4]))
    with pytest.raises(check.Rejected, match="w // 2"):
        check.Fourier(*parts, dict(in_size=[4, 4.0]))


@pytest.mark.parametrize("name", FREEZABLE)
def test_no_row_of_a_ledger_can_be_lowered(name, tmp_path):
    """Of every kind of layer, the checker's own constants are needed, and not only accepted."""
    network = nn.Sequential(contract.make(name, trained=True), nn.Flatten())
    _certificate(tmp_path, network, contract.LAYERS[name].shape, count=1)
    honest = (tmp_path / certificate_file.CLAIMS).read_text()
    tried = 0
    for i, row in enumerate(json.loads(honest)["vertices"]):
        for field, factor in (("lipschitz", 1 - 1e-6), ("rounding", 1 - 1e-6), ("reach", 0.49)):
            if row[field]:
                claims = json.loads(honest)
                claims["vertices"][i][field] *= factor
                _sign(tmp_path, claims)
                with pytest.raises(check.Rejected, match="is stated too low"):
                    check.check(tmp_path)
                tried += 1
    assert tried >= 3


@pytest.mark.parametrize(
    "lie",
    [
        dict(schema=3),
        dict(schema=1),
        dict(dtype="float32"),
        dict(domain=[0, 2]),
        dict(norm="Linf"),
        dict(classes=9),
        dict(in_shape=[1, 8, 9]),
        dict(primitives=[]),
        dict(vertices=[]),
    ],
    ids=str,
)
def test_a_lie_in_the_head_is_rejected_with_a_digest_that_fits(copied, lie):
    _sign(copied, _claims(copied) | lie)
    words = "reads schema 2, not 1: certify the network again" if lie == dict(schema=1) else ""
    with pytest.raises(check.Rejected, match=words or r"this checker|do not agree|classes|does not list every"):
        check.check(copied)


def test_a_network_of_another_schema_is_rejected(tmp_path):
    frozen = lipflow.freeze(nn.Linear(3, 2), (3,))
    certificate(tmp_path, frozen, bytes_of(frozen, 2))
    forge(tmp_path, frozen, lambda description, tensors, claims: description.update(schema=1))
    assert "networks of schema 2, not 1" in rejected(tmp_path)
