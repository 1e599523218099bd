"""Attack libraries run on our networks, live in float32 and frozen in float64.

Each must break images at a large ε, and no certified image within its radius. `make test` installs them and requires
them (LIPFLOW_CLIENTS=1); otherwise the tests of missing libraries are skipped.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lipflow
from lipflow.attack import SameDtype
from tests.soundness.attack_libraries import broken_inside, exact_square, library

COUNT, LARGE = 12, 2.0

Attack = Callable[[nn.Module, Tensor, Tensor, float], Tensor]  # network, images, labels, ε to images


def _foolbox(name: str) -> Attack:
    def attack(network: nn.Module, x: Tensor, labels: Tensor, eps: float) -> Tensor:
        foolbox = library("foolbox")
        run = getattr(foolbox.attacks, name)(steps=20)
        return run(foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu"), x, labels, epsilons=eps)[1]

    return attack


def torchattacks_pgd(network: nn.Module, x: Tensor, labels: Tensor, eps: float) -> Tensor:
    return library("torchattacks").PGDL2(network, eps=eps, alpha=eps / 5, steps=10)(x, labels)


def torchattacks_apgd(network: nn.Module, x: Tensor, labels: Tensor, eps: float) -> Tensor:
    return library("torchattacks").APGD(network, norm="L2", eps=eps, steps=20, seed=0)(x, labels)


def autoattack(network: nn.Module, x: Tensor, labels: Tensor, eps: float) -> Tensor:
    """All of its attacks, shortened; the campaign runs the standard set, which takes minutes."""
    attacks = ["apgd-ce", "apgd-t", "fab-t", "square"]
    attack = library("pyautoattack").AutoAttack(
        network, norm="L2", eps=eps, seed=0, device="cpu", version="custom", attacks=attacks
    )
    attack.apgd.n_restarts = attack.apgd_targeted.n_restarts = attack.fab.n_restarts = 1
    attack.apgd.n_iter = attack.apgd_targeted.n_iter = attack.fab.n_iter = 10
    attack.apgd_targeted.n_target_classes = attack.fab.n_target_classes = 3
    attack.square.n_queries = 100
    return attack.run_standard_evaluation(x.float(), labels, batch_size=len(x))[0]


ATTACKS: dict[str, Attack] = {
    "foolbox_pgd": _foolbox("L2ProjectedGradientDescentAttack"),
    "foolbox_deepfool": _foolbox("L2DeepFoolAttack"),  # searches for the nearest image; ε is applied at the end
    "torchattacks_pgd": torchattacks_pgd,
    "torchattacks_apgd": torchattacks_apgd,
    "autoattack": autoattack,
}


@pytest.mark.parametrize("network", ["live", "frozen"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_breaks_uncertified_images_only(attack, network, trained):
    model = trained.live if network == "live" else SameDtype(trained.frozen.module())
    dtype = torch.float32 if network == "live" or attack == "autoattack" else torch.float64  # AutoAttack needs float32
    x = trained.x[:COUNT].to(dtype)
    certificates = lipflow.certify(trained.frozen, x)
    predicted, radius = certificates.label, certificates.radius
    middle = float(radius.median()) * (1 - 1e-6)
    assert int((radius > middle).sum()) >= COUNT / 2  # these must not break

    before = model.training
    for eps in (middle, LARGE):
        found = ATTACKS[attack](model, x, predicted, eps).detach().clamp(0, 1)
        assert found.shape == x.shape
        # Libraries leave their balls by rounding errors.
        assert all(exact_square(a, b) <= (eps * (1 + 1e-5)) ** 2 for a, b in zip(x, found, strict=True))
        flipped, inside = broken_inside(trained.frozen, x, found, predicted, radius)
        assert inside == 0, "a certified image was broken"
        if eps == LARGE:
            assert flipped > COUNT / 2, "the attack is too weak"
            with torch.no_grad():
                assert int((model(found).argmax(1) != predicted).sum()) > COUNT / 2
    assert model.training == before


def test_same_dtype_returns_the_dtype_of_its_images(trained):
    x = trained.x[:2]
    wrapped = SameDtype(trained.frozen)
    assert wrapped(x.float()).dtype == torch.float32
    assert torch.equal(wrapped(x), trained.frozen(x))
    assert torch.equal(wrapped(x.float()), trained.frozen(x.float()).float())


def test_library_skips_a_missing_library_unless_all_are_required(monkeypatch):
    for required, error in (("0", pytest.skip.Exception), ("1", ModuleNotFoundError)):
        monkeypatch.setenv("LIPFLOW_CLIENTS", required)
        with pytest.raises(error, match="no_such_library"):
            library("no_such_library")
