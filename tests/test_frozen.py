"""Frozen networks: what they compute, what they promise, their files, and what they refuse."""

import copy
import json
import os
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import lipflow
from lipflow.graph.file import describe
from lipflow.operators.certified import certify as certify_operator
from lipflow.primitives import Descent, TruncatedExponential
from tests import contract
from tests.contract import FREEZABLE, REFUSED


def _classifier(name: str, trained: bool = False) -> tuple[nn.Sequential, tuple[int, ...]]:
    layer = contract.make(name, trained=trained)
    return nn.Sequential(layer, nn.Flatten()), contract.LAYERS[name].shape


def _equal_step(live: nn.Module, frozen: lipflow.Frozen) -> nn.Module:
    """The live network with the certified step sizes, so that the two compute the same map."""
    twin = copy.deepcopy(live)
    primitives = {id(v.primitive): v.primitive for v in frozen.graph.vertices}  # each once, in order
    steps = [p.h for p in primitives.values() if isinstance(p, Descent)]
    flows = [m for m in twin.modules() if isinstance(m, lipflow.Flow)]
    automatic = [f for f in flows if any(s == lipflow.ExplicitEuler() for s in _steps(f.step))]
    relaxed = len(steps) - len(automatic)
    if not relaxed:
        for flow, h in zip(automatic, steps, strict=True):
            exact = lipflow.ExplicitEuler(h)
            flow.step = lipflow.Split(exact, flow.step.skew_step) if isinstance(flow.step, lipflow.Split) else exact
    return twin


def _steps(step: lipflow.flows.Step) -> list[lipflow.flows.Step]:
    return [step.convex_step, step.skew_step] if isinstance(step, lipflow.Split) else [step]


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("name", [name for name in FREEZABLE if contract.LAYERS[name].solved])
def test_the_frozen_layer_agrees_with_the_live_one(name, trained):
    live, shape = _classifier(name, trained)
    frozen = lipflow.freeze(live, in_shape=shape)
    x = torch.rand(5, *shape, dtype=torch.float64)
    expected = _equal_step(live, frozen)(x)
    unsolved = 1e-6 if "proximal" in [row.kind for row in frozen.ledger] else 0.0
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


def _jacobian(frozen: lipflow.Frozen, x: Tensor) -> Tensor:
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
    with pytest.raises(lipflow.LoweringError, match=f"^0: .*{REFUSED[name]}"):
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
    assert (loaded.ledger, loaded.domain, loaded.graph.note) == (frozen.ledger, frozen.domain, frozen.graph.note)
    assert torch.equal(loaded.pair_bounds, frozen.pair_bounds)


def test_a_file_holds_each_tensor_once(tmp_path):
    torch.manual_seed(0)
    layer = lipflow.cpl_dense(20, 30)
    for times in (1, 5):
        lipflow.freeze(nn.Sequential(*[layer] * times), in_shape=(20,)).save(tmp_path / f"{times}")
    once, often = ((tmp_path / f"{times}").stat().st_size for times in (1, 5))
    assert often < once + 1000


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_file_can_be_read_by_whom_the_umask_lets(umask, tmp_path):
    before = os.umask(umask)
    try:
        lipflow.freeze(lipflow.build("cpl-digits", in_shape=(1, 4, 4))).save(tmp_path / "frozen.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "frozen.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask
    assert [path.name for path in tmp_path.iterdir()] == ["frozen.safetensors"]


def test_freezing_a_built_network():
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


def test_freezing_what_is_frozen():
    frozen = lipflow.freeze(nn.Linear(4, 3), (4,))
    assert lipflow.freeze(frozen) is lipflow.freeze(frozen, (4,), (0.0, 1.0)) is frozen
    for arguments in (((5,),), ((4,), (-5.0, 5.0))):
        with pytest.raises(ValueError, match="this network was frozen for"):
            lipflow.freeze(frozen, *arguments)


def test_a_zero_layer_is_the_identity():
    layer = lipflow.cpl_dense(4, 3)
    nn.init.zeros_(layer.field.weight.weight)
    frozen = lipflow.freeze(nn.Sequential(layer), in_shape=(4,))
    x = torch.rand(2, 4, dtype=torch.float64)
    assert torch.equal(frozen(x), x)
    assert frozen.lipschitz == 1.0


def test_many_images_are_the_same_images_one_by_one():
    """A few images at a time go through the first part of a network, and all at once through the rest."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 20), nn.ReLU(), nn.Linear(20, 5))
    frozen = lipflow.freeze(nn.Sequential(*layers), in_shape=(1, 16, 16))
    x = torch.rand(70, 1, 16, 16, dtype=torch.float64)
    one_by_one = torch.cat([frozen(image[None]) for image in x])
    assert float((frozen(x) - one_by_one).norm(dim=1).max()) <= 2 * frozen.rounding
    assert frozen(x[:0]).shape == (0, 5)


def test_a_frozen_network_goes_through_the_transforms_of_torch_func():
    torch.manual_seed(0)
    layers = (lipflow.cpl_conv(2, 5), lipflow.soc(2, 3), lipflow.cayley_conv(2, 2), lipflow.proximal(2, 3, 3, h=0.1))
    frozen = lipflow.freeze(nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 3)), in_shape=(2, 4, 4))
    x = torch.rand(3, 2, 4, 4, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(frozen, x)
    torch.testing.assert_close(torch.func.jacrev(frozen)(x), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(torch.func.jacfwd(frozen)(x), expected, rtol=0, atol=1e-13)
    each = torch.func.vmap(torch.func.jacrev(lambda v: frozen(v[None])[0]))(x)
    torch.testing.assert_close(each, torch.stack([expected[i, :, i] for i in range(3)]), rtol=0, atol=1e-13)


def test_as_a_module_it_has_nothing_to_train():
    """Attack libraries and users ask for modules, and whether they are in training."""
    frozen = lipflow.freeze(lipflow.build("cpl-digits", in_shape=(1, 4, 4)).train())
    module = frozen.module()
    assert isinstance(module, nn.Module)
    assert not module.training
    assert not list(module.parameters())
    assert not module.state_dict()
    x = torch.rand(2, 1, 4, 4)
    assert torch.equal(nn.Sequential(module)(x), frozen(x))


def test_no_compiler_makes_another_program_of_it():
    torch.manual_seed(0)
    frozen = lipflow.freeze(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), in_shape=(4,))
    x, captured = torch.rand(3, 4), []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        captured.append(graph)
        return graph.forward

    assert torch.equal(torch.compile(frozen.module(), backend=backend)(x), frozen(x))
    assert torch.equal(torch.compile(frozen, backend=backend)(x), frozen(x))
    assert captured == []


# What is refused


def test_what_is_no_classifier_is_frozen_and_not_certified():
    frozen = lipflow.freeze(nn.Sequential(lipflow.cpl_conv(1, 2)), in_shape=(1, 4, 4))
    assert frozen.classes == 0
    assert frozen.lipschitz == 1
    assert frozen(torch.rand(2, 1, 4, 4)).shape == (2, 1, 4, 4)
    with pytest.raises(ValueError, match=r"a classifier of two classes or more, whose output is \(batch, classes\)"):
        lipflow.certify(frozen, torch.rand(2, 1, 4, 4))
    with pytest.raises(ValueError, match="certify takes a classifier"):
        lipflow.certify(lipflow.freeze(nn.Sequential(nn.Linear(4, 1)), in_shape=(4,)), torch.rand(2, 4))


def test_load_refuses_other_files(tmp_path):
    path = tmp_path / "f.safetensors"
    path.write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        lipflow.Frozen.load(path)
    save_file({"t": torch.zeros(1)}, str(path))
    with pytest.raises(ValueError, match="is not a frozen lipflow network"):
        lipflow.Frozen.load(path)
    frozen = lipflow.freeze(lipflow.build("cpl-digits"))
    for change, words in CHANGES:
        description, tensors = describe(frozen.graph, frozen.domain)
        change(description)
        save_file(tensors, str(path), {"lipflow": json.dumps(description)})
        with pytest.raises(ValueError, match=words):
            lipflow.Frozen.load(path)


CHANGES = [  # what else is refused stands in soundness/test_forgeries.py
    (lambda d: d.update(schema=1), "schema 1, of another version of lipflow; .* freeze and certify"),
    (lambda d: d.update(model="cpl-digits"), "a network that is not frozen"),
    (lambda d: d["primitives"][4].update(kind="declared"), "not known: 'declared'"),
    (lambda d: d["primitives"][4].update(h=-1.0), "descent primitive cannot be built"),
    (lambda d: d["primitives"][4]["op"].update(kind="magic"), "not known: 'magic'"),
    (lambda d: d["primitives"][4]["op"].update(weight="t3"), "t3|shape|kernel"),
    (lambda d: d["primitives"][4]["op"].update(weight="t99"), "no finite float64 tensor 't99'"),
    (lambda d: d["primitives"][4].pop("h"), "does not describe a network"),
    (lambda d: d["primitives"][3].update(index="t2"), "no finite int32 tensor 't2'"),
    (lambda d: d["vertices"].__setitem__(4, [4, 7]), "vertex 4 does not come after its inputs"),
    (lambda d: d["vertices"].pop(), "zip"),
    (lambda d: d.update(vertices=[], names=[]), "holds no network"),
]


def test_a_series_that_is_not_skew_is_refused():
    with pytest.raises(ValueError, match="series primitive cannot be built"):
        TruncatedExponential(certify_operator(lipflow.DenseOperator(torch.eye(3))), 1.0, 5)


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


def test_what_is_no_tensor_is_quoted():
    frozen = lipflow.freeze(nn.Sequential(nn.Linear(4, 2)), in_shape=(4,))
    with pytest.raises(TypeError, match=r"images are a tensor, not list: .* one batch of a loader at a time"):
        lipflow.certify(frozen, [[0.0] * 4])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"a network is a module, such as lipflow.load\(name\), not str: 'cpl-fast"):
        lipflow.freeze("cpl-fast-cifar10")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"certify takes a frozen network: lipflow\.freeze\(model\), not Linear"):
        lipflow.certify(nn.Linear(4, 2), torch.rand(1, 4))  # pyright: ignore[reportArgumentType]
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


def test_a_certificate_is_written_of_as_many_images_and_labels(tmp_path):
    frozen, x = lipflow.freeze(nn.Sequential(nn.Linear(4, 2)), in_shape=(4,)), torch.rand(3, 4)
    certificates = lipflow.certify(frozen, x)
    for images, truth in ((x[:2], certificates.label), (x, certificates.label[:2]), (x, certificates.label.double())):
        with pytest.raises(ValueError, match="3 certificates need as many images and integer labels, not"):
            lipflow.certificate.save(tmp_path, frozen, certificates, images, truth)
    assert not list(tmp_path.iterdir())
