"""Laws that every layer satisfies, as functions to test layers of your own.

    from lipflow.testing import check_layer

    def test_my_layer():
        check_layer(MyLayer(8), in_shape=(8, 6, 6))

Each law is a function. `check_layer` tests them all on a float64 copy in evaluation mode, at random inputs.
"""

import copy
import math
import tempfile
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError, gradcheck

from lipflow import certificate, check
from lipflow.attack import pgd
from lipflow.bound import lipschitz_bound
from lipflow.certificate import certify
from lipflow.frozen import freeze
from lipflow.shapes import Shape, shape_of

ROUNDING = 1e-11  # relative, of float64 Jacobians and norms of a few hundred entries
ESTIMATE_ERROR = 0.01  # relative, of a bound: live layers contain estimates of norms, from below
MAX_NORM = 20.0  # of an input


def check_layer(layer: nn.Module, in_shape: Shape, certified: bool = True, lipschitz: float | None = None) -> None:
    """Raise an AssertionError if a layer breaks a law, and a LoweringError if it cannot be lowered.

    The laws: its Jacobians, and the ratio of distances for pairs of inputs, are at most the bound of
    `lipflow.lipschitz_bound`; its derivatives are right; the batch size and the memory layout do not change its result.
    With `certified`, it can also be frozen, saved and checked, and no attack succeeds within a certified radius.
    With `lipschitz`, that bound is at most this constant, such as 1, up to 1% for estimated norms.
    """
    shape = shape_of(in_shape)
    layer = copy.deepcopy(layer).double().eval()
    layer(inputs(shape, 1))  # layers that learn their input size from the first batch
    bound_is_at_most(layer, shape, lipschitz)
    jacobian_within_bound(layer, shape)
    pairs_never_stretched(layer, shape)
    gradients_are_right(layer, shape)
    batches_and_layouts(layer, shape)
    if certified:
        certificates_hold(layer, shape)


def inputs(shape: Shape, count: int, seed: int = 0) -> Tensor:
    """Random inputs of norm at most MAX_NORM."""
    generator = torch.Generator().manual_seed(seed)
    return _inside(torch.randn(count, *shape, generator=generator, dtype=torch.float64))


def bound_is_at_most(layer: nn.Module, shape: Shape, lipschitz: float | None) -> None:
    """The derived L is at most a constant, if one is given."""
    bound = lipschitz_bound(layer, shape)
    within = lipschitz is None or bound.lipschitz <= lipschitz * (1 + ESTIMATE_ERROR)
    assert within, f"L = {bound.lipschitz:.4g} as derived, above {lipschitz:g}; does the layer need a `lower`?"


def jacobian_within_bound(layer: nn.Module, shape: Shape) -> None:
    """The norm of the Jacobian at every point is at most L."""
    bound = lipschitz_bound(layer, shape, (-MAX_NORM, MAX_NORM))
    for x in inputs(shape, 6, seed=1):
        jacobian = torch.autograd.functional.jacobian(lambda v: layer(v[None])[0].flatten(), x)
        assert isinstance(jacobian, Tensor)
        norm = float(torch.linalg.matrix_norm(jacobian.flatten(1), 2))
        assert norm <= bound.lipschitz * (1 + ROUNDING), f"‖J‖ = {norm}, above {bound}"


def pairs_never_stretched(layer: nn.Module, shape: Shape) -> None:
    """‖f(x) - f(y)‖ ≤ L‖x - y‖ + 2ε for random pairs, also after gradient ascent on ‖f(x) - f(y)‖/‖x - y‖."""
    bound = lipschitz_bound(layer, shape, (-MAX_NORM, MAX_NORM))
    assert math.isfinite(bound.tolerance), f"ε is not finite: {bound}"
    x, y = inputs(shape, 8, seed=2), inputs(shape, 8, seed=3)
    for _ in range(12):
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        before, after = (x - y).flatten(1).norm(dim=1), (layer(x) - layer(y)).flatten(1).norm(dim=1)
        allowed = bound.lipschitz * before * (1 + ROUNDING) + 2 * bound.tolerance
        assert bool((after <= allowed).all()), f"stretched by {(after / before).max().item()}, above {bound}"
        gx, gy = torch.autograd.grad((after / before).sum(), (x, y))
        with torch.no_grad():
            gx, gy = (g / _norms(g).clamp_min(1e-300) for g in (gx, gy))
            x, y = _inside(x + 0.5 * gx), _inside(y + 0.5 * gy)


def gradients_are_right(layer: nn.Module, shape: Shape, fast: bool = False) -> None:
    """Derivatives in the input and in every parameter, backward and forward, agree with finite differences.

    With `fast`, only along random directions, not for every entry.
    """
    x = inputs(shape, 2, seed=4)
    _require_derivatives("its input", layer, (x.requires_grad_(),), fast)
    names = [n for n, p in layer.named_parameters() if p.requires_grad]
    if names:
        values = tuple(p.detach().clone().requires_grad_() for p in layer.parameters() if p.requires_grad)

        def of_parameters(*parameters: Tensor) -> Tensor:
            return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x.detach(),))

        _require_derivatives(", ".join(names), of_parameters, values, fast)


def _require_derivatives(of: str, function: Callable[..., Tensor], at: tuple[Tensor, ...], fast: bool) -> None:
    try:
        gradcheck(function, at, check_forward_ad=True, fast_mode=fast)
    except GradcheckError as error:
        raise AssertionError(
            f"derivatives with respect to {of} are not those of finite differences; is a value detached? "
            f"{str(error).splitlines()[0].rstrip(',')}"
        ) from error


def batches_and_layouts(layer: nn.Module, shape: Shape) -> None:
    """Results in float32, on channels-last inputs and on batches of one agree with the others; a batch may be empty."""
    x = inputs(shape, 3, seed=8)
    y = layer(x)
    if x.ndim == 4:
        torch.testing.assert_close(layer(x.contiguous(memory_format=torch.channels_last)), y, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(layer(x[:1]), y[:1], rtol=1e-9, atol=1e-9)
    none, wanted = layer(x[:0]).shape, (0, *y.shape[1:])
    assert none == wanted, f"an empty batch gives {tuple(none)}, not {wanted}"
    single = copy.deepcopy(layer).float()(x.float())
    assert single.dtype == torch.float32, f"a float32 layer gives {single.dtype} for float32 inputs"
    torch.testing.assert_close(single.double(), y, rtol=1e-3, atol=1e-3)


def certificates_hold(layer: nn.Module, shape: Shape) -> None:
    """The frozen layer has Jacobians within L, the checker accepts it, and no attack succeeds within a radius."""
    scores = nn.Sequential(layer, nn.Flatten())
    if scores(torch.zeros(1, *shape, dtype=torch.float64)).shape[1] == 1:
        scores.append(nn.ZeroPad1d((0, 1)))  # a certificate needs two classes
    frozen = freeze(scores, shape)
    x = torch.rand(3, *shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for one in x:
        copies = one.expand(frozen.classes, *shape).clone().requires_grad_()
        rows = torch.autograd.grad(frozen(copies).diagonal().sum(), copies)[0].flatten(1)
        norm = float(torch.linalg.matrix_norm(rows, 2))
        # The unsolved part of an iteration counts in E and not in L, so a Jacobian may be slightly above L.
        assert norm <= frozen.lipschitz * (1 + 1e-7), f"frozen, ‖J‖ = {norm}, above L = {frozen.lipschitz}"
    found = certify(frozen, x)
    inside = found.radius.clamp(max=1e6) * (1 - 1e-9)
    assert not bool(pgd(frozen, x, found.label, [inside]).success.any()), "an attack found a certified point"
    with tempfile.TemporaryDirectory() as folder:
        certificate.save(folder, frozen, found, x, found.label)
        check.check(folder, full=True)


def _norms(x: Tensor) -> Tensor:
    return x.flatten(1).norm(dim=1).reshape(-1, *[1] * (x.ndim - 1))


def _inside(x: Tensor) -> Tensor:
    return x * (MAX_NORM / _norms(x).clamp_min(MAX_NORM))
