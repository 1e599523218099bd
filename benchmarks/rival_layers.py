"""Are lipflow's layers of other methods as fast as the same layers written literally in PyTorch?

    python benchmarks/rival_layers.py             # about four minutes on two cores
    python benchmarks/rival_layers.py --only cayley-kw3

It measures a training step (forward and backward) of layers of cayley-kw3 and soc-10, and of the two networks, and of
the same written as in their papers. Cayley: the transform of rfft2 of the padded kernel, and one product at each
frequency. SOC: the series, convolved term by term, of a kernel that is divided by the least of four norms from power
iteration. Claim: lipflow is not slower. The two alternate, and a time is the least of five (networks: of three).
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from timing import seconds
from torch import Tensor, nn
from torch.nn import functional as F

import lipflow
from lipflow.blocks import cayley_conv, soc_conv

BATCH = 64


def cayley(w: Tensor) -> Tensor:
    """Orthonormal columns, or rows, from any matrices (Trockman and Kolter 2021, section 3)."""
    out, into = w.shape[-2:]
    tall = w if out >= into else w.mH
    u, v = tall[..., : min(into, out), :], tall[..., min(into, out) :, :]
    a = u - u.mH + v.mH @ v
    identity = torch.eye(a.shape[-1], dtype=a.dtype)
    inverse = torch.linalg.inv(identity + a)
    q = torch.cat([inverse @ (identity - a), -2 * v @ inverse], -2)
    return q if out >= into else q.mH


class LiteralCayley(nn.Module):
    """y = F⁻¹ Q(ω) F x with Q the Cayley transform of αŴ(ω)/‖Ŵ‖ (Trockman and Kolter 2021, algorithm 1)."""

    def __init__(self, into: int, out: int, kernel: int, size: int) -> None:
        super().__init__()
        conv = nn.Conv2d(into, out, kernel)
        assert conv.bias is not None
        self.weight, self.bias, self.size = conv.weight, conv.bias, size
        self.alpha = nn.Parameter(conv.weight.detach().norm())

    def forward(self, x: Tensor) -> Tensor:
        n, (out, into) = self.size, self.weight.shape[:2]
        w = torch.fft.rfft2(self.weight, s=(n, n)).permute(2, 3, 0, 1).reshape(-1, out, into)
        q = cayley(self.alpha * w / w.norm())
        spectrum = torch.fft.rfft2(x).permute(2, 3, 1, 0).reshape(-1, into, len(x))
        product = (q @ spectrum).reshape(n, n // 2 + 1, out, len(x)).permute(3, 2, 0, 1)
        return torch.fft.irfft2(product, s=(n, n)) + self.bias[:, None, None]


class LiteralDenseCayley(nn.Module):
    """y = Qx + b with Q the Cayley transform of αW/‖W‖."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        linear = nn.Linear(into, out)
        self.weight, self.bias = linear.weight, linear.bias
        self.alpha = nn.Parameter(linear.weight.detach().norm())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, cayley(self.alpha * self.weight / self.weight.norm()), self.bias)


class LiteralSOC(nn.Module):
    """x + Ax + A²x/2 + …, five convolutions, A skew (Singla and Feizi 2021)."""

    def __init__(self, into: int, out: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.channels, self.out, self.stride = max(into * stride**2, out), out, stride
        shape = (self.channels, self.channels, kernel, kernel)
        self.weight = nn.Parameter(torch.randn(shape) / self.channels**0.5)
        self.bias = nn.Parameter(torch.zeros(out))
        self.vectors = [F.normalize(torch.randn(m.shape[1]), dim=0) for m in self.matrices(self.weight)]

    @staticmethod
    def matrices(w: Tensor) -> list[Tensor]:
        out, into, height, width = w.shape
        return [
            w.permute(0, 2, 1, 3).reshape(out * height, into * width),
            w.permute(0, 3, 1, 2).reshape(out * width, into * height),
            w.reshape(out, -1),
            w.permute(0, 2, 3, 1).reshape(out * height * width, into),
        ]

    def forward(self, x: Tensor) -> Tensor:
        a = (self.weight - self.weight.transpose(0, 1).flip(2, 3)) / 2
        norms = []
        for i, matrix in enumerate(self.matrices(a)):
            with torch.no_grad():
                v = F.normalize(matrix @ self.vectors[i], dim=0)
                self.vectors[i] = u = F.normalize(matrix.T @ v, dim=0)
            norms.append(v @ matrix @ u)
        a = 0.7 * a / torch.stack(norms).amin()
        x = F.pixel_unshuffle(x, self.stride)
        x = F.pad(x, (0, 0, 0, 0, 0, self.channels - x.shape[1]))
        term, total = x, x
        for j in range(1, 6):
            term = F.conv2d(term, a, padding=a.shape[-1] // 2) / j
            total = total + term
        return total[:, : self.out] + self.bias[:, None, None]


class LiteralMaxMin(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        return torch.cat([torch.maximum(a, b), torch.minimum(a, b)], 1)


def literal_kwlarge() -> nn.Module:
    """cayley-kw3: KW-Large, three times as wide."""
    convolutions = [
        LiteralCayley(3, 96, 3, 32),
        nn.Sequential(nn.PixelUnshuffle(2), LiteralCayley(384, 96, 1, 16)),
        LiteralCayley(96, 192, 3, 16),
        nn.Sequential(nn.PixelUnshuffle(2), LiteralCayley(768, 192, 1, 8)),
    ]
    layers = [*convolutions, nn.Sequential(nn.Flatten(), LiteralDenseCayley(192 * 64, 1536))]
    layers += [LiteralDenseCayley(1536, 512)]
    return nn.Sequential(*(m for layer in layers for m in (layer, LiteralMaxMin())), LiteralDenseCayley(512, 10))


def literal_lipconvnet() -> nn.Module:
    """soc-10: five stages of two convolutions."""
    layers, into, channels = [], 3, 32
    for stage in range(5):
        layers += [LiteralSOC(into, channels, 3), LiteralMaxMin()]
        layers += [LiteralSOC(channels, 2 * channels, 3 if stage < 4 else 1, stride=2), LiteralMaxMin()]
        into = channels = 2 * channels
    return nn.Sequential(*layers, LiteralSOC(into, 10, 1), nn.Flatten())


class Row(NamedTuple):
    """The literal form, that of lipflow, and the input: channels and side."""

    literal: Callable[[], nn.Module]
    ours: Callable[[], nn.Module]
    channels: int
    size: int
    repetitions: int = 5


ROWS: dict[str, Row] = {
    "Cayley 3 → 96, 3×3": Row(lambda: LiteralCayley(3, 96, 3, 32), lambda: cayley_conv(3, 96, in_size=(32, 32)), 3, 32),
    "Cayley 96 → 192, 3×3": Row(
        lambda: LiteralCayley(96, 192, 3, 16), lambda: cayley_conv(96, 192, in_size=(16, 16)), 96, 16
    ),
    "SOC 64, 3×3": Row(lambda: LiteralSOC(64, 64, 3), lambda: soc_conv(64, 64, in_size=(16, 16)), 64, 16),
    "SOC 256, 3×3": Row(lambda: LiteralSOC(256, 256, 3), lambda: soc_conv(256, 256, in_size=(8, 8)), 256, 8),
    "cayley-kw3": Row(literal_kwlarge, lambda: lipflow.build("cayley-kw3"), 3, 32, 3),
    "soc-10": Row(literal_lipconvnet, lambda: lipflow.build("soc-10"), 3, 32, 3),
}


def step(layer: nn.Module, x: Tensor) -> None:
    layer(x).square().sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=ROWS, nargs="+", default=list(ROWS))
    torch.manual_seed(0)
    table = Table("", "literal", "lipflow", "literal / lipflow", title=f"a training step, batch {BATCH}")
    for name in parser.parse_args().only:
        literal, ours, channels, size, repetitions = ROWS[name]
        layers, x = [literal().train(), ours().train()], torch.rand(BATCH, channels, size, size, requires_grad=True)
        counts = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        assert counts[0] == counts[1], f"{name}: {counts} parameters"
        times = [[seconds(partial(step, layer, x)) for layer in layers] for _ in range(repetitions + 1)]
        least = [min(column) for column in zip(*times[1:], strict=True)]  # the first repetition warms up
        table.add_row(name, *(f"{1e3 * t:.1f} ms" for t in least), f"{least[0] / least[1]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
