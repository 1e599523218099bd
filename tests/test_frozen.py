"""Frozen networks: values, constants, files, and errors."""

import contextlib
import copy
import ctypes.util
import json
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import lipflow
from lipflow import blocks
from lipflow.graph.file import describe
from lipflow.operators.certified import certified_operator
from lipflow.primitives import Descent, TruncatedExponential
from tests import contract
from tests.contract import FREEZABLE, REFUSED


def _classifier(name: str, trained: bool = False) -> tuple[nn.Sequential, lipflow.Frozen, tuple[int, ...]]:
    shape = contract.LAYERS[name].shape
    live = nn.Sequential(contract.make(name, trained=trained), nn.Flatten())
    return live, lipflow.freeze(live, in_shape=shape), shape


def _with_certified_steps(live: nn.Module, frozen: lipflow.Frozen) -> nn.Module:
    """The live network with the certified step sizes, so that both compute the same map."""
    twin = copy.deepcopy(live)
    primitives = {id(v.primitive): v.primitive for v in frozen.graph.vertices}  # each once, in order
    steps = [p.h for p in primitives.values() if isinstance(p, Descent)]
    flows = [m for m in twin.modules() if isinstance(m, lipflow.Flow)]
    splits = [isinstance(flow.step, lipflow.Split) for flow in flows]
    convex = [flow.step.convex_step if split else flow.step for flow, split in zip(flows, splits, strict=True)]
    automatic = [i for i, step in enumerate(convex) if step == lipflow.ExplicitEuler()]
    if len(steps) == len(automatic):  # otherwise some step sizes are fixed
        for i, h in zip(automatic, steps, strict=True):
            exact = lipflow.ExplicitEuler(h)
            flows[i].step = lipflow.Split(exact, flows[i].step.skew_step) if splits[i] else exact
    return twin


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("name", [name for name in FREEZABLE if contract.LAYERS[name].solved])
def test_frozen_layers_agree_with_live_ones(name, trained):
    live, frozen, shape = _classifier(name, trained)
    x = torch.rand(5, *shape, dtype=torch.float64)
    expected = _with_certified_steps(live, frozen)(x)
    unsolved = 1e-6 if "proximal" in [row.kind for row in frozen.ledger] else 0.0
    torch.testing.assert_close(frozen(x), expected.detach(), rtol=1e-9, atol=1e-9 + unsolved)


@pytest.mark.parametrize("name", FREEZABLE)
def test_no_attack_breaks_a_certified_point(name):
    _, frozen, shape = _classifier(name, trained=True)
    x = torch.rand(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    found = lipflow.certify(frozen, x)
    shared = "torch max pooling, overlapping"  # neighbouring windows have the same maximum, so scores are equal
    assert name == shared or bool((found.radius > 0).any())
    inside = found.radius.clamp(max=1e6) * (1 - 1e-9)
    assert not bool(lipflow.attack.pgd(frozen, x, found.label, [inside]).success.any())


def _jacobian(frozen: lipflow.Frozen, x: Tensor) -> Tensor:
    """The Jacobian at x, from one copy of x per row."""
    copies = x.expand(frozen.classes, *x.shape).clone().requires_grad_()
    return torch.autograd.grad(frozen(copies).diagonal().sum(), copies)[0].flatten(1)


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("name", FREEZABLE)
def test_jacobians_never_exceed_the_bounds(name, trained):
    _, frozen, shape = _classifier(name, trained)
    for x in torch.rand(4, *shape, dtype=torch.float64):
        rows = _jacobian(frozen, x)
        norm = float(torch.linalg.matrix_norm(rows, 2))
        slack = 1e-7 if "midpoint" in name else 1e-12  # a truncated iteration is within ε of a 1-Lipschitz map
        assert norm <= frozen.lipschitz * (1 + slack)
        apart = (rows[:, None] - rows[None]).norm(dim=-1)
        assert bool((apart <= frozen.pair_bounds * (1 + slack) + 1e-12).all())


@pytest.mark.parametrize("name", REFUSED)
def test_layers_without_certified_arithmetic_are_refused(name):
    with pytest.raises(lipflow.LoweringError, match=f"^0: .*{REFUSED[name]}"):
        _classifier(name)


@pytest.mark.parametrize("name", FREEZABLE)
def test_files_round_trip(name, tmp_path):
    _, frozen, shape = _classifier(name)
    frozen.save(tmp_path / "frozen.safetensors")
    loaded = lipflow.Frozen.load(tmp_path / "frozen.safetensors")
    x = torch.rand(3, *shape)
    assert torch.equal(frozen(x), loaded(x))
    assert (loaded.digest, loaded.lipschitz, loaded.rounding) == (frozen.digest, frozen.lipschitz, frozen.rounding)
    assert (loaded.ledger, loaded.domain, loaded.graph.note) == (frozen.ledger, frozen.domain, frozen.graph.note)
    assert torch.equal(loaded.pair_bounds, frozen.pair_bounds)


def test_a_file_holds_each_tensor_once(tmp_path):
    layer = lipflow.cpl_dense(20, 30)
    for times in (1, 5):
        lipflow.freeze(nn.Sequential(*[layer] * times), in_shape=(20,)).save(tmp_path / f"{times}")
    once, often = ((tmp_path / f"{times}").stat().st_size for times in (1, 5))
    assert often < once + 1000


def test_the_ledger_has_a_row_for_each_vertex_of_a_built_network():
    network = lipflow.build("cpl-digits", lln=True)
    frozen = lipflow.freeze(network)
    head = lipflow.lipschitz_bound(network.head, in_shape=(512,))
    assert frozen.lipschitz == pytest.approx(head.lipschitz, rel=1e-6)
    assert 0 < frozen.rounding < 1e-9
    assert len(frozen.ledger) == len(frozen.graph.vertices)
    assert [row.kind for row in frozen.ledger][:5] == ["input", "constant", "sum", "gather", "descent"]
    assert [row.name for row in frozen.ledger][-2:] == ["stages.linear.2", "stages.head"]
    assert all(row.lipschitz == (0.0 if row.kind == "constant" else 1.0) for row in frozen.ledger[:-1])
    assert "E = " in repr(frozen)


def test_freezing_a_frozen_network_returns_it():
    frozen = lipflow.freeze(nn.Linear(4, 3), (4,))
    assert lipflow.freeze(frozen) is lipflow.freeze(frozen, (4,), (0.0, 1.0)) is frozen


def test_a_zero_layer_is_the_identity():
    layer = lipflow.cpl_dense(4, 3)
    nn.init.zeros_(layer.field.weight.weight)
    frozen = lipflow.freeze(nn.Sequential(layer), in_shape=(4,))
    x = torch.rand(2, 4, dtype=torch.float64)
    assert torch.equal(frozen(x), x)
    assert frozen.lipschitz == 1.0


def test_a_batch_gives_the_scores_of_single_images():
    """The first part of a network runs on chunks of images, the dense layers on all of them."""
    layers = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 20), nn.ReLU(), nn.Linear(20, 5))
    frozen = lipflow.freeze(nn.Sequential(*layers), in_shape=(1, 16, 16))
    x = torch.rand(70, 1, 16, 16, dtype=torch.float64)
    one_by_one = torch.cat([frozen(image[None]) for image in x])
    assert float((frozen(x) - one_by_one).norm(dim=1).max()) <= 2 * frozen.rounding
    assert frozen(x[:0]).shape == (0, 5)


def test_jacobians_of_torch_func_are_those_of_autograd():
    layers = (lipflow.cpl_conv(2, 5), lipflow.soc(2, 3), lipflow.cayley_conv(2, 2), lipflow.proximal(2, 3, 3, h=0.1))
    frozen = lipflow.freeze(nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 3)), in_shape=(2, 4, 4))
    x = torch.rand(3, 2, 4, 4, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(frozen, x)
    torch.testing.assert_close(torch.func.jacrev(frozen)(x), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(torch.func.jacfwd(frozen)(x), expected, rtol=0, atol=1e-13)
    each = torch.func.vmap(torch.func.jacrev(lambda v: frozen(v[None])[0]))(x)
    torch.testing.assert_close(each, torch.stack([expected[i, :, i] for i in range(3)]), rtol=0, atol=1e-13)


def test_module_has_no_parameters_and_is_in_evaluation_mode():
    frozen = lipflow.freeze(lipflow.build("cpl-digits", in_shape=(1, 4, 4)).train())
    module = frozen.module()
    assert isinstance(module, nn.Module)
    assert not module.training
    assert not list(module.parameters())
    assert not module.state_dict()
    x = torch.rand(2, 1, 4, 4)
    assert torch.equal(nn.Sequential(module)(x), frozen(x))


# Errors


def test_networks_that_are_not_classifiers_are_frozen_and_not_certified():
    for layer, shape in ((lipflow.cpl_conv(1, 2), (1, 4, 4)), (nn.Linear(4, 1), (4,))):
        frozen, x = lipflow.freeze(nn.Sequential(layer), in_shape=shape), torch.rand(2, *shape)
        assert frozen.classes == (0 if len(shape) == 3 else len(frozen.pair_bounds))
        assert frozen(x).shape == layer(x).shape
        with pytest.raises(ValueError, match="certify takes a classifier of two classes or more"):
            lipflow.certify(frozen, x)


INVALID = [  # more invalid files are in soundness/test_forgeries.py
    (lambda d: d.update(schema=1), "schema 1, of another version of lipflow; .* freeze and certify"),
    (lambda d: d.update(model="cpl-digits"), "a network that is not frozen"),
    (lambda d: d["primitives"][4].update(kind="declared"), "declared"),
    (lambda d: d["primitives"][4].update(h=-1.0), "descent"),
    (lambda d: d["primitives"][4]["op"].update(weight="t99"), "t99"),
    (lambda d: d["primitives"][4].pop("h"), "does not describe a network"),
    (lambda d: d["vertices"].__setitem__(4, [4, 7]), "vertex 4"),
]


def test_load_refuses_other_files(tmp_path):
    path = tmp_path / "f.safetensors"

    def refuses(words: str) -> None:
        with pytest.raises(ValueError, match=words):
            lipflow.Frozen.load(path)

    path.write_bytes(b"no safetensors")
    refuses("is not a complete safetensors file")
    save_file({"t": torch.zeros(1)}, str(path))
    refuses("is not a frozen lipflow network")
    for text in ("[", "[1]"):
        save_file({"t": torch.zeros(1)}, str(path), {"lipflow": text})
        refuses("cannot be read: it is not")
    frozen = lipflow.freeze(lipflow.build("cpl-digits"))
    for change, words in INVALID:
        description, tensors = describe(frozen.graph, frozen.domain)
        change(description)
        save_file(tensors, str(path), {"lipflow": json.dumps(description)})
        refuses(words)


LINEAR = nn.Sequential(nn.Linear(4, 2))
WRONG = [  # a call, and a word of its error
    (lambda: lipflow.certify(lipflow.freeze(LINEAR, (4,)), [[0.0] * 4]), "images are a tensor, not list"),
    (lambda: lipflow.freeze("cpl-fast-cifar10"), "a network is an nn.Module, .* not str: 'cpl-fast"),
    (lambda: lipflow.freeze(LINEAR.state_dict(), (4,)), "a network is an nn.Module, .* not OrderedDict$"),
    (lambda: lipflow.certify(LINEAR, torch.rand(1, 4)), r"a frozen network: lipflow\.freeze\(model\), not Sequential"),
    (lambda: lipflow.certify(lipflow.freeze(LINEAR, (4,)).module(), torch.rand(1, 4)), r"lipflow\.freeze\(model\)"),
    (lambda: lipflow.freeze(LINEAR, in_shape=torch.rand(2, 4)), r"x.shape\[1:\]"),
    (lambda: lipflow.freeze(lipflow.freeze(LINEAR, (4,)), (5,)), "this network was frozen for"),
    (lambda: lipflow.freeze(lipflow.freeze(LINEAR, (4,)), (4,), (-5.0, 5.0)), "this network was frozen for"),
    (lambda: TruncatedExponential(certified_operator(lipflow.DenseOperator(torch.eye(3))), 1.0, 5), "series"),
]


@pytest.mark.parametrize(("call", "words"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments_are_refused_and_quoted(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


@pytest.mark.parametrize(
    ("shape", "hint"),
    [
        ((), r"not \(\)$"),
        ((3, 4, 6), r"x\[None\]$"),
        ((2, 4, 6, 3), r"x.permute\(0, 3, 1, 2\)$"),
        ((2, 1, 4, 6), r"not \(2, 1, 4, 6\)$"),
        ((2, 72), r"not \(2, 72\)$"),
    ],
    ids=str,
)
def test_images_of_another_shape_are_refused_with_a_hint(shape, hint):
    live = lipflow.build("cpl", classes=2, in_shape=(3, 4, 6), channels=3, depth=1, inner=2, pool=2, features=2)
    frozen, x = lipflow.freeze(live), torch.zeros(shape)
    for program in (live, frozen, lambda x: lipflow.certify(frozen, x)):
        with pytest.raises(ValueError, match=r"takes images \(batch, 3, 4, 6\), .*" + hint):
            program(x)


X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the modes have other numbers on other processors")


@contextlib.contextmanager
def _rounding(mode: int) -> Iterator[None]:
    modes = ctypes.CDLL(ctypes.util.find_library("m"))
    modes.fesetround(mode)
    try:
        yield
    finally:
        modes.fesetround(0)


@X86
@pytest.mark.parametrize("mode", [0x400, 0x800, 0xC00], ids=["down", "up", "to zero"])
def test_other_rounding_modes_are_refused(mode):
    frozen = lipflow.freeze(LINEAR, (4,))
    for program in (lambda: lipflow.Frozen.of(frozen.graph), lambda: lipflow.certify(frozen, torch.rand(2, 4))):
        with _rounding(mode), pytest.raises(RuntimeError, match=r"does not round to nearest.*fesetround"):
            program()


@X86
def test_other_rounding_modes_of_worker_threads_are_refused():
    """They keep the mode of the thread that started them, in which it has been reset."""
    frozen = lipflow.freeze(LINEAR, (4,))

    def certify() -> None:
        torch.set_num_threads(2)
        with _rounding(0x800):
            torch.rand(2**20).sqrt()  # starts a worker
        with pytest.raises(RuntimeError, match="does not round to nearest"):
            lipflow.certify(frozen, torch.rand(2, 4))

    with ThreadPoolExecutor(1) as fresh:
        fresh.submit(certify).result()


def test_networks_frozen_in_inference_mode_have_gradients(tmp_path):
    """Attacks use them. A factor and the directions of an activation are saved for the backward pass."""
    live = nn.Sequential(blocks.Normalize(0.5, 0.25), blocks.Householder(4), nn.Linear(4, 2)).double().eval()
    with torch.inference_mode():
        frozen = lipflow.freeze(live, (4,))
        frozen.save(tmp_path / "f.safetensors")
        loaded = lipflow.Frozen.load(tmp_path / "f.safetensors")
        lipflow.certify(loaded, torch.rand(2, 4))
    x = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(live(x).square().sum(), x)[0]
    for network in (frozen, loaded):
        torch.testing.assert_close(torch.autograd.grad(network(x).square().sum(), x)[0], expected)


def test_digest_covers_every_number():
    """Cached scores are found by it."""
    layers = [nn.Linear(3, 2) for _ in range(2)]
    same, biased = copy.deepcopy(layers[0]), copy.deepcopy(layers[0])
    with torch.no_grad():
        biased.bias[1] += 1
    first, *others, again = (lipflow.freeze(layer, (3,)).digest for layer in (*layers, biased, same))
    assert first == again
    assert first not in (*others, lipflow.freeze(same, (3,), (0, 2)).digest)
