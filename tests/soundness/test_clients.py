"""Attack libraries of others run on our networks as they are: live in float32, frozen in float64.

Each must be seen to break images at a large ε, and to break no certified one within its radius. `make test` installs
them and insists on them (LIPFLOW_CLIENTS=1); elsewhere the test of a library that is missing is skipped.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lipflow
from lipflow.attack import SameDtype
from tests.soundness.clients import broken_inside, client, exact_square

COUNT, LARGE = 12, 2.0

Attack = Callable[[nn.Module, Tensor, Tensor, float], Tensor]  # network, images, labels, ε to images


def _foolbox(name: str) -> Attack:
    def attack(network: nn.Module, x: Tensor, labels: Tensor, eps: float) -> Tensor:
        foolbox = client("foolbox")
        run = getattr(foolbox.attacks, name)(steps=20)
        return run(foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu"), x, labels, epsilons=eps)[1]

    return attack


def torchattacks_pgd(network: nn.Module, x: Tensor, labels: Tensor, eps: float) -> Tensor:
    return client("torchattacks").PGDL2(network, eps=eps, alpha=eps / 5, steps=10)(x, labels)


def torchattacks_apgd(network: nn.Module, x: Tensor, labels: Tensor, eps: float) -> Tensor:
    return client("torchattacks").APGD(network, norm="L2", eps=eps, steps=20, seed=0)(x, labels)


def autoattack(network: nn.Module, x: Tensor, labels: Tensor, eps: float) -> Tensor:
    """All of its attacks, each shortened by its own settings: the standard set takes minutes (see the campaign)."""
    attacks = ["apgd-ce", "apgd-t", "fab-t", "square"]
    attack = client("pyautoattack").AutoAttack(
        network, norm="L2", eps=eps, seed=0, device="cpu", version="custom", attacks=attacks
    )
    attack.apgd.n_restarts = attack.apgd_targeted.n_restarts = attack.fab.n_restarts = 1
    attack.apgd.n_iter = attack.apgd_targeted.n_iter = attack.fab.n_iter = 10
    attack.apgd_targeted.n_target_classes = attack.fab.n_target_classes = 3
    attack.square.n_queries = 100
    return attack.run_standard_evaluation(x.float(), labels, batch_size=len(x))[0]


ATTACKS: dict[str, Attack] = {
    "foolbox_pgd": _foolbox("L2ProjectedGradientDescentAttack"),
    "foolbox_deepfool": _foolbox("L2DeepFoolAttack"),  # looks for the nearest image, and knows of ε only in the end
    "torchattacks_pgd": torchattacks_pgd,
    "torchattacks_apgd": torchattacks_apgd,
    "autoattack": autoattack,
}

# How each network is handed over. AutoAttack computes in float32, and takes no scores of another dtype.
NETWORKS = {
    "live": lambda trained: (trained.live, torch.float32),
    "frozen": lambda trained: (trained.frozen.module(), torch.float64),
    "frozen, scores in float32": lambda trained: (SameDtype(trained.frozen), torch.float32),
}
CASES = [
    (attack, network)
    for attack in ATTACKS
    for network in (("live", "frozen, scores in float32") if attack == "autoattack" else ("live", "frozen"))
]


@pytest.mark.parametrize(("attack", "network"), CASES)
def test_a_client_breaks_what_is_not_certified_and_nothing_else(attack, network, trained):
    torch.manual_seed(0)
    model, dtype = NETWORKS[network](trained)
    x = trained.x[:COUNT].to(dtype)
    certificates = lipflow.certify(trained.frozen, x)
    said, radius = certificates.label, certificates.radius
    middle = float(radius.median()) * (1 - 1e-6)
    assert int((radius > middle).sum()) >= COUNT / 2  # so many would be violations, should they fall

    before = model.training
    for eps in (middle, LARGE):
        found = ATTACKS[attack](model, x, said, eps).detach().clamp(0, 1)
        assert found.shape == x.shape
        # An attack library rounds: a hair outside of its ball is its own affair, far outside is another attack.
        assert all(exact_square(a, b) <= (eps * (1 + 1e-5)) ** 2 for a, b in zip(x, found, strict=True))
        flipped, inside = broken_inside(trained.frozen, x, found, said, radius)
        assert inside == 0, "a certified image was broken"
        if eps == LARGE:
            assert flipped > COUNT / 2, "the attack is too weak to mean anything"
            with torch.no_grad():
                assert int((model(found).argmax(1) != said).sum()) > COUNT / 2
    assert model.training == before


def test_a_wrapped_network_answers_in_kind(trained):
    x = trained.x[:2]
    wrapped = SameDtype(trained.frozen)
    assert wrapped(x.float()).dtype == torch.float32
    assert torch.equal(wrapped(x), trained.frozen(x))
    assert torch.equal(wrapped(x.float()), trained.frozen(x.float()).float())


def test_a_missing_library_is_skipped_but_not_where_all_must_run(monkeypatch):
    monkeypatch.delenv("LIPFLOW_CLIENTS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no_such_library is not installed"):
        client("no_such_library")
    monkeypatch.setenv("LIPFLOW_CLIENTS", "1")
    with pytest.raises(ModuleNotFoundError):
        client("no_such_library")
