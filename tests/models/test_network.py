"""Networks: what they take for pixels, live as frozen."""

import pytest
import torch

import lipflow
from tests import contract


def test_images_of_more_digits_than_the_weights_are_refused():
    network = lipflow.build("cpl-digits", 3, (1, 4, 4), channels=2, depth=1, inner=2, features=2)
    with pytest.raises(TypeError, match=r"images are torch.float64 and the weights torch.float32; give x.float\(\)"):
        network(torch.rand(2, 1, 4, 4, dtype=torch.float64))
    assert network(torch.rand(2, 1, 4, 4)).dtype == torch.float32
    assert network.double()(torch.rand(2, 1, 4, 4, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("training", [False, True])
def test_bytes_are_read_as_255ths(dtype, training):
    network = lipflow.build("cpl-digits", in_shape=(1, 4, 4)).to(dtype).train(training)
    x = (torch.arange(32) * 8).to(torch.uint8).reshape(2, 1, 4, 4)
    exact = torch.tensor([k / 255 for k in x.flatten().tolist()], dtype=torch.float64).reshape(x.shape)
    state = {name: value.clone() for name, value in network.state_dict().items()}
    scores = network(x)
    network.load_state_dict(state)  # training moves the power iteration on
    assert scores.dtype == dtype
    assert torch.equal(scores, network(exact.to(dtype)))


def test_bytes_mean_the_same_live_and_frozen():
    network = lipflow.build("cpl-digits", in_shape=(1, 4, 4)).eval()
    x = (torch.arange(32) * 8).to(torch.uint8).reshape(2, 1, 4, 4)
    frozen = lipflow.freeze(network)
    # The two differ by their steps, from estimated norms and from certified ones, and by much less than by 255.
    torch.testing.assert_close(network(x).double(), frozen(x), rtol=0, atol=0.05)
    assert float((network(x) - network(x.float())).detach().abs().max()) > 10


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_other_numbers_are_refused_and_quoted(dtype):
    network = lipflow.build("cpl-digits", in_shape=(1, 4, 4))
    with pytest.raises(TypeError, match=f"uint8, or floats in .*not {dtype}"):
        network(torch.zeros(1, 1, 4, 4, dtype=dtype))
    with pytest.raises(TypeError, match=f"Normalize takes pixels as floats .*not {dtype}"):
        lipflow.blocks.Normalize(0.5)(torch.zeros(1, 1, 4, 4, dtype=dtype))


@pytest.mark.parametrize("name", lipflow.list_models())
def test_a_network_is_built_where_and_as_torch_is_told(name):
    with torch.device("meta"):
        assert {value.device.type for value in lipflow.build(name).state_dict().values()} == {"meta"}


@pytest.mark.parametrize("name", [name for name in contract.LAYERS if name.endswith("network")])
def test_a_default_dtype_is_that_of_all_parameters(name):
    torch.set_default_dtype(torch.float64)
    try:
        network = contract.LAYERS[name].make()
    finally:
        torch.set_default_dtype(torch.float32)
    assert {value.dtype for value in network.state_dict().values()} == {torch.float64}


def test_a_network_without_memory_takes_the_tensors_of_a_state_dict():
    network = lipflow.build("cpl-digits").eval()
    with torch.device("meta"):
        other = lipflow.build("cpl-digits").eval()
    other.load_state_dict(network.state_dict(), assign=True)
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(network(x), other(x))
