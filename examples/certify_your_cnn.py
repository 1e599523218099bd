"""Certify your own CNN: swap its layers, train it as before, and get a proof with every answer.

    python examples/certify_your_cnn.py

An ordinary CNN can be certified as it is, but the norms of its layers multiply, and little is left of every radius. So
each layer is swapped for one that does not stretch. The loop is plain PyTorch, and trains both:

    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()    →  PadChannels(8), cpl_conv(8, 16)
    nn.MaxPool2d(2)                              →  SpaceToDepth(2)     # a permutation: nothing is thrown away
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
from lipflow.blocks import Flatten, LastLayerNormalization, Normalize, PadChannels, SpaceToDepth
from lipflow.check import check


def ordinary() -> nn.Sequential:
    """A small CNN as anyone would write it."""
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


def swapped() -> nn.Sequential:
    """The same, of layers that do not stretch; of the head, every pair of classes has a constant of its own."""
    return nn.Sequential(
        Normalize(0.5),
        PadChannels(8),
        lipflow.cpl_conv(8, 16),
        SpaceToDepth(2),
        lipflow.cpl_conv(32, 32),
        SpaceToDepth(2),
        Flatten(),
        lipflow.cpl_dense(512, 128),
        LastLayerNormalization(512, 10),
    )


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> None:
    """The margin that the loss asks for is what becomes a radius."""
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
    for name, model in (("ordinary", ordinary()), ("swapped", swapped())):
        train(model, images, labels, epochs=20)
        frozen = lipflow.freeze(model.eval(), in_shape=(1, 8, 8))  # float64, and every norm bounded from above
        certificates = lipflow.certify(frozen, data.test.images)
        right = certificates.label == data.test.labels
        held = (right, right & certificates.certified("36/255"), right & certificates.certified("0.5"))
        shares = "".join(f"{100 * share.double().mean():7.2f}%" for share in held)
        print(f"{name:<15} {shares}  {(certificates.radius * right).mean():.4f}, as L = {frozen.lipschitz:.4g}")
        with tempfile.TemporaryDirectory() as folder:  # a certificate is a file that another program can check
            certificate.save(folder, frozen, certificates, data.test.images, data.test.labels)
            print(f"{'':<15}  check accepts: {check(folder, seed=0)}")


if __name__ == "__main__":
    main()
