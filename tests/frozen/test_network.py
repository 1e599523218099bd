"""Frozen networks: what they compute, what they promise, how they are kept, and what they refuse."""

import copy
import math
import os
from fractions import Fraction

import pytest
import torch
from torch import nn

import lipflow
from lipflow import blocks
from lipflow.frozen.lower import lower, step_size
from tests import contract

# What freeze refuses, and why it says so: arithmetic whose rounding nobody has bounded, or a module of the user's.
REFUSED = {
    "cpl dense, tanh": "σ = tanh rounds",
    "cpl dense, softplus": "σ = softplus rounds",
    "cpl dense, sigmoid": "σ = sigmoid rounds",
    "midpoint, convex": "σ = tanh rounds",
    "any potential": "a module of yours",
    "any potential, implicit": "a module of yours",
}
FREEZABLE = [name for name in contract.LAYERS if name not in REFUSED]


def _classifier(name: str, trained: bool = False) -> tuple[nn.Sequential, tuple[int, ...]]:
    layer = contract.make(name, trained=trained)
    return nn.Sequential(layer, nn.Flatten()), contract.LAYERS[name].shape


def _equal_step(live: nn.Module, frozen: lipflow.Frozen) -> nn.Module:
    """The live network with the certified step sizes, so that the two compute the same map."""
    twin = copy.deepcopy(live)
    steps = [p.h for p in frozen.primitives if p.kind == "descent"]
    flows = [m for m in twin.modules() if isinstance(m, lipflow.Flow)]
    automatic = [f for f in flows if any(s == lipflow.ExplicitEuler() for s in _steps(f.step))]
    relaxed = len(steps) - len(automatic)
    if not relaxed:
        for flow, h in zip(automatic, steps, strict=True):
            exact = lipflow.ExplicitEuler(h) if h else None
            flow.step = lipflow.Split(exact, flow.step.skew_step) if isinstance(flow.step, lipflow.Split) else exact
    return twin


def _steps(step):
    return [step.convex_step, step.skew_step] if isinstance(step, lipflow.Split) else [step]


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("name", [name for name in FREEZABLE if contract.LAYERS[name].solved])
def test_the_frozen_layer_agrees_with_the_live_one(name, trained):
    live, shape = _classifier(name, trained)
    frozen = lipflow.freeze(live, in_shape=shape)
    x = torch.rand(5, *shape, dtype=torch.float64)
    expected = _equal_step(live, frozen)(x)
    unsolved = 1e-6 if "proximal" in [p.kind for p in frozen.primitives] else 0.0
    torch.testing.assert_close(frozen(x), expected.detach(), rtol=1e-9, atol=1e-9 + unsolved)


@pytest.mark.parametrize("name", FREEZABLE)
def test_no_attack_breaks_a_certified_point(name):
    live, shape = _classifier(name, trained=True)
    frozen = lipflow.freeze(live, in_shape=shape)
    x = torch.rand(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    found = lipflow.certify(frozen, x)
    shared = "torch max pooling, overlapping"  # neighbours share their maximum, so scores are equal
    assert name == shared or bool((found.radius > 0).any())
    inside = found.radius.clamp(max=1e6) * (1 - 1e-9)
    assert not bool(lipflow.attack.pgd(frozen, x, found.label, [inside]).success.any())


def _jacobian(frozen: lipflow.Frozen, x: torch.Tensor) -> torch.Tensor:
    """The Jacobian at x, one copy of x for each of its rows."""
    copies = x.expand(frozen.classes, *x.shape).clone().requires_grad_()
    return torch.autograd.grad(frozen(copies).diagonal().sum(), copies)[0].flatten(1)


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("name", FREEZABLE)
def test_the_frozen_layer_never_stretches_more_than_it_says(name, trained):
    live, shape = _classifier(name, trained)
    frozen = lipflow.freeze(live, in_shape=shape)
    for x in torch.rand(4, *shape, dtype=torch.float64):
        rows = _jacobian(frozen, x)
        norm = float(torch.linalg.matrix_norm(rows, 2))
        slack = 1e-7 if "midpoint" in name else 1e-12  # a reflection cut short is within its ε of 1-Lipschitz
        assert norm <= frozen.lipschitz * (1 + slack)
        apart = (rows[:, None] - rows[None]).norm(dim=-1)
        assert bool((apart <= frozen.pair_bounds * (1 + slack) + 1e-12).all())


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_in_certified_arithmetic_is_refused(name):
    live, shape = _classifier(name)
    with pytest.raises(TypeError, match=REFUSED[name]):
        lipflow.freeze(live, in_shape=shape)


@pytest.mark.parametrize("name", FREEZABLE)
def test_files_round_trip(name, tmp_path):
    live, shape = _classifier(name)
    frozen = lipflow.freeze(live, in_shape=shape)
    frozen.save(tmp_path / "frozen.safetensors")
    loaded = lipflow.Frozen.load(tmp_path / "frozen.safetensors")
    x = torch.rand(3, *shape)
    assert torch.equal(frozen(x), loaded(x))
    assert (loaded.digest, loaded.lipschitz, loaded.rounding) == (frozen.digest, frozen.lipschitz, frozen.rounding)
    assert torch.equal(loaded.pair_bounds, frozen.pair_bounds)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_file_can_be_read_by_whom_the_umask_lets(umask, tmp_path):
    before = os.umask(umask)
    try:
        lipflow.freeze(lipflow.build("cpl-digits", in_shape=(1, 4, 4))).save(tmp_path / "frozen.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "frozen.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask
    assert [path.name for path in tmp_path.iterdir()] == ["frozen.safetensors"]


def test_it_is_not_in_training():
    """Attack libraries and users ask, and there is nothing that training mode would change."""
    assert not lipflow.freeze(lipflow.build("cpl-digits", in_shape=(1, 4, 4)).train()).training


def test_freezing_a_built_network():
    network = lipflow.build("cpl-digits", lln=True)
    frozen = lipflow.freeze(network)
    assert frozen.lipschitz == pytest.approx(lipflow.lipschitz_bound(network.head).lipschitz, rel=1e-6)
    assert 0 < frozen.rounding < 1e-9
    assert len(frozen.ledger) == len(frozen.primitives)
    assert [row.kind for row in frozen.ledger][:3] == ["center", "pad", "descent"]
    assert all(row.lipschitz == 1.0 for row in frozen.ledger[:-1])
    assert "E = " in repr(frozen)
    assert lipflow.freeze(frozen) is frozen


def test_uint8_is_read_as_255ths():
    frozen = lipflow.freeze(lipflow.build("cpl-digits"))
    x = torch.arange(64, dtype=torch.uint8).reshape(1, 1, 8, 8) * 4
    exact = torch.tensor([k / 255 for k in x.flatten().tolist()], dtype=torch.float64).reshape(x.shape)
    assert torch.equal(frozen(x), frozen(exact))


@pytest.mark.parametrize("norm", [1e-200, 1e-160, 3e-5, 0.7, 1.0, math.sqrt(2), 1e5, 1e150])
def test_a_step_never_exceeds_two_over_the_square(norm):
    h = step_size(norm)
    assert Fraction(h) * Fraction(norm) ** 2 <= 2
    if h:
        assert Fraction(math.nextafter(h, math.inf)) * Fraction(norm) ** 2 > 2


def test_a_zero_layer_is_the_identity():
    layer = lipflow.cpl_dense(4, 3)
    nn.init.zeros_(layer.field.weight.weight)
    frozen = lipflow.freeze(nn.Sequential(layer), in_shape=(4,))
    x = torch.rand(2, 4, dtype=torch.float64)
    assert torch.equal(frozen(x), x)
    assert frozen.lipschitz == 1.0


def test_it_is_immutable():
    frozen = lipflow.freeze(lipflow.build("cpl-digits"))
    with pytest.raises(AttributeError, match="immutable; lipschitz"):
        frozen.lipschitz = 0.5
    with pytest.raises(TypeError, match="float64 on the CPU"):
        frozen.float()
    assert frozen.to("cpu") is frozen
    assert frozen.eval() is frozen
    assert not list(frozen.parameters())
    for of_nothing in (frozen.state_dict, nn.Sequential(frozen).state_dict, lambda: frozen.load_state_dict({})):
        with pytest.raises(TypeError, match=r"frozen\.save\(path\) writes it, and lipflow\.Frozen\.load"):
            of_nothing()
    frozen.primitives[2].map.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        lipflow.certify(frozen, torch.rand(1, 1, 8, 8))


def test_the_model_may_change_after_freezing():
    network = lipflow.build("cpl-digits")
    frozen = lipflow.freeze(network)
    x = torch.rand(2, 1, 8, 8)
    before = frozen(x)
    with torch.no_grad():
        for p in network.parameters():
            p.mul_(3)
    assert torch.equal(frozen(x), before)


class _Mine(nn.Module):
    def forward(self, x):
        return 5 * x


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (lambda: nn.Sequential(nn.Flatten(), _Mine()), TypeError, r"_Mine \(at 1\) declares no Lipschitz bound"),
        (lambda: nn.Sequential(nn.Sequential(nn.BatchNorm2d(1))), TypeError, r"nn.BatchNorm2d \(at 0.0\)"),
        (lambda: nn.Sequential(lipflow.Assume(_Mine(), 5.0)), TypeError, "a word is not enough"),
        (lambda: nn.Sequential(lipflow.cpl_conv(1, 2)), ValueError, r"ends in \(batch, classes\)"),
        (
            lambda: nn.Sequential(blocks.MaxPool(9)),
            ValueError,
            r"max_pool .* does not take an input of shape \(1, 4, 4\)",
        ),
    ],
)
def test_models_that_cannot_be_frozen(model, error, words):
    with pytest.raises(error, match=words):
        lipflow.freeze(model(), in_shape=(1, 4, 4))


def test_shapes_are_asked_for_and_checked():
    with pytest.raises(ValueError, match="needs the shape of one input"):
        lipflow.freeze(nn.Sequential(nn.Flatten(), lipflow.cpl_dense(4, 4)))
    with pytest.raises(ValueError, match="was built for"):
        lipflow.freeze(lipflow.build("cpl-digits"), in_shape=(1, 9, 9))
    frozen = lipflow.freeze(lipflow.build("cpl-digits"))
    with pytest.raises(ValueError, match=r"images \(batch, 1, 8, 8\), not \(1, 8, 8\)"):
        frozen(torch.rand(1, 8, 8))
    with pytest.raises(TypeError, match="uint8, or floats"):
        frozen(torch.zeros(1, 1, 8, 8, dtype=torch.int64))


def test_nan_weights_are_refused():
    network = lipflow.build("cpl-digits")
    with torch.no_grad():
        network.stages.convolutions[1].field.bias[0] = math.nan
    with pytest.raises(ValueError, match=r"convolutions\.1: the bias has NaN"):
        lipflow.freeze(network)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema=2), "schema 2"),
        (lambda d: d["primitives"][2].update(kind="magic"), "not known: 'magic'"),
        (lambda d: d["primitives"][2].update(h=-1.0), "descent primitive cannot be built"),
        (lambda d: d["primitives"][2].update(name="abs"), "descent primitive cannot be built"),
    ],
)
def test_a_strangers_file_is_read_with_care(change, words, tmp_path):
    import json

    from safetensors.torch import save_file

    from lipflow.frozen.network import describe, tensors_of

    frozen = lipflow.freeze(lipflow.build("cpl-digits"))
    description = describe(frozen)
    change(description)
    path = tmp_path / "f.safetensors"
    save_file(dict(tensors_of(frozen.primitives)), str(path), {"lipflow": json.dumps(description)})
    with pytest.raises(ValueError, match=words):
        lipflow.Frozen.load(path)


def test_a_series_that_is_not_skew_is_refused():
    from lipflow.frozen.linear import Map
    from lipflow.frozen.primitive import Series

    with pytest.raises(ValueError, match="series primitive cannot be built"):
        Series(Map.of(lipflow.Dense(torch.eye(3))), 1.0, 5)


def test_another_default_device_changes_nothing(tmp_path):
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    images = torch.rand(3, 1, 4, 4)
    expected = lipflow.certify(lipflow.freeze(network, in_shape=(1, 4, 4)), images)
    torch.set_default_device("meta")
    try:
        frozen = lipflow.freeze(network, in_shape=(1, 4, 4))
        frozen.save(tmp_path / "f.safetensors")
        found = lipflow.certify(lipflow.Frozen.load(tmp_path / "f.safetensors"), images)
    finally:
        torch.set_default_device(None)
    assert torch.equal(found.radius, expected.radius)


@pytest.mark.parametrize("shape", [4, "4", (2.0,), (-1,)])
def test_what_is_no_shape_is_quoted(shape):
    with pytest.raises(ValueError, match="in_shape is the shape of one input"):
        lipflow.freeze(nn.Sequential(nn.Linear(4, 2)), in_shape=shape)


def test_what_is_no_tensor_is_quoted():
    frozen = lipflow.freeze(nn.Sequential(nn.Linear(4, 2)), in_shape=(4,))
    with pytest.raises(TypeError, match=r"images are a tensor, not list: .* one batch of a loader at a time"):
        lipflow.certify(frozen, [[0.0] * 4])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"freeze takes a network, such as lipflow.load\(name\), not str: 'cpl-fast"):
        lipflow.freeze("cpl-fast-cifar10")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"not a tensor \(of images x it is x.shape\[1:\]\)"):
        lipflow.freeze(nn.Sequential(nn.Linear(4, 2)), in_shape=torch.rand(2, 4))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"a radius is a number .* not None"):
        lipflow.certify(frozen, torch.rand(1, 4)).certified(None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("shape", "hint"),
    [
        ((), r"not \(\)$"),
        ((3, 4, 6), r"not \(3, 4, 6\); one image is a batch of one, x\[None\]$"),
        ((2, 4, 6, 3), r"not \(2, 4, 6, 3\); channels come first, x.permute\(0, 3, 1, 2\)$"),
        ((2, 1, 4, 6), r"not \(2, 1, 4, 6\)$"),
        ((2, 72), r"not \(2, 72\)$"),
    ],
    ids=str,
)
def test_images_of_another_shape_are_told_how_to_fit(shape, hint):
    live = lipflow.build("cpl", classes=2, in_shape=(3, 4, 6), channels=3, depth=1, inner=2, pool=2, features=2)
    frozen, x = lipflow.freeze(live), torch.zeros(shape)
    for program in (live, frozen, lambda x: lipflow.certify(frozen, x)):
        with pytest.raises(ValueError, match=r"takes images \(batch, 3, 4, 6\), " + hint):
            program(x)


def test_a_digest_is_of_every_number():
    """It is the key of scores that are kept, so that no network is given those of another."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 2) for _ in range(2)]
    same = copy.deepcopy(layers[0])
    biased = copy.deepcopy(layers[0])
    with torch.no_grad():
        biased.bias[1] += 1
    first, *others, again = (
        lipflow.freeze(nn.Sequential(layer), in_shape=(3,)).digest for layer in (*layers, biased, same)
    )
    assert first == again
    assert first not in others


@pytest.mark.parametrize(
    "module",
    [
        nn.MaxPool2d(2, ceil_mode=True),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.AvgPool2d(3, divisor_override=1),
        nn.AvgPool2d(3, padding=1, count_include_pad=False),
        nn.Flatten(2),
    ],
    ids=str,
)
def test_what_would_be_frozen_as_another_function_is_refused(module):
    with pytest.raises(ValueError, match=r"is frozen with|flatten the rest"):
        list(lower(module, (2, 5, 5), "it"))


def test_a_certificate_is_written_of_as_many_images_and_labels(tmp_path):
    frozen, x = lipflow.freeze(nn.Sequential(nn.Linear(4, 2)), in_shape=(4,)), torch.rand(3, 4)
    certificates = lipflow.certify(frozen, x)
    for images, truth in ((x[:2], certificates.label), (x, certificates.label[:2]), (x, certificates.label.double())):
        with pytest.raises(ValueError, match="3 certificates are of as many images and integer labels, not of"):
            lipflow.record.write(tmp_path, frozen, certificates, images, truth)
    assert not list(tmp_path.iterdir())
