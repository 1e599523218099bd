"""Learned weights: the size they learn, and the power-iteration vector they carry."""

import pytest
import torch

import lipflow
from lipflow.flows import ConvWeight
from tests.processes import torchrun

DISTRIBUTED = """
import torch, torch.distributed as dist, torch.distributed.nn, lipflow
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)  # ranks start from different weights and see different data
model = torch.nn.Sequential(lipflow.cpl_conv(2, 3, in_size=(5, 5)), torch.nn.Flatten(), lipflow.cpl_dense(50, 7))
model = DistributedDataParallel(model)
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimiser.zero_grad()
    model(torch.randn(4, 2, 5, 5)).square().sum().backward()
    optimiser.step()
state = torch.cat([v.flatten() for v in model.state_dict().values()])
gathered = [torch.empty_like(state) for _ in range(2)]
dist.all_gather(gathered, state)
assert torch.equal(gathered[0], gathered[1])
del model  # it holds the group, whose threads would outlive the interpreter
dist.destroy_process_group()
"""


def test_power_iteration_is_equal_on_every_rank(tmp_path):
    script = tmp_path / "distributed.py"
    script.write_text(DISTRIBUTED)
    torchrun(str(script))


def test_size_is_learned_shown_and_changed():
    layer = lipflow.cpl_conv(3, 4)
    assert "unknown until the first batch" in repr(layer)
    layer(torch.randn(2, 3, 8, 6))
    assert "input 8×6" in repr(layer)
    assert layer(torch.randn(2, 3, 5, 5)).shape == (2, 3, 5, 5)
    assert "input 5×5" in repr(layer)


def test_skew_convolutions_learn_their_size_too():
    layer = lipflow.soc(4, 3)
    with pytest.raises(ValueError, match="has not seen yet"):
        layer.field.operator(None)
    layer(torch.randn(1, 4, 6, 5))
    assert layer.field.operator(None).in_shape == (4, 6, 5)


def test_asking_for_a_bound_changes_nothing():
    layer = lipflow.cpl_conv(3, 4, in_size=(8, 8))
    before = layer.field.weight.u.clone()
    lipflow.lipschitz_bound(layer, in_shape=(3, 5, 5))
    assert torch.equal(layer.field.weight.u, before)


def test_estimates_in_training_approach_the_norm():
    layer = lipflow.cpl_conv(3, 4, in_size=(8, 8)).double()
    x = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    for _ in range(500):
        layer(x)
    op = layer.field.weight.operator(None)
    true = float(lipflow.norm_estimate(op, iterations=3000).detach())
    assert float(layer.field.weight.estimate(op).detach()) == pytest.approx(true, rel=1e-5)


def test_a_first_batch_in_inference_mode_leaves_a_layer_that_can_learn():
    x = torch.rand(2, 2, 4, 4)
    for mode in (True, False):
        layer = lipflow.cpl_conv(2, 3)
        with torch.inference_mode():
            first = layer.train(mode)(x)
        assert layer.field.weight.in_size == (4, 4)
        assert not layer.field.weight.u.is_inference()
        again = lipflow.cpl_conv(2, 3)
        again.load_state_dict(layer.state_dict())
        assert torch.equal(again.eval()(x), first) or mode
        layer.load_state_dict({key: value.clone() for key, value in layer.state_dict().items()})
        layer.train()(x).sum().backward()


def test_a_state_dict_loaded_in_inference_mode_leaves_a_layer_that_can_learn():
    layer, again = lipflow.cpl_conv(2, 3, in_size=(4, 4)), lipflow.cpl_conv(2, 3)
    with torch.inference_mode():
        again.load_state_dict(layer.state_dict())
    again(torch.rand(2, 2, 4, 4)).sum().backward()


def _rotated(rows: int, columns: int) -> torch.Tensor:
    """A weight that has nothing to do with the one a layer began with."""
    return torch.cos(torch.arange(rows * columns).reshape(rows, columns).double().square() * 0.37).float()


def test_an_estimate_is_reset_with_a_weight_that_was_set():
    weight = lipflow.cpl_dense(48, 48).field.weight
    norm = float(torch.linalg.matrix_norm(_rotated(48, 48), 2))
    with torch.no_grad():
        weight.weight.copy_(_rotated(48, 48))
        assert float(weight.estimate(weight.operator(None))) < 0.9 * norm
        weight.reset_estimate()
        assert float(weight.estimate(weight.operator(None))) > 0.95 * norm


@pytest.mark.parametrize("assign", [False, True])
def test_weights_that_come_without_u_are_followed_from_the_start(assign):
    layer = lipflow.cpl_dense(48, 48).eval()
    state = {"field.weight.weight": _rotated(48, 48), "field.bias": torch.zeros(48)}
    layer.load_state_dict(state, strict=False, assign=assign)
    assert lipflow.lipschitz_bound(layer, (48,)).lipschitz < 1.2  # ten iterations from the start
    kept = {**layer.state_dict(), "field.weight.u": torch.ones(48) / 48**0.5}
    layer.load_state_dict(kept)
    assert torch.equal(layer.field.weight.u, kept["field.weight.u"])


def test_zero_weights_are_the_identity():
    layer = lipflow.cpl_dense(6, 5)
    torch.nn.init.zeros_(layer.field.weight.weight)
    x = torch.randn(3, 6)
    assert torch.equal(layer(x), x)
    layer(x).sum().backward()
    assert bool(torch.isfinite(layer.field.weight.weight.grad).all())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: lipflow.cpl_conv(3, 4)(torch.randn(3, 8, 8)),
            r"images \(batch, 3, height, width\), not \(batch, 8, 8\)",
        ),
        (lambda: lipflow.cpl_conv(3, 4)(torch.randn(2, 5, 8, 8)), r"not \(batch, 5, 8, 8\)"),
        (lambda: lipflow.cpl_dense(3, 4)(torch.randn(2, 5)), r"inputs \(..., 3\), not \(2, 5\)"),
        (lambda: lipflow.cpl_conv(3, 4, padding_mode="reflect"), "'zeros' or 'circular', not 'reflect'"),
        (lambda: lipflow.cpl_conv(3, 4, groups=2), "groups=2 must divide both 3 and 4"),
        (lambda: lipflow.cpl_conv(3, 0), "out_channels must be an integer of at least 1, not 0"),
        (lambda: lipflow.cpl_dense(3, 2.5), "out_features must be an integer of at least 1, not 2.5"),
        (
            lambda: lipflow.cpl_conv(1, 1, 9, padding=0)(torch.randn(1, 1, 4, 4)),
            "spans 9 rows does not fit an input of 4",
        ),
        (lambda: ConvWeight(2, 2, padding=-1)(torch.randn(1, 2, 4, 4)), "padding must be at least 0, not -1"),
    ],
)
def test_bad_input_is_answered(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_nan_weights_have_no_bound():
    layer = lipflow.cpl_dense(3, 4)
    with torch.no_grad():
        layer.field.weight.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite weights"):
        lipflow.lipschitz_bound(layer, (3,))


def test_a_sigma_that_learns_is_refused():
    beta = torch.nn.Parameter(torch.ones(()))
    learned = lipflow.Nonlinearity(lambda y: torch.relu(beta * y), 0.0, 1.0)
    for sigma in (learned, lipflow.Nonlinearity(torch.nn.PReLU(), 0.0, 1.0)):
        with pytest.raises(ValueError, match="parameters of its own"):
            lipflow.ConvexPotential(lipflow.DenseWeight(2, 2), sigma)
