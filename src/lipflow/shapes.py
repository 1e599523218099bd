"""Shapes of inputs, and checks of shapes and sizes."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from torch import Tensor, nn

Shape = tuple[int, ...]
MAX_LAYERS = 10_000


def shape_of(in_shape: Shape) -> Shape:
    """The shape of one input as a tuple; raise if it is not a shape."""
    if not isinstance(in_shape, Sequence) or not all(isinstance(n, int) and n >= 0 for n in in_shape):
        given = "a tensor (of images x it is x.shape[1:])" if isinstance(in_shape, Tensor) else repr(in_shape)
        raise ValueError(
            f"in_shape is the shape of one input, such as (channels, height, width) or (features,), not {given}"
        )
    return tuple(in_shape)


def in_shape_of(module: nn.Module, in_shape: Shape | None) -> Shape:
    """The shape of one input of a module: the given one, or its `in_shape`."""
    if not isinstance(module, nn.Module):
        given = f"{type(module).__name__}: {module!r}" if isinstance(module, str | type) else type(module).__name__
        raise TypeError(f"a network is an nn.Module, such as lipflow.load(name), not {given}")
    known: Any = getattr(module, "in_shape", None)
    if in_shape is None and known is None:
        raise ValueError("give the shape of one input: in_shape=(channels, height, width), or (features,)")
    shape = shape_of(known if in_shape is None else in_shape)
    if known is not None and shape != known:
        raise ValueError(f"this network was built for {known}, not {shape}")
    return shape


def format_batch(shape: Shape) -> str:
    """The shape of a batch of inputs of this shape, as "(batch, 3, 32, 32)"."""
    return f"({', '.join(map(str, ('batch', *shape)))})"


def require_batch(x: Tensor, in_shape: Shape) -> None:
    """Raise unless x is a batch of inputs of a shape."""
    if not isinstance(x, Tensor):
        kind = type(x).__name__
        raise TypeError(f"images are a tensor, not {kind}: use torch.from_numpy, or one batch of a loader at a time")
    shape = tuple(x.shape)
    if shape and shape[1:] == in_shape:
        return
    hint = ""
    if shape == in_shape:
        hint = "; one image is a batch of one, x[None]"
    elif x.ndim == 4 and (shape[3], *shape[1:3]) == in_shape:
        hint = "; channels come first, x.permute(0, 3, 1, 2)"
    raise ValueError(f"this network takes images {format_batch(in_shape)}, not {shape}{hint}")


def require_flat(shape: Shape | None, features: int) -> None:
    """Raise unless an input of a dense layer is one vector: with several, the bias would be added to each of them."""
    if shape is not None and len(shape) != 1:
        raise ValueError(f"a dense layer takes (batch, {features}), not {format_batch(shape)}; flatten it")


def require_images(shape: Shape, channels: int) -> None:
    """Raise if an input of a convolution is not an image with its channels."""
    if len(shape) != 3 or shape[0] != channels:
        raise ValueError(f"this layer takes images (batch, {channels}, height, width), not {format_batch(shape)}")


def require_positive(**sizes: int) -> None:
    """Raise if a size is not an integer of at least 1."""
    require_at_least(1, **sizes)


def require_layers(**counts: int) -> None:
    """Raise if a number of layers is not an integer from 0 to MAX_LAYERS: building more would seem to hang."""
    require_at_least(0, **counts)
    for name, count in counts.items():
        if count > MAX_LAYERS:
            raise ValueError(f"{name} must be at most {MAX_LAYERS}, not {count}")


def require_at_least(least: int, **sizes: int) -> None:
    """Raise if a size is not an integer of at least `least`."""
    for name, size in sizes.items():
        if not isinstance(size, Integral) or isinstance(size, bool) or size < least:
            raise ValueError(f"{name} must be an integer of at least {least}, not {size!r}")
