"""Learned weights: the input size that they learn, and the vector of their power iteration."""

import pytest
import torch

import lipflow
from lipflow.flows import ConvWeight
from tests.processes import torchrun

DISTRIBUTED = """
import torch, torch.distributed as dist, torch.distributed.nn, lipflow
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # ranks have different initial weights and different data
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
del model  # it holds the process group, whose threads would outlive the interpreter
dist.destroy_process_group()
"""


def test_power_iteration_is_equal_on_every_rank(tmp_path):
    script = tmp_path / "distributed.py"
    script.write_text(DISTRIBUTED)
    torchrun(str(script))


@pytest.mark.parametrize("make", [lambda: lipflow.cpl_conv(3, 4), lambda: lipflow.soc(3, 3)])
def test_the_input_size_is_learned_shown_and_changed(make):
    layer = make()
    assert "unknown" in repr(layer)
    with pytest.raises(ValueError, match="in_shape"):
        layer.field.weight.operator(None)
    for height, width in ((8, 6), (5, 5)):
        layer(torch.randn(2, 3, height, width))
        assert f"input {height}×{width}" in repr(layer)
        assert layer.field.weight.operator(None).in_shape == (3, height, width)


def test_estimate_converges_to_the_norm_in_training():
    layer = lipflow.cpl_conv(3, 4, in_size=(8, 8)).double()
    for _ in range(500):
        layer(torch.zeros(1, 3, 8, 8, dtype=torch.float64))
    op = layer.field.weight.operator(None)
    norm = float(lipflow.norm_estimate(op, iterations=3000).detach())
    assert float(layer.field.weight.estimate(op).detach()) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_a_first_batch_in_inference_mode_leaves_a_layer_that_can_learn(training):
    x, layer, again = torch.rand(2, 2, 4, 4), lipflow.cpl_conv(2, 3), lipflow.cpl_conv(2, 3)
    with torch.inference_mode():
        first = layer.train(training)(x)
        again.load_state_dict(layer.state_dict())
    assert not layer.field.weight.u.is_inference()
    assert torch.equal(again.eval()(x), first) or training
    for module in (layer, again):
        module.train()(x).sum().backward()


def unrelated() -> torch.Tensor:
    """A weight without relation to that of a layer."""
    return torch.cos(torch.arange(48 * 48).reshape(48, 48).double().square() * 0.37).float()


def test_reset_estimate_follows_a_weight_that_was_set():
    weight, norm = lipflow.cpl_dense(48, 48).field.weight, float(torch.linalg.matrix_norm(unrelated(), 2))
    with torch.no_grad():
        weight.weight.copy_(unrelated())
        assert float(weight.estimate(weight.operator(None))) < 0.9 * norm
        weight.reset_estimate()
        assert float(weight.estimate(weight.operator(None))) > 0.95 * norm


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_without_u_restarts_the_power_iteration(assign):
    layer = lipflow.cpl_dense(48, 48).eval()
    state = {"field.weight.weight": unrelated(), "field.bias": torch.zeros(48)}
    layer.load_state_dict(state, strict=False, assign=assign)
    assert lipflow.lipschitz_bound(layer, (48,)).lipschitz < 1.2  # ten iterations
    state = {**layer.state_dict(), "field.weight.u": torch.ones(48) / 48**0.5}
    layer.load_state_dict(state)
    assert torch.equal(layer.field.weight.u, state["field.weight.u"])


def test_a_layer_with_zero_weights_is_the_identity():
    layer, x = lipflow.cpl_dense(6, 5), torch.randn(3, 6)
    torch.nn.init.zeros_(layer.field.weight.weight)
    assert torch.equal(layer(x), x)
    layer(x).sum().backward()
    assert bool(torch.isfinite(layer.field.weight.weight.grad).all())


def test_a_layer_with_nan_weights_has_no_bound():
    layer = lipflow.cpl_dense(3, 4)
    with torch.no_grad():
        layer.field.weight.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite weights"):
        lipflow.lipschitz_bound(layer, (3,))
    with pytest.raises(ValueError, match=r"^in 1: the step 2/‖W‖² is nan"):
        lipflow.lipschitz_bound(torch.nn.Sequential(lipflow.cpl_dense(3, 4), layer), (3,))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: lipflow.cpl_conv(3, 4)(torch.randn(3, 8, 8)), r"\(batch, 3, height, width\), not \(batch, 8, 8\)"),
        (lambda: lipflow.cpl_conv(3, 4)(torch.randn(2, 5, 8, 8)), r"not \(batch, 5, 8, 8\)"),
        (lambda: lipflow.cpl_dense(3, 4)(torch.randn(2, 5)), r"not \(2, 5\)"),
        (lambda: lipflow.cpl_dense(4, 4)(torch.zeros(2, 3, 4)), r"not \(batch, 3, 4\)"),
        (lambda: lipflow.cpl_conv(3, 4, padding_mode="reflect"), "'reflect'"),
        (lambda: lipflow.cpl_conv(3, 4, groups=2), "groups=2"),
        (lambda: lipflow.cpl_conv(3, 0), "out_channels"),
        (lambda: lipflow.cpl_conv(3, 4, "3"), r"kernel_size is a number or \(height, width\), not '3'"),
        (lambda: lipflow.cpl_conv(3, 4, (3, 0)), "kernel_size must be an integer of at least 1, not 0"),
        (lambda: lipflow.cpl_conv(3, 4, in_size=8), r"in_size is \(height, width\), not 8"),
        (lambda: lipflow.cpl_dense(3, 2.5), "out_features"),
        (lambda: lipflow.cpl_conv(1, 1, 9, padding=0)(torch.randn(1, 1, 4, 4)), "does not fit"),
        (lambda: ConvWeight(2, 2, padding=-1)(torch.randn(1, 2, 4, 4)), "padding"),
    ],
)
def test_wrong_arguments_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


BETA = torch.nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("function", [lambda y: torch.relu(BETA * y), torch.nn.PReLU()])
def test_a_sigma_with_parameters_is_refused(function):
    with pytest.raises(ValueError, match="parameters"):
        lipflow.cpl_dense(2, 2, sigma=lipflow.Nonlinearity(function, 0.0, 1.0))
