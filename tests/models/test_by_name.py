"""Networks by name: the published sizes and layouts, and wrong arguments."""

import pytest
import torch

import lipflow
from lipflow import Network, blocks
from lipflow.flows import Weight
from lipflow.models import MODELS

MILLIONS = {"cpl-s": 41.34, "cpl-m": 78.74, "cpl-l": 236.23, "cpl-xl": 275.69}  # with `inner` of the authors' code
MILLIONS |= {"cpl-fast": 4.378298, "soc-10": 20.9, "soc-20": 27.2, "cayley-kw3": 20.0}

SMALL = {
    "cpl": dict(in_shape=(1, 8, 4), channels=3, depth=2, features=8, depth_linear=1),
    "cpl-fast": dict(in_shape=(1, 8, 8), channels=4, depth=(1, 2), inner=(4, 4), features=8),
    "cayley-kw3": dict(in_shape=(1, 4, 8), channels=2, hidden=6, features=4),
    "bcop-large": dict(in_shape=(1, 4, 8), channels=2, hidden=6, features=4),
    "soc-10": dict(in_shape=(1, 8, 4), channels=2, stages=2, block=1),
    "soc+-10": dict(in_shape=(1, 8, 4), channels=2, stages=2, block=1),
}
every_family = pytest.mark.parametrize("name", SMALL)


def on_meta(name: str, **arguments) -> Network:
    with torch.device("meta"):
        return lipflow.build(name, **arguments)


def modules(network, kind: type) -> list:
    return [m for m in network.modules() if isinstance(m, kind)]


@pytest.mark.parametrize("name", MILLIONS)
def test_numbers_of_parameters_are_the_published_ones(name):
    digits = len(str(MILLIONS[name]).partition(".")[2])
    assert round(sum(p.numel() for p in on_meta(name).parameters()) / 1e6, digits) == MILLIONS[name]


@every_family
@pytest.mark.parametrize("lln", [False, True])
@pytest.mark.parametrize("classes", [2, 100])
def test_any_number_of_classes_can_be_built_and_every_parameter_learns(name, lln, classes):
    if name == "cpl-fast":
        lln = True
    sizes = {**SMALL[name], "channels": 104} if name == "cpl" else SMALL[name]
    network = lipflow.build(name, classes=classes, **sizes, lln=lln)
    scores = network(torch.rand(8, *network.in_shape))
    assert scores.shape == (8, classes)
    assert isinstance(network.head, blocks.LastLayerNormalization if lln else blocks.Truncate)
    assert network.head.pair_constants().shape == (classes, classes)
    scores.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in network.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_network_is_built_on_the_default_device(name):
    assert {value.device.type for value in on_meta(name).state_dict().values()} == {"meta"}


def test_a_thousand_layers_have_finite_gradients():
    network = lipflow.build("cpl", in_shape=(3, 8, 8), depth=1000, channels=30, depth_linear=1, features=8)
    loss = torch.nn.functional.multi_margin_loss(network(torch.rand(2, 3, 8, 8)), torch.tensor([0, 1]))
    loss.backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in network.parameters())
    assert float(network.stages.convolutions[0].field.weight.weight.grad.norm()) > 0


def test_cpl_has_any_depth():
    network = lipflow.build("cpl", in_shape=(3, 8, 8), depth=0, depth_linear=0)
    assert network(torch.rand(2, 3, 8, 8)).shape == (2, 10)


def test_cpl_fast_has_orthonormal_dense_weights_and_nearly_orthonormal_convolutions():
    network = lipflow.build("cpl-fast", 10, (3, 16, 16), channels=12, features=24)
    linear = modules(network.stages.get_submodule("linear"), Weight)
    assert len(linear) == 4
    for weight in linear:
        torch.testing.assert_close(weight.weight @ weight.weight.mT, torch.eye(24), rtol=0, atol=1e-5)
        torch.testing.assert_close((weight.weight @ weight.u).norm(), torch.tensor(1.0))
    kernel = modules(network.stages.get_submodule("at_half"), Weight)[0].weight.detach()
    middle = kernel[:, :, 1, 1]
    torch.testing.assert_close(middle.mT @ middle, torch.eye(12), rtol=0, atol=0.5)
    assert 0 < float(kernel[:, :, 0, 0].abs().max()) < 0.1


@pytest.mark.parametrize(
    ("name", "kernels", "dense", "mean"),
    [
        ("cayley-kw3", "3→96 3×3, 384→96 1×1, 96→192 3×3, 768→192 1×1", [(12288, 1536), (1536, 512), (512, 10)], 0.5),
        ("bcop-large", "3→32 3×3, 128→32 2×2, 32→64 3×3, 256→64 2×2", [(4096, 512), (512, 512), (512, 10)], 0.0),
    ],
)
def test_kwlarge_has_the_published_layout(name, kernels, dense, mean):
    """A strided 3×3 kernel is 1×1 on blocks of 2×2 pixels, and a strided 4×4 kernel is 2×2."""
    network = on_meta(name)
    convolutions, linear = (modules(stage, blocks.Affine) for stage in (network.stages[1], network.stages[3]))
    found = []
    for weight in (layer.weight for layer in convolutions):
        bcop = isinstance(weight, blocks.BlockConvolution)
        sides = [weight.axes.count(axis) + 1 for axis in (0, 1)] if bcop else weight.weight.weight.shape[2:]
        found.append("{}→{} {}×{}".format(*weight.channels, *sides))
    assert ", ".join(found) == kernels
    assert [layer.weight.channels for layer in linear] == dense
    assert network.stages.center.std is None
    small = lipflow.build(name, in_shape=(3, 4, 4), channels=2, hidden=2, features=2)
    assert small.stages.center.mean.tolist() == [mean]


@pytest.mark.parametrize(("name", "depth"), [("soc-10", 10), ("soc-20", 20), ("soc+-10", 10), ("soc+-20", 20)])
def test_lipconvnet_has_the_published_layout(name, depth):
    network, plus = on_meta(name), name.startswith("soc+")
    body = network.stages.convolutions
    assert [tuple(s.weight.weight.shape[2:]) for s in modules(body, lipflow.Skew)] == [(3, 3)] * (depth - 1) + [(1, 1)]
    strided = [i for i, layer in enumerate(body) if modules(layer, blocks.SpaceToDepth)]
    assert strided == [depth // 5 * (stage + 1) - 1 for stage in range(5)]
    assert [body[i][0][-1].bias.numel() for i in (0, -1)] == [32, 1024]
    assert len(modules(network, blocks.Householder)) == (depth if plus else 0)
    assert len(modules(network, lipflow.Skew)) == depth + (0 if plus else 1)
    assert all(flow.step == lipflow.Exponential(1.0, 13, 6) for flow in modules(network, lipflow.Flow))
    assert network.stages.center.std.shape == (1,)


@pytest.mark.parametrize(
    ("name", "arguments", "error", "words"),
    [
        ("cpl-xs", {}, ValueError, "there is no model 'cpl-xs'; there are cpl, cpl-s"),
        ("cpl", dict(depht=3), TypeError, "no argument 'depht'; it has channels, depth"),
        ("cpl", dict(in_shape=(32, 32)), ValueError, r"not \(32, 32\)"),
        ("cpl", dict(in_shape=32), ValueError, "not 32"),
        ("cpl", dict(classes=1), ValueError, "at least 2 classes, not 1"),
        ("cpl", dict(classes=2000), ValueError, "2000 classes"),
        ("cpl", dict(channels=2), ValueError, "channels=2"),
        ("cpl", dict(in_shape=(3, 2, 2)), ValueError, "pool=4"),
        ("cpl", dict(inner=2.5), ValueError, "inner must be .*not 2.5"),
        ("cpl", dict(depth=-1), ValueError, "depth must be an integer of at least 0, not -1"),
        ("cpl", dict(depth=10**6), ValueError, "depth must be at most 10000, not 1000000"),
        ("cpl-fast", dict(depth=(1, 10**6)), ValueError, "depth must be at most 10000, not 1000000"),
        ("soc-10", dict(block=10**6), ValueError, "block must be at most 10000, not 1000000"),
        ("soc-10", dict(terms=10**9), ValueError, "at most 10000, not 1000000000"),
        ("cpl-digits", dict(mirror=1), ValueError, "mirror"),
        ("cpl-fast", dict(in_shape=(3, 30, 32)), ValueError, "multiples of 8 with pool=2, not 30×32"),
        ("cpl-fast", dict(channels=8), ValueError, "12 channels"),
        ("cpl-fast", dict(depth=(1, 2, 3)), ValueError, "pairs"),
        ("cpl-fast", dict(depth=3), ValueError, "pairs"),
        ("cpl-fast", dict(depth=(1, -1)), ValueError, "depth must be an integer of at least 0, not -1"),
        ("cpl-fast", dict(inner=(0, 1)), ValueError, "inner must be an integer of at least 1, not 0"),
        ("cpl-fast", dict(lln=False), ValueError, "the model cpl"),
        ("cayley-kw3", dict(family="soc"), ValueError, "one of cayley, bcop, not 'soc'"),
        ("cayley-kw3", dict(in_shape=(3, 30, 32)), ValueError, "30×32"),
        ("cayley-kw3", dict(channels=3), ValueError, "even, not channels=3"),
        ("cayley-kw3", dict(hidden=0), ValueError, "hidden"),
        ("soc-10", dict(in_shape=(3, 28, 28)), ValueError, "28×28"),
        ("soc-10", dict(activation="gelu"), ValueError, "one of maxmin, householder, not 'gelu'"),
        ("soc-10", dict(channels=3), ValueError, "even, not channels=3"),
        ("soc-10", dict(stages=1.5), ValueError, "stages"),
    ],
)
def test_wrong_arguments_are_refused(name, arguments, error, words):
    with pytest.raises(error, match=words):
        lipflow.build(name, **arguments)
