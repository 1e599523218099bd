"""Evaluation uses the present weights: L of every layer with step 2/ℓ̂ is close to 1 after any change of them."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import lipflow
from lipflow import ConvexPotential, DenseWeight, Flow, Skew

LIMIT = 1.005


def split() -> Flow:
    field = lipflow.ConvexPlusSkew(ConvexPotential(DenseWeight(24, 24)), Skew(DenseWeight(24, 24)))
    return Flow(field, lipflow.Split(lipflow.ExplicitEuler(), lipflow.Midpoint()))


LAYERS = {
    "dense": (lambda: lipflow.cpl_dense(64, 48), (64,)),
    "conv": (lambda: lipflow.cpl_conv(4, 8), (4, 8, 8)),
    "conv, circular": (lambda: lipflow.cpl_conv(4, 3, padding_mode="circular"), (4, 6, 6)),
    "softplus": (lambda: lipflow.cpl_dense(32, 48, sigma="softplus"), (32,)),
    "split": (split, (24,)),
}


def unrelated(p: torch.Tensor) -> torch.Tensor:
    """Weights without relation to the present ones."""
    return torch.cos(torch.arange(p.numel()).reshape(p.shape).double().square() * 0.37).to(p)


def copied_by_data(layer, x):
    for p in layer.parameters():
        p.data.copy_(unrelated(p))
    return layer


def averaged_before_evaluation(layer, x, mode=True):
    average = AveragedModel(layer.train()).train(mode)
    average.update_parameters(copied_by_data(layer, x))
    return average.module.eval()


def averaged_in_evaluation(layer, x):
    return averaged_before_evaluation(layer, x, mode=False)


def stepped_in_evaluation(layer, x):
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.1, fused=True)
    for _ in range(5):
        layer(x).square().sum().backward()
        optimiser.step()
    return layer


def pruned(layer, x):
    for module in list(layer.modules()):
        if isinstance(module, lipflow.flows.Weight):
            prune.l1_unstructured(module, "weight", amount=0.6)
    return layer


def copied_deeply(layer, x):
    return copied_by_data(copy.deepcopy(layer), x)


def pickled(layer, x):
    return copied_by_data(pickle.loads(pickle.dumps(layer)), x)


def loaded(layer, x):
    layer.load_state_dict({k: unrelated(v) if k[-1] != "u" else v for k, v in layer.state_dict().items()})
    return layer


CHANGES = [
    averaged_in_evaluation,
    averaged_before_evaluation,
    copied_by_data,
    stepped_in_evaluation,
    pruned,
    copied_deeply,
    pickled,
    loaded,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", LAYERS)
def test_no_step_is_stale(name, change):
    layer, shape = LAYERS[name][0](), LAYERS[name][1]
    x = torch.randn(3, *shape)
    layer(x)
    layer.eval()(x)
    layer = change(layer, x)
    layer(x)
    assert lipflow.lipschitz_bound(layer, shape).lipschitz <= LIMIT
    torch.testing.assert_close(lipflow.Sequential(layer)(x), layer(x), rtol=1e-5, atol=1e-5)


def test_evaluation_changes_no_buffer_and_gradients_flow_through_the_step():
    layer = lipflow.cpl_dense(6, 9).double().eval()
    before, x = layer.field.weight.u.clone(), torch.randn(2, 6, dtype=torch.float64)

    def of_weight(w):
        return torch.func.functional_call(layer, {"field.weight.weight": w}, (x,))

    assert torch.autograd.gradcheck(of_weight, layer.field.weight.weight)
    assert torch.equal(layer.field.weight.u, before)


def test_a_compiled_network_uses_the_vectors_of_eval():
    chain = copied_by_data(nn.Sequential(lipflow.cpl_dense(16, 12), lipflow.cpl_dense(16, 12)), None)
    x = torch.randn(3, 16)
    compiled = torch.compile(chain.eval(), backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), chain(x))
