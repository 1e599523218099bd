"""Are the layers of the rivals as fast as their own literal forms?

    python benchmarks/rival_layers.py             # about two minutes on two cores

A training step (forward and backward) of layers of cayley-kw3 and soc-10, against the same layer written down as its
paper has it: Cayley as a transform of rfft2 of the padded kernel and one product at each frequency; SOC as the series,
convolved term by term, on a kernel divided by the least of four norms by power iteration. Claim: ours is not slower.
The two take turns, and a time is the least of five.
"""

import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from lipflow.blocks import cayley_conv, soc_conv

BATCH = 64


class LiteralCayley(nn.Module):
    """y = F⁻¹ Q(ω) F x with Q the Cayley transform of αŴ(ω)/‖Ŵ‖ (Trockman and Kolter 2021, algorithm 1)."""

    def __init__(self, into: int, out: int, kernel: int, size: int) -> None:
        super().__init__()
        conv = nn.Conv2d(into, out, kernel)
        self.weight, self.bias, self.size = conv.weight, conv.bias, size
        self.alpha = nn.Parameter(conv.weight.detach().norm())

    def forward(self, x: Tensor) -> Tensor:
        n, (out, into) = self.size, self.weight.shape[:2]
        w = torch.fft.rfft2(self.weight, s=(n, n)).permute(2, 3, 0, 1).reshape(-1, out, into)
        w = self.alpha * w / w.norm()
        tall = w if out >= into else w.mH
        u, v = tall[:, : min(into, out)], tall[:, min(into, out) :]
        a = u - u.mH + v.mH @ v
        identity = torch.eye(a.shape[-1], dtype=a.dtype)
        inverse = torch.linalg.inv(identity + a)
        q = torch.cat([inverse @ (identity - a), -2 * v @ inverse], 1)
        q = q if out >= into else q.mH
        spectrum = torch.fft.rfft2(x).permute(2, 3, 1, 0).reshape(-1, into, len(x))
        product = (q @ spectrum).reshape(n, n // 2 + 1, out, len(x)).permute(3, 2, 0, 1)
        return torch.fft.irfft2(product, s=(n, n)) + self.bias[:, None, None]


class LiteralSOC(nn.Module):
    """x + Ax + A²x/2 + …, five convolutions, A skew (Singla and Feizi 2021)."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, channels, kernel, kernel) / channels**0.5)
        self.bias = nn.Parameter(torch.zeros(channels))
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
        term, total = x, x
        for j in range(1, 6):
            term = F.conv2d(term, a, padding=a.shape[-1] // 2) / j
            total = total + term
        return total + self.bias[:, None, None]


ROWS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, int]]] = {
    "Cayley 3 → 96, 3×3": (lambda: LiteralCayley(3, 96, 3, 32), lambda: cayley_conv(3, 96, in_size=(32, 32)), (3, 32)),
    "Cayley 96 → 192, 3×3": (
        lambda: LiteralCayley(96, 192, 3, 16),
        lambda: cayley_conv(96, 192, in_size=(16, 16)),
        (96, 16),
    ),
    "SOC 64, 3×3": (lambda: LiteralSOC(64, 3), lambda: soc_conv(64, 64, in_size=(16, 16)), (64, 16)),
    "SOC 256, 3×3": (lambda: LiteralSOC(256, 3), lambda: soc_conv(256, 256, in_size=(8, 8)), (256, 8)),
}


def main() -> None:
    torch.manual_seed(0)
    table = Table("layer", "literal", "lipflow", "literal / lipflow", title=f"a training step, batch {BATCH}")
    for name, (literal, ours, (channels, size)) in ROWS.items():
        layers, x = [literal().train(), ours().train()], torch.rand(BATCH, channels, size, size, requires_grad=True)
        least = [float("inf")] * 2
        for turn in range(6):
            for i, layer in enumerate(layers):
                start = time.perf_counter()
                layer(x).square().sum().backward()
                if turn:
                    least[i] = min(least[i], time.perf_counter() - start)
        table.add_row(name, *(f"{1e3 * t:.1f} ms" for t in least), f"{least[0] / least[1]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
