"""Train, certify, save and check a network of these layers: python -m lipflow_layers."""

import tempfile

import torch
from torch import nn
from torch.nn import functional as F

import lipflow
from lipflow import certificate
from lipflow.check import check
from lipflow_layers import LoweredSDPLayer, SDPLayer, TwoBranches, WrongLayer


def network() -> nn.Sequential:
    """A network for images of 8×8 pixels."""
    return nn.Sequential(
        lipflow.blocks.Normalize(0.5),
        lipflow.blocks.SpaceToDepth(2),
        TwoBranches(4),
        nn.Flatten(),
        SDPLayer(64, 128),
        LoweredSDPLayer(64, 128),
        lipflow.blocks.LastLayerNormalization(64, 10),
    )


def main() -> None:
    torch.manual_seed(0)
    data = lipflow.data.load("digits")
    images, labels = lipflow.data.to_unit(data.train.images), data.train.labels
    model = network()
    optimiser = torch.optim.Adam(model.parameters(), 0.005)
    for _ in range(15):
        for batch in torch.randperm(len(images)).split(64):
            optimiser.zero_grad()
            F.multi_margin_loss(model(images[batch]), labels[batch], margin=0.5).backward()
            optimiser.step()

    frozen = lipflow.freeze(model, in_shape=(1, 8, 8))
    for row in frozen.ledger:
        print(f"{row.kind:<12} {row.name:<4} L = {row.lipschitz:.6f}   {row.how}")
    certificates = lipflow.certify(frozen, data.test.images)
    for eps in (None, "36/255", "0.5"):
        print(f"certified at {eps or 0}: {100 * certificates.accuracy(data.test.labels, eps):.1f}%")
    with tempfile.TemporaryDirectory() as folder:
        certificate.save(folder, frozen, certificates, data.test.images, data.test.labels)
        print(f"check accepts: {check(folder, seed=0)}")

    try:
        lipflow.freeze(nn.Sequential(nn.Flatten(), WrongLayer(64, 128)), in_shape=(1, 8, 8))
    except lipflow.LoweringError as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    main()
