"""Networks: the pixels and dtypes that they take."""

from collections import OrderedDict

import pytest
import torch

import lipflow
from lipflow import Network
from tests import contract


@pytest.fixture
def network() -> Network:
    return lipflow.build("cpl-digits", in_shape=(1, 4, 4)).eval()


BYTES = (torch.arange(32) * 8).to(torch.uint8).reshape(2, 1, 4, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("training", [False, True])
def test_bytes_are_divided_by_255(network, dtype, training):
    network.to(dtype).train(training)
    exact = torch.tensor([k / 255 for k in BYTES.flatten().tolist()], dtype=torch.float64).reshape(BYTES.shape)
    state = {name: value.clone() for name, value in network.state_dict().items()}
    scores = network(BYTES)
    network.load_state_dict(state)  # training changes the vectors of power iteration
    assert scores.dtype == dtype
    assert torch.equal(scores, network(exact.to(dtype)))


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (torch.int64, "uint8, or floats in .*not torch.int64"),
        (torch.complex64, "uint8, or floats in .*not torch.complex64"),
        (torch.float64, r"torch.float64 .*give x.float\(\)"),
    ],
)
def test_images_of_another_dtype_are_refused(network, dtype, words):
    with pytest.raises(TypeError, match=words):
        network(torch.zeros(1, 1, 4, 4, dtype=dtype))
    assert network.double()(torch.zeros(1, 1, 4, 4, dtype=torch.float64)).dtype == torch.float64


def test_normalize_refuses_bytes():
    with pytest.raises(TypeError, match=r"not torch.uint8; give images / 255"):
        lipflow.blocks.Normalize(0.5)(BYTES)


@pytest.mark.parametrize("name", [name for name in contract.LAYERS if name.endswith("network")])
def test_parameters_have_the_default_dtype(name):
    torch.set_default_dtype(torch.float64)
    network = contract.LAYERS[name].make()
    assert {value.dtype for value in network.state_dict().values()} == {torch.float64}


def test_a_meta_network_takes_the_tensors_of_a_state_dict(network):
    with torch.device("meta"):
        other = lipflow.build("cpl-digits", in_shape=(1, 4, 4)).eval()
    other.load_state_dict(network.state_dict(), assign=True)
    assert torch.equal(network(BYTES), other(BYTES))


def test_the_last_stage_is_a_head():
    network = Network(OrderedDict(flatten=torch.nn.Flatten(), last=torch.nn.Linear(4, 2)), (1, 2, 2))
    with pytest.raises(TypeError, match=r"the last stage of a Network is a Head, .* not Linear"):
        _ = network.head
