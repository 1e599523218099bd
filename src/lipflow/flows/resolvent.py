"""(I - αA)⁻¹(I + βA)x for a skew-symmetric operator A: the implicit steps of a linear flow.

A dense layer inverts one matrix. A circular convolution inverts a small one at each frequency, where A is the
skew-Hermitian matrix Â(ω).
"""

import torch
from torch import Tensor

from lipflow.flows.field import Skew
from lipflow.operators import ConvOperator, DenseOperator, LinearOperator
from lipflow.operators.fourier import phases, symbol
from lipflow.operators.multiplier import multiply
from lipflow.torch_state import without_autocast

MAX_BATCHED_ROWS = 128  # of the matrices that torch inverts in batches


def resolvent_step(field: Skew, x: Tensor, alpha: float, beta: float) -> Tensor:
    """(I - αA)⁻¹(I + βA)x with β ∈ {0, α}: it preserves norms for β = α (Cayley), and contracts for β = 0.

    For skew A, ‖(I ± αA)x‖² = ‖x‖² + α²‖Ax‖², the same for both signs and at least ‖x‖².
    """
    m = field.weight(x)
    matrices = field.cached(lambda: resolvent(field.skew(m), alpha, beta), m, alpha, beta)
    return x @ matrices.mT if matrices.ndim == 2 else multiply(matrices, x)


def resolvent(op: LinearOperator, alpha: float, beta: float) -> Tensor:
    """(I - αA)⁻¹(I + βA) = (1 + β/α)(I - αA)⁻¹ - (β/α)I, as a matrix or as one at each frequency.

    I - αA is invertible, because the eigenvalues of A are imaginary.
    """
    assert isinstance(op, DenseOperator | ConvOperator)
    a = op.weight if isinstance(op, DenseOperator) else symbols(op)
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    with without_autocast(a):
        return (1 + beta / alpha) * inverse(identity - alpha * a) - (beta / alpha) * identity


def inverse(a: Tensor) -> Tensor:
    """A⁻¹ of each of a batch of square matrices.

    On a CPU after torch.set_num_threads(2), torch.linalg.inv returns wrong inverses of a batch of matrices with 151
    rows, without an error (pytorch issue 142815). We measured right inverses at 128 rows and wrong ones at 160.
    Single matrices are inverted correctly.
    """
    if a.ndim == 2 or not a.numel() or a.device.type != "cpu" or a.shape[-1] <= MAX_BATCHED_ROWS:
        return torch.linalg.inv(a)
    return torch.stack([torch.linalg.inv(matrix) for matrix in a.flatten(0, -3)]).reshape(a.shape)


def symbols(op: ConvOperator) -> Tensor:
    """Â(ω) at the frequencies of rfft2  # (groups, height, width // 2 + 1, channels, channels), complex."""
    height, width = op.rows.size, op.columns.size
    frequencies = torch.arange(height), torch.arange(width // 2 + 1)
    kernel_size, dilation = (op.rows.kernel, op.columns.kernel), (op.rows.dilation, op.columns.dilation)
    cosine, sine = phases(kernel_size, dilation, (height, width), frequencies)
    # Tap j reads at i + dj - p, so its factor is e^{iω(dj - p)}; `symbol` sums the e^{iωdj}, without the padding p.
    phase = torch.complex(*_padding_phase(op, frequencies)).conj()
    with without_autocast(op.kernel):
        parts = [torch.complex(*symbol(kernel, cosine, sine)) for kernel in op.kernel.chunk(op.groups)]
    stacked = torch.stack(parts)
    return (stacked * phase.to(stacked)).unflatten(1, (height, -1))


def _padding_phase(op: ConvOperator, frequencies: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """cos and sin of ω·p for the padding p  # (frequencies, 1, 1): those of the last of p + 1 taps."""
    sides = (op.rows.size, op.columns.size)
    cosine, sine = phases((op.rows.before + 1, op.columns.before + 1), (1, 1), sides, frequencies)
    return cosine[-1].reshape(-1, 1, 1), sine[-1].reshape(-1, 1, 1)
