"""Forgeries: primitives and files whose parts do not fit, or that lie as far as a check lets them.

Broadcasting is the danger: a tensor of k entries against one channel makes k copies of the image, and a map that is
stated to be 1-Lipschitz stretches by √k. What a file says must be refused when it is read, and when it is checked.
"""

import hashlib
import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor, nn

import lipflow
from lipflow import blocks, check, record
from lipflow.frozen import Primitive
from lipflow.frozen import primitive as prim
from lipflow.frozen.linear import Map
from lipflow.operators import Conv2d, Dense

COPIES = 16
REFUSED = (ValueError, TypeError, RuntimeError)


def _zeros(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.float64)


def _gather(copies: int) -> prim.Affine:
    """The mean of the copies of each of two pixels, times √copies: of norm 1."""
    weight = torch.zeros(2, 2 * copies, dtype=torch.float64)
    weight[0, 0::2] = weight[1, 1::2] = 1 / math.sqrt(copies)
    return prim.Affine(Map.of(Dense(weight)), _zeros(2))


def _split(copies: int) -> prim.Affine:
    weight = torch.zeros(2, 2 * copies, dtype=torch.float64)
    weight[0, :copies], weight[1, copies:] = 1 / math.sqrt(copies), -1 / math.sqrt(copies)
    return prim.Affine(Map.of(Dense(weight)), _zeros(2))


def _one_by_one() -> Map:
    return Map.of(Conv2d(torch.ones(1, 1, 1, 1, dtype=torch.float64), (1, 2), 0))


def _too_small() -> list[Primitive]:
    """A second difference bounded at one pixel, where its norm is 2, and run at two, where it is 3."""
    kernel = torch.tensor([[[[-1.0, 2.0, -1.0]]]], dtype=torch.float64)
    turn = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64) / math.sqrt(2)
    return [
        prim.Affine(Map.of(Conv2d(kernel, (1, 1), (0, 1))), _zeros(1)),
        prim.Flatten(),
        prim.Affine(Map.of(Dense(turn)), _zeros(2)),
    ]


FORGERIES = {
    "a mean for each of many channels": (
        lambda: [prim.Center(_zeros(COPIES), 1 + _zeros(COPIES)), prim.Flatten(), _gather(COPIES)],
        (1, 1, 2),
    ),
    "a bias for each of many channels": (
        lambda: [prim.Affine(_one_by_one(), _zeros(COPIES)), prim.Flatten(), _gather(COPIES)],
        (1, 1, 2),
    ),
    "an angle for each of many pairs": (
        lambda: [prim.Householder(_zeros(COPIES), 1 + _zeros(COPIES)), _split(COPIES)],
        (2,),
    ),
    "a norm at another size": (_too_small, (1, 1, 2)),
}
# Each of these once passed `Frozen(...)` and `Frozen.load`, and but for the last one `lipflow.check`: the label changed
# at a distance of 0.14, inside of a radius of 0.57.


def _frozen(name: str) -> lipflow.Frozen:
    make, shape = FORGERIES[name]
    return lipflow.Frozen(make(), shape)


@pytest.mark.parametrize("name", FORGERIES)
def test_primitives_that_do_not_fit_are_refused(name):
    with pytest.raises(REFUSED):
        _frozen(name)


# The same, written by hand for the checker: no class of ours stands between a forger and the file


def _affine(weight: np.ndarray, bias: int, geometry: dict | None = None) -> tuple[dict, dict, dict]:
    entry = dict(kind="affine", map=dict(geometry=geometry))
    return entry, dict(weight=weight, bias=np.zeros(bias)), dict(norm=1 + 1e-6, torus=[[1, 0], [1, 0]])


def _by_hand(name: str, copies: int) -> tuple[list[tuple[dict, dict, dict]], list[int]]:
    """(description, tensors, claims) of each primitive, and the shape of the input."""
    gather, split = (p.map.weight.numpy() for p in (_gather(copies), _split(copies)))
    geometry = dict(
        in_size=[1, 2], padding=[[0, 0], [0, 0]], padding_mode="zeros", stride=[1, 1], dilation=[1, 1], groups=1
    )
    flat: tuple[dict, dict, dict] = (dict(kind="flatten"), {}, {})
    if name == "a mean for each of many channels":
        first = (dict(kind="center"), dict(mean=np.zeros(copies), scale=np.ones(copies)), {})
        return [first, flat, _affine(gather, 2)], [1, 1, 2]
    if name == "a bias for each of many channels":
        return [_affine(np.ones((1, 1, 1, 1)), copies, geometry), flat, _affine(gather, 2)], [1, 1, 2]
    first = (dict(kind="householder"), dict(sine=np.zeros(copies), cosine=np.ones(copies)), {})
    return [first, _affine(split, 2)], [2]


def _forge(folder: Path, name: str, copies: int) -> None:
    """A certificate that states constants in plenty, and a radius as if nothing were copied."""
    parts, shape = _by_hand(name, copies)
    tensors = {f"{i}.{key}": t for i, (_, held, _) in enumerate(parts) for key, t in held.items()}
    described = dict(schema=1, in_shape=shape, primitives=[entry for entry, _, _ in parts])
    save_file(tensors, folder / record.WEIGHTS, {"lipflow": json.dumps(described)})
    logits = math.sqrt(copies) * np.array([[0.6, 0.4]])
    radius = (logits[:, 0] - logits[:, 1]) / math.sqrt(2) * 0.999
    x = np.array([0.6, 0.4]).reshape(1, *shape)
    label, paper = np.array([0]), (logits[:, 0] - logits[:, 1]) / 1.5
    columns = dict(images=x, truth=label, logits=logits, label=label, radius=np.minimum(radius, paper))
    np.savez(folder / record.ROWS, paper_radius=paper, **columns)
    stated = dict(lipschitz=1.001, rounding=1e-9, reach=100.0)
    claims = dict(
        schema=1,
        dtype="float64",
        domain=[0, 1],
        norm="L2 on the values handed to the network",
        in_shape=shape,
        classes=2,
        images=1,
        lipschitz=1.001,
        rounding=1e-9,
        pair_bounds=[[0.0, 1.5], [1.5, 0.0]],
        primitives=[dict(stated, kind=entry["kind"], **more) for entry, _, more in parts],
        files={n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in (record.WEIGHTS, record.ROWS)},
    )
    (folder / record.CLAIMS).write_text(json.dumps(dict(claims, digest=record.digest(claims))))


BY_HAND = [name for name in FORGERIES if name != "a norm at another size"]


@pytest.mark.parametrize("name", BY_HAND)
def test_the_file_is_right_but_for_the_copies(name, tmp_path):
    _forge(tmp_path, name, 1)
    assert "1 radii follow from their scores" in check.check(tmp_path, full=True)


@pytest.mark.parametrize("name", BY_HAND)
def test_the_checker_rejects_copies(name, tmp_path):
    _forge(tmp_path, name, COPIES)
    with pytest.raises(check.Rejected):
        check.check(tmp_path, full=True)


@pytest.mark.parametrize("name", BY_HAND)
def test_loading_refuses_copies(name, tmp_path):
    _forge(tmp_path, name, COPIES)
    with pytest.raises(REFUSED):
        lipflow.Frozen.load(tmp_path / record.WEIGHTS)


def test_freeze_refuses_what_the_live_network_refuses():
    live = nn.Sequential(blocks.Householder(6), nn.Flatten())
    with pytest.raises(ValueError, match="6 channels"):
        live(torch.zeros(1, 2))
    with pytest.raises(REFUSED):
        lipflow.freeze(live, in_shape=(2,))


# Scores that lie by as much as the checker allows


def test_scores_that_lie_gain_nothing(tmp_path):
    """Stored scores may differ from the checker's by 2E. A forger who moves the best score up by √2·E and the next one
    down by as much gets back 2√2·E of the slack; what is left must still pay for the rounding at both points."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()
    layer.weight = nn.Parameter(torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q)
    frozen = lipflow.freeze(nn.Sequential(layer), in_shape=(3,))
    x = torch.rand(1, 3, dtype=torch.float64)
    honest = lipflow.certify(frozen, x).logits[0]
    best, next_ = honest.topk(2).indices.tolist()
    logits, shift = honest.clone(), math.sqrt(2) * frozen.rounding * 0.9  # the rest is for the checker's own rounding
    logits[best] += shift
    logits[next_] -= shift
    forged = lipflow.certificate.from_logits(logits[None], frozen.pair_bounds, frozen.rounding)
    record.write(tmp_path, frozen, forged, x, forged.label)
    check.check(tmp_path, full=True)
    margin = Fraction(honest[best].item()) - Fraction(honest[next_].item())
    room = margin - Fraction(forged.radius.item()) * Fraction(frozen.pair_bounds[best, next_].item())
    assert room > 0
    assert room**2 >= 8 * Fraction(frozen.rounding) ** 2


@pytest.mark.parametrize("scale", [1.0, 1e-100, 1e-154, 1e-165, 1e-200, 1e-300, 1e150, 1e250])
@pytest.mark.parametrize("lie", [2.01, 1.99])
def test_scores_are_compared_at_any_size(scale, lie, tmp_path):
    """Within 2E, as two honest programs may be apart, and no further, where squares underflow and where they overflow.
    With weights of 1e-200, any score of 1e-165 once passed, and with it a wrong label and a radius of 1e30."""
    frozen = lipflow.Frozen([prim.Affine(Map.of(Dense(scale * torch.eye(3, dtype=torch.float64))), _zeros(3))], (3,))
    x = torch.tensor([[0.2, 0.9, 0.0]], dtype=torch.float64)
    logits = lipflow.certify(frozen, x).logits.clone()
    logits[0, 2] = lie * frozen.rounding  # of 0, so that nothing rounds
    forged = lipflow.certificate.from_logits(logits, frozen.pair_bounds, frozen.rounding)
    record.write(tmp_path, frozen, forged, x, forged.label)
    if lie < 2:
        check.check(tmp_path, full=True)
        return
    with pytest.raises(check.Rejected, match="not those of this network"):
        check.check(tmp_path, full=True)


# What is changed behind our back


def _network() -> lipflow.Frozen:
    torch.manual_seed(0)
    return lipflow.freeze(nn.Sequential(lipflow.cpl_dense(4, 4), blocks.Truncate(2)), in_shape=(4,))


def _through_numpy(frozen: lipflow.Frozen) -> None:
    np.multiply(frozen.primitives[0].map.weight.numpy(), 100, out=frozen.primitives[0].map.weight.numpy())


IN_PLACE = {
    # These two move no version counter of torch.
    "data": lambda f: f.primitives[0].map.weight.data.mul_(100),
    "numpy": _through_numpy,
    "pair bounds": lambda f: f.pair_bounds.div_(100),
    "a step": lambda f: object.__setattr__(f.primitives[0], "h", 100.0),
    "a size": lambda f: object.__setattr__(f.primitives[1], "classes", 3),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_nothing_is_certified_with_what_was_changed(name):
    frozen, x = _network(), torch.rand(2, 4)
    lipflow.certify(frozen, x)
    IN_PLACE[name](frozen)
    with pytest.raises(RuntimeError, match="changed in place"):
        lipflow.certify(frozen, x)


@pytest.mark.parametrize("name", IN_PLACE)
def test_no_certificate_is_written_of_what_was_changed(name, tmp_path):
    frozen, x = _network(), torch.rand(2, 4)
    certificates = lipflow.certify(frozen, x)
    IN_PLACE[name](frozen)
    with pytest.raises(RuntimeError, match="changed in place"):
        record.write(tmp_path, frozen, certificates, x, certificates.label)
    assert not list(tmp_path.iterdir())


ANOTHER_PROGRAM = {
    "forward": lambda f: setattr(f, "forward", lambda x: 100 * x.double()),
    "receive": lambda f: setattr(f, "receive", lambda x: 100 * x.double()),
    "a class": lambda f: setattr(f, "__class__", nn.Identity),
    "an attribute deleted": lambda f: delattr(f, "primitives"),
    "a hook": lambda f: f.register_forward_hook(lambda module, args, output: 100 * output),
    "a hook before": lambda f: f.register_forward_pre_hook(lambda module, args: (100 * args[0],)),
    "compiled": lambda f: f.compile(backend="eager"),
    "compiled by torch": lambda f: torch.compile(f, backend="eager")(torch.rand(2, 4)),
    "a subclass": lambda f: type("Mine", (lipflow.Frozen,), dict(forward=lambda self, x: 100 * x)),
}


@pytest.mark.parametrize("name", ANOTHER_PROGRAM)
def test_no_other_program_is_put_in_its_place(name):
    frozen, x = _network(), torch.rand(2, 4)
    before, scores = lipflow.certify(frozen, x).radius, frozen(x)
    with pytest.raises((TypeError, AttributeError), match=r"immutable|another program"):
        ANOTHER_PROGRAM[name](frozen)
    assert torch.equal(frozen(x), scores)
    assert torch.equal(lipflow.certify(frozen, x).radius, before)


@pytest.mark.parametrize("register", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_hooks_of_all_modules_change_no_certificate(register):
    frozen, x = _network(), torch.rand(2, 4)
    before = lipflow.certify(frozen, x)
    handle = getattr(nn.modules.module, register)(lambda module, args, *output: (output or (args[0],))[0] * 100)
    try:
        after = lipflow.certify(frozen, x)
        assert not torch.equal(frozen(x), before.logits)
    finally:
        handle.remove()
    assert torch.equal(after.logits, before.logits)
    assert torch.equal(after.radius, before.radius)


def test_one_bit_is_noticed():
    frozen, x = _network(), torch.rand(2, 4)
    bits = frozen.primitives[0].map.weight.numpy().view(np.int64)
    bits[1, 2] ^= 1
    with pytest.raises(RuntimeError, match="changed in place"):
        lipflow.certify(frozen, x)
    bits[1, 2] ^= 1
    lipflow.certify(frozen, x)


ALIKE = {
    "twice": lambda w: w.mul_(2),
    "a quarter": lambda w: w.mul_(0.25),
    "minus": lambda w: w.neg_(),
    "a row, minus": lambda w: w[0].neg_(),
    "rows exchanged": lambda w: w.copy_(w.flip(0).clone()),
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_whole_tensor_that_was_changed_alike_is_noticed(name):
    """The bits of 1024 numbers, weighted by 1, 3, 5, …, sum to the same when all are doubled: 2²⁰·2⁵² is 0 mod 2⁶⁴."""
    torch.manual_seed(0)
    frozen, x = lipflow.freeze(nn.Sequential(nn.Linear(512, 2, bias=False)), in_shape=(512,)), torch.rand(2, 512)
    lipflow.certify(frozen, x)
    ALIKE[name](frozen.primitives[0].map.weight)
    with pytest.raises(RuntimeError, match="changed in place"):
        lipflow.certify(frozen, x)


MADE_OF_THEM = {
    "transforms of columns": (lipflow.Midpoint(), lambda p: p.columns.mul_(10)),
    "transforms of rows": (lipflow.Midpoint(), lambda p: p.rows.mul_(10)),
    "a kernel": (lipflow.Exponential(), lambda p: setattr(p.map.op, "kernel", 10 * p.map.weight)),
    "a matrix of products": (lipflow.Exponential(), lambda p: p.map.matrix.mul_(10)),
    "a padding": (lipflow.Exponential(), lambda p: setattr(p.map.op, "padding_mode", "zeros")),
}


@pytest.mark.parametrize("name", MADE_OF_THEM)
def test_what_a_primitive_has_made_of_its_numbers_is_watched(name):
    torch.manual_seed(0)
    step, change = MADE_OF_THEM[name]
    layer = lipflow.Flow(lipflow.Skew(lipflow.ConvWeight(2, 2, padding_mode="circular")), step).eval()
    layer(torch.rand(1, 2, 4, 4))
    frozen, x = lipflow.freeze(nn.Sequential(layer, nn.Flatten()), in_shape=(2, 4, 4)), torch.rand(2, 2, 4, 4)
    lipflow.certify(frozen, x)
    change(frozen.primitives[0])
    with pytest.raises(RuntimeError, match="changed in place"):
        lipflow.certify(frozen, x)


def test_the_rounding_is_watched():
    frozen, x = lipflow.freeze(nn.Linear(3, 2), in_shape=(3,)), torch.rand(2, 3)
    vars(frozen)["rounding"] = 0.0
    with pytest.raises(RuntimeError, match="changed in place"):
        lipflow.certify(frozen, x)
