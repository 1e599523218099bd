"""The layouts of CIFAR, small."""

import pytest

from lipflow.data.cifar import Layout
from tests.data.cifar_copies import SMALL


@pytest.fixture(params=SMALL)
def layout(request: pytest.FixtureRequest) -> Layout:
    return SMALL[request.param]
