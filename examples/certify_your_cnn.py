"""Certify your own CNN: replace its layers and train it as before.

    python examples/certify_your_cnn.py

An ordinary CNN can be certified as it is, but the norms of its layers multiply, so its radii are tiny. Here each layer
is replaced by a 1-Lipschitz one. The same training loop, in plain PyTorch, trains both networks:

    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()    →  PadChannels(8), cpl_conv(8, 16)
    nn.MaxPool2d(2)                              →  SpaceToDepth(2)     # a permutation: no information is lost
    nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()   →  cpl_conv(32, 32)
    nn.MaxPool2d(2), nn.Flatten()                →  SpaceToDepth(2), Flatten()
    nn.Linear(128, 10)                           →  cpl_dense(512, 128), LastLayerNormalization(512, 10)
"""

import tempfile

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lipflow
from lipflow import certificate
from lipflow.blocks import LastLayerNormalization, Normalize, PadChannels, SpaceToDepth
from lipflow.check import check


def ordinary() -> nn.Sequential:
    """An ordinary small CNN."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def replaced() -> nn.Sequential:
    """The same CNN with 1-Lipschitz layers. The head has a Lipschitz constant for each pair of classes."""
    return nn.Sequential(
        Normalize(0.5),
        PadChannels(8),
        lipflow.cpl_conv(8, 16),
        SpaceToDepth(2),
        lipflow.cpl_conv(32, 32),
        SpaceToDepth(2),
        nn.Flatten(),
        lipflow.cpl_dense(512, 128),
        LastLayerNormalization(512, 10),
    )


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> None:
    """Train with a margin loss: a radius is a margin divided by a constant."""
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.01, total_steps=epochs * -(-len(images) // 64))
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            loss = F.multi_margin_loss(model(images[batch]), labels[batch], margin=0.7)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()


def main() -> None:
    torch.manual_seed(0)
    data = lipflow.data.load("digits")
    images, labels = lipflow.data.to_unit(data.train.images), data.train.labels
    print("certified up to        0  36/255     0.5  average radius")
    for name, model in (("ordinary", ordinary()), ("replaced", replaced())):
        train(model, images, labels, epochs=20)
        frozen = lipflow.freeze(model.eval(), in_shape=(1, 8, 8))  # float64, all norms bounded from above
        certificates = lipflow.certify(frozen, data.test.images)
        right = certificates.label == data.test.labels
        shares = (right, right & certificates.certified("36/255"), right & certificates.certified("0.5"))
        percents = "".join(f"{100 * share.double().mean():7.2f}%" for share in shares)
        print(f"{name:<15} {percents}  {(certificates.radius * right).mean():.4f}, as L = {frozen.lipschitz:.4g}")
        with tempfile.TemporaryDirectory() as folder:  # files that another program can check
            certificate.save(folder, frozen, certificates, data.test.images, data.test.labels)
            print(f"{'':<15}  check accepts: {check(folder, seed=0)}")


if __name__ == "__main__":
    main()
