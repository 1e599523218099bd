"""The proximal map z = argmin ½‖z - x‖² + h·f(z), that is z + h∇f(z) = x, and its implicit derivative.

The objective is 1-strongly convex and (1 + ℓ)-smooth, with ℓ at least h times the smoothness of f. The solver is the
information-theoretic exact method (Taylor and Drori 2023), the first-order method with the best worst case. After
n iterations from z₀, for any such f,

    ‖zₙ - z*‖ ≤ ‖z₀ - z*‖ / √(1 + q·Aₙ),    q = 1/(1 + ℓ),

where A₀ = 0 and Aₙ₊₁ = `_next`(Aₙ, q). The right side decreases like (1 - √q)ⁿ. So a fixed number of iterations has a
known error at every x, and the tolerance ε follows from it. Stopping at a small residual would bound the error only at
the inputs that were solved.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call

from lipflow.flows.field import Convex
from lipflow.node import Node
from lipflow.operators.norm import norm
from lipflow.primitives import LiveProximal, Norm
from lipflow.primitives.declared import declared
from lipflow.primitives.descent import UNSOLVED
from lipflow.rounding import add_up, mul_up, norm_up
from lipflow.shapes import Shape
from lipflow.torch_state import autocasts, is_batch_of_gradients, transformed, without_autocast

Gradient = Callable[[Tensor], Tensor]

MAX_A = 2.0**200  # the iteration stops at a larger Aₙ: zₙ is exact up to rounding by then, and Aₙ would overflow
MIN_SMOOTHNESS = 2.0**-6  # a smaller ℓ is replaced by this: the method divides by 1 - q, and a larger ℓ is valid too
POWER_ITERATIONS = 10  # before a step in training; a solve costs more than this
SMOOTHNESS_SLACK = 1.25  # the solver assumes that ℓ is this many times its estimate, which is from below


def proximal_step(field: Convex, x: Tensor, h: float, iterations: int | None, reflect: bool = False) -> Tensor:
    """The solution z of z + h∇f(z) = x (implicit step), or its reflection 2z - x (midpoint). Both are 1-Lipschitz.

    As I + h∇f is 1-strongly monotone, ‖x - z‖ ≤ h‖∇f(x)‖. The solver starts at x, and at most a known fraction of this
    distance remains: the tolerance ε.
    """
    if isinstance(x, Node):
        return _lower(field, x, h, iterations, reflect)
    if autocasts(x):
        x = x.float()  # autocast may have rounded the input; the solution is computed in float32
    with without_autocast(x):
        ell, count = _plan(field, tuple(x.shape[1:]), h, iterations)
        z = proximal(field.gradient, x, h, ell, count, current_gradient=lambda: _current_gradient(field))
        return 2 * z - x if reflect else z


def _current_gradient(field: Convex) -> Gradient:
    """∇f with the present parameters and buffers: `functional_call` may have replaced them for this call."""
    present = {**dict(field.named_parameters()), **dict(field.named_buffers())}
    return lambda z: -functional_call(field, present, (z,))


def _plan(field: Convex, shape: Shape, h: float, iterations: int | None) -> tuple[float, int]:
    """The ℓ that the solver assumes, and the number of its iterations."""
    ell = SMOOTHNESS_SLACK * h * float(field.smoothness_estimate(shape, POWER_ITERATIONS).detach())
    return ell, iterations_for(ell, UNSOLVED) if iterations is None else iterations


def _lower(field: Convex, x: Node, h: float, iterations: int | None, reflect: bool) -> Node:
    """The proximal step in evaluation mode as a node."""
    shape, parts = tuple(x.shape[1:]), field.parts(x)
    ell, count = _plan(field, shape, h, iterations)
    planned, unsolved = max(ell, MIN_SMOOTHNESS), contraction(ell, count)
    if parts is not None:

        def solve(gradient: Gradient, x: Tensor) -> Tensor:
            return proximal(gradient, x, h, ell, count)

        return LiveProximal(*parts, h, reflect, solve, planned, unsolved)(x)
    at_origin = norm_up(field.gradient(torch.zeros(1, *shape, dtype=x.dtype)))

    def tolerance(norm: Norm, reach: float) -> float:
        smoothness = field.smoothness(shape, norm)
        if mul_up(h, smoothness) > planned:
            return math.inf  # the estimate was too low, so the solver has no known rate
        left = mul_up(unsolved, mul_up(h, add_up(at_origin, mul_up(smoothness, reach))))
        return 2 * left if reflect else left

    def step(z: Tensor) -> Tensor:
        return proximal_step(field, z, h, iterations, reflect)

    return declared(x, type(field).__name__, step, lambda norm: 1.0, tolerance)


def proximal(
    gradient: Gradient,
    x: Tensor,
    h: float,
    ell: float,
    iterations: int,
    current_gradient: Callable[[], Gradient] | None = None,
) -> Tensor:
    """z with z + h∇f(z) ≈ x, after `iterations` steps from z₀ = x; its derivatives are those of the exact z.

    With H = ∇²f(z), (I + hH)⁻¹ is symmetric. So a gradient g at z becomes w = (I + hH)⁻¹g at x, and -w at h∇f(z), as a
    function of the parameters of f. torch.func and forward-mode AD differentiate the iterations. H is computed in the
    backward pass, when the parameters of f may have changed: `current_gradient()` is called now, and fixes them.
    """
    if not torch.compiler.is_compiling() and transformed():
        return _solve(gradient, x, h, ell, iterations)
    with torch.no_grad():
        z = _solve(gradient, x, h, ell, iterations)
    if not torch.is_grad_enabled():
        return z
    linked = x - h * gradient(z)
    if linked.requires_grad:
        fixed = gradient if current_gradient is None else current_gradient()
        limit = 1000 + int(40 * math.sqrt(1 + ell))  # conjugate gradients take about 18√(1 + ℓ) steps in float64
        linked.register_hook(lambda g: g if g is None else _implicit_gradient(fixed, z, h, g, limit))
    return z + (linked - linked.detach())


def contraction(ell: float, iterations: int) -> float:
    """An upper bound on ‖zₙ - z*‖ / ‖z₀ - z*‖."""
    q, a = _inverse_condition(ell), 0.0
    for _ in range(iterations):
        if a > MAX_A:
            break
        a = _next(a, q)
    # Each iteration has sums, products and roots of positive numbers only, fewer than 16 roundings of 2⁻⁵³ each.
    a *= 1 - 16 * (iterations + 1) * 2.0**-52
    return min(1.0, math.nextafter(1 / math.sqrt(1 + q * a), math.inf) * (1 + 2.0**-50))


def iterations_for(ell: float, factor: float) -> int:
    """The least number of iterations whose contraction is at most `factor`."""
    q, a, n = _inverse_condition(ell), 0.0, 0
    while 1 / math.sqrt(1 + q * a) > factor:
        a, n = _next(a, q), n + 1
    return n


def _inverse_condition(ell: float) -> float:
    """q = 1/(1 + ℓ)."""
    if not (math.isfinite(ell) and ell >= 0):
        raise ValueError(f"the proximal step needs a finite smoothness of at least 0, not {ell}")
    return 1 / (1 + max(ell, MIN_SMOOTHNESS))


def _next(a: float, q: float) -> float:
    """Aₙ₊₁ from Aₙ."""
    return ((1 + q) * a + 2 * (1 + math.sqrt((1 + a) * (1 + q * a)))) / (1 - q) ** 2


def _solve(gradient: Gradient, x: Tensor, h: float, ell: float, iterations: int) -> Tensor:
    """The information-theoretic exact method on ½‖z - x‖² + h·f(z) (Taylor and Drori 2023, algorithm 1)."""
    q, a = _inverse_condition(ell), 0.0
    y, z = x, x
    for _ in range(iterations):
        if a > MAX_A:
            break
        following = _next(a, q)
        beta = a / ((1 - q) * following)
        delta = ((1 - q) ** 2 * following - (1 + q) * a) / (2 * (1 + q + q * a))
        middle = (1 - beta) * z + beta * y
        slope = q * (middle - x + h * gradient(middle))  # the gradient of the objective, divided by its smoothness 1/q
        y = middle - slope
        z = (1 - q * delta) * z + q * delta * middle - delta * slope
        a = following
    return z


def _implicit_gradient(gradient: Gradient, z: Tensor, h: float, g: Tensor, limit: int) -> Tensor:
    """w with (I + hH)w = g, H = ∇²f(z), by conjugate gradients on each member of the batch."""
    if is_batch_of_gradients(g):
        raise RuntimeError(
            "an implicit layer takes one gradient at a time; use it without vectorize=True and is_grads_batched=True"
        )
    if torch.is_grad_enabled():
        raise RuntimeError("an implicit layer has no second derivatives; use it without create_graph=True")
    with without_autocast(g), torch.enable_grad():
        point = z.detach().requires_grad_()
        value = gradient(point)

    def apply(w: Tensor) -> Tensor:
        if not value.requires_grad:
            return w  # a constant gradient: H = 0
        with without_autocast(g):
            (hessian,) = torch.autograd.grad(value, point, w, retain_graph=True, allow_unused=True)
        return w if hessian is None else w + h * hessian

    def per_member(t: Tensor) -> Tensor:
        return t.reshape(-1, *[1] * (g.ndim - 1))

    def dot(a: Tensor, b: Tensor) -> Tensor:
        wide = torch.promote_types(a.dtype, torch.float32)
        return per_member((a.to(wide) * b.to(wide)).flatten(1).sum(1))

    largest = per_member(g.abs().flatten(1).amax(1)) if g.numel() else g
    scale = torch.where(largest > 0, largest, torch.ones_like(largest))  # the squares of small gradients underflow
    g = g / scale
    w = torch.zeros_like(g)
    residual = direction = g
    squared = dot(residual, residual)
    target = torch.finfo(g.dtype).eps ** 2 * squared
    for _ in range(limit):
        if not bool((squared > target).any()):
            return w * scale
        product = apply(direction)
        step = squared / torch.where(squared > target, dot(direction, product), torch.ones_like(squared))
        step = torch.where(squared > target, step, torch.zeros_like(step))
        w, residual = w + (step * direction).to(w), residual - (step * product).to(w)
        updated = dot(residual, residual)
        ratio = updated / torch.where(squared > 0, squared, torch.ones_like(squared))
        direction = residual + (ratio * direction).to(w)
        squared = updated
    raise RuntimeError(
        f"the implicit gradient did not converge in {limit} steps: the residual is {float(norm(residual)):.3g}; "
        "use a smaller h"
    )
