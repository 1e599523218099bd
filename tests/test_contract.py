"""Every layer obeys every law."""

import pytest
import torch
from torch import nn

from lipflow import Assume, testing
from tests import contract


@pytest.mark.parametrize("name", contract.LAYERS)
@pytest.mark.parametrize("law", contract.LAWS, ids=lambda law: law.__name__)
def test_law(law, name):
    law(name)


COMPILED = ["cpl dense", "cpl conv", "cayley dense", "soc conv", "cayley conv, few to many", "bcop", "cpl network"]


@pytest.mark.parametrize("name", COMPILED)
def test_compiles(name):
    layer = contract.make(name)
    x = contract.inputs(name, 3)
    layer(x)
    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    layer.train()
    compiled(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("law", [testing.jacobian_within_bound, testing.pairs_never_stretched])
def test_a_bound_that_is_too_low_breaks_a_law(law):
    torch.manual_seed(0)
    layer = nn.Linear(6, 6).double()
    norm = float(torch.linalg.matrix_norm(layer.weight.detach(), 2))
    law(Assume(layer, norm * (1 + 1e-9)), (6,))
    with pytest.raises(AssertionError):
        law(Assume(layer, 0.9 * norm), (6,))
