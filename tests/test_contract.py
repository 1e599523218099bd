"""Every layer obeys every law."""

import pytest
import torch

import lipflow
from tests import contract

every_layer = pytest.mark.parametrize("name", contract.LAYERS)


@every_layer
@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
def test_jacobian_within_bound(name, trained):
    contract.jacobian_within_bound(name, trained)


@every_layer
@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
def test_pairs_never_stretched(name, trained):
    contract.pairs_never_stretched(name, trained)


@every_layer
def test_gradients_are_right(name):
    contract.gradients_are_right(name)


@every_layer
def test_adjoints_are_exact(name):
    contract.adjoints_are_exact(name)


@every_layer
def test_state_dict_round_trip(name):
    contract.state_dict_round_trip(name)


@every_layer
def test_copies_are_independent(name):
    contract.copies_are_independent(name)


@every_layer
def test_batches_and_layouts(name):
    contract.batches_and_layouts(name)


@every_layer
def test_training_is_finite(name):
    contract.training_is_finite(name)


@pytest.mark.parametrize(
    "name",
    [
        "cpl dense",
        "cpl conv",
        "cayley dense",
        "soc conv",
        "cpl network",
        "cayley conv, few to many",
        "bcop",
        "soc, wider",
    ],
)
def test_compiles(name):
    layer = contract.make(name)
    x = contract.inputs(name, 3)
    layer(x)
    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    layer.train()
    compiled(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_the_contract_has_teeth(monkeypatch):
    """A live CPL whose norm is far under-estimated must break the promise of 1 that a naive bound would make."""
    torch.manual_seed(0)
    layer = lipflow.cpl_dense(6, 9).double().eval()
    u = torch.linalg.svd(layer.field.weight.weight.detach()).Vh[-1]
    monkeypatch.setattr(layer.field.weight, "top_vector", lambda *_: u)
    assert lipflow.lipschitz_bound(layer, (6,)).lipschitz > 2
    x = contract.inputs("cpl dense", 64)
    jacobians = [torch.autograd.functional.jacobian(lambda v: layer(v[None])[0], row) for row in x]
    assert max(float(torch.linalg.matrix_norm(j, 2)) for j in jacobians) > 1.5
