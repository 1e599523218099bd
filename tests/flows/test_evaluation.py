"""Evaluation follows the weights as they are, however they got there: L of every layer with a step is close to 1."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import lipflow

LIMIT = 1.005
LAYERS = {
    "dense": (lambda: lipflow.cpl_dense(64, 48), (64,)),
    "conv": (lambda: lipflow.cpl_conv(4, 8), (4, 8, 8)),
    "conv, circular": (lambda: lipflow.cpl_conv(4, 3, padding_mode="circular"), (4, 6, 6)),
    "softplus": (lambda: lipflow.cpl_dense(32, 48, sigma="softplus"), (32,)),
    "split": (
        lambda: lipflow.Flow(
            lipflow.ConvexPlusSkew(
                lipflow.ConvexPotential(lipflow.DenseWeight(24, 24)), lipflow.Skew(lipflow.DenseWeight(24, 24))
            ),
            lipflow.Split(lipflow.ExplicitEuler(), lipflow.Midpoint()),
        ),
        (24,),
    ),
}


def rotated(p: torch.Tensor) -> torch.Tensor:
    """Weights that have nothing to do with the ones before."""
    return torch.cos(torch.arange(p.numel()).reshape(p.shape).double().square() * 0.37).to(p)


def averaged_in_evaluation(layer, x):
    average = AveragedModel(layer.train()).eval()
    for p in layer.parameters():
        p.data.copy_(rotated(p))
    average.update_parameters(layer)
    return average.module


def averaged_before_evaluation(layer, x):
    average = AveragedModel(layer.train())
    for p in layer.parameters():
        p.data.copy_(rotated(p))
    average.update_parameters(layer)
    return average.module.eval()


@torch.no_grad()
def copied_in_place(layer, x):
    for p in layer.parameters():
        p.copy_(rotated(p))
    return layer


def copied_by_data(layer, x):
    for p in layer.parameters():
        p.data.copy_(rotated(p))
    return layer


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
    layer.load_state_dict({k: rotated(v) if k[-1] != "u" else v for k, v in layer.state_dict().items()})
    return layer


CHANGES = [
    averaged_in_evaluation,
    averaged_before_evaluation,
    copied_in_place,
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
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(3, *shape)
    layer(x)
    layer.eval()(x)
    layer = change(layer, x)
    layer(x)
    assert lipflow.lipschitz_bound(layer, shape).lipschitz <= LIMIT
    fused = lipflow.Sequential(layer)
    torch.testing.assert_close(fused(x), layer(x), rtol=1e-5, atol=1e-5)


def test_a_network_with_weights_from_elsewhere():
    torch.manual_seed(0)
    network, other = lipflow.build("cpl-digits").eval(), lipflow.build("cpl-digits")
    network(torch.rand(1, *network.in_shape))
    with torch.no_grad():
        for p, q in zip(network.parameters(), other.parameters(), strict=True):
            p.copy_(3 * q)
    layers = [m for m in network.modules() if isinstance(m, lipflow.Flow)]
    shapes = [tuple(layer.field.weight.u.shape) for layer in layers]
    bounds = [lipflow.lipschitz_bound(layer, shape).lipschitz for layer, shape in zip(layers, shapes, strict=True)]
    assert max(bounds) <= LIMIT


def test_evaluation_changes_no_buffer_and_gradients_flow_through_the_step():
    torch.manual_seed(0)
    layer = lipflow.cpl_dense(6, 9).double().eval()
    before = layer.field.weight.u.clone()
    x = torch.randn(2, 6, dtype=torch.float64)
    weight = layer.field.weight.weight

    def of_weight(w):
        return torch.func.functional_call(layer, {"field.weight.weight": w}, (x,))

    assert torch.autograd.gradcheck(of_weight, weight)
    assert torch.equal(layer.field.weight.u, before)


def test_a_compiled_network_takes_the_vectors_of_eval():
    torch.manual_seed(0)
    chain = nn.Sequential(lipflow.cpl_dense(16, 12), lipflow.cpl_dense(16, 12))
    for p in chain.parameters():
        p.data.copy_(rotated(p))
    x = torch.randn(3, 16)
    compiled = torch.compile(chain.eval(), backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), chain(x))
