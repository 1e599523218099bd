"""A small network, trained on the digits in a few seconds, for the attacks of this folder."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import lipflow
from lipflow.data import Dataset, batches, load, to_unit
from lipflow.losses import MultiMargin

EPOCHS, BATCH, RATE, MARGIN, SEED = 10, 64, 1e-2, 0.5, 0


class Trained(NamedTuple):
    """A live network, its frozen network, and test images in float64 with their certificates."""

    live: lipflow.Network
    frozen: lipflow.Frozen
    data: Dataset
    x: Tensor
    labels: Tensor
    certificates: lipflow.Certificates


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def trained() -> Trained:
    torch.manual_seed(SEED)
    data = load("digits")
    network = lipflow.build("cpl-digits", mean=data.mean[0])
    loss, optimiser = MultiMargin(MARGIN), torch.optim.Adam(network.parameters(), RATE)
    steps = EPOCHS * len(list(batches(len(data.train), BATCH, SEED, 0)))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps)
    for epoch in range(EPOCHS):
        for batch in batches(len(data.train), BATCH, SEED, epoch):
            optimiser.zero_grad()
            loss(network(to_unit(data.train.images[batch])), data.train.labels[batch]).backward()
            optimiser.step()
            schedule.step()
    frozen = lipflow.freeze(network.eval())
    x, labels = to_unit(data.test.images, torch.float64), data.test.labels
    certificates = lipflow.certify(frozen, x)
    assert float((certificates.label == labels).double().mean()) > 0.85, "the network did not learn"
    assert float(certificates.certified("36/255").double().mean()) > 0.5, "too few images are certified"
    return Trained(network, frozen, data, x, labels, certificates)
