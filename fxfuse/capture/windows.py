"""The sizes of what convolutions, pools and resampling return: rules as in shapes.py."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from math import floor  # by name: the module's own functions are other ones while a trace runs
from typing import Any

from torch import nn

from fxfuse.capture.terms import Known, apply, constant, product, quotient, term

Sizes = tuple[Known, ...]


def _each(value: Any, dims: int) -> tuple[Any, ...]:
    """``2`` and ``(2, 2)`` are the same; one of a tuple stands for all."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * dims if len(values) == 1 else values


def _plus(size: Known, number: int) -> Known:
    return size if number == 0 else apply(operator.add, size, constant(number))


def count(size: Known, kernel: int, stride: int, padding: int, dilation: int) -> Known:
    """How many windows there are: (size + 2 padding - dilation (kernel - 1) - 1) // stride + 1."""
    whole = _plus(size, 2 * padding - dilation * (kernel - 1) - 1 + stride)
    return whole if stride == 1 else apply(operator.floordiv, whole, constant(stride))


def _spans(size: Known, kernel: int, stride: int, padding: int, dilation: int, extra: int) -> Known:
    """What so many windows of a transposed convolution cover."""
    whole = product((size, constant(stride)))
    return _plus(whole, dilation * (kernel - 1) + 1 + extra - 2 * padding - stride)


def _numbers(sizes: Sizes) -> list[int]:
    """Sizes of a weight: numbers, where it is one of the model's."""
    return [s.value for s in sizes if s is not None and s.is_constant]


def _conv(input: Sizes, weight: Sizes, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
          groups: int = 1, *, dims: int) -> Sizes:  # fmt: skip
    kernel, spread = _numbers(weight[2:]), _each(dilation, dims)
    if padding == "same":
        return (*input[: -dims - 1], weight[0], *input[-dims:])
    pad = _each(0 if padding == "valid" else padding, dims)
    found = map(count, input[-dims:], kernel, _each(stride, dims), pad, spread)
    return (*input[: -dims - 1], weight[0], *found)


def _conv_transpose(input: Sizes, weight: Sizes, bias: Any = None, stride: Any = 1, padding: Any = 0,
                    output_padding: Any = 0, groups: int = 1, dilation: Any = 1, *, dims: int) -> Sizes:  # fmt: skip
    every = (_each(value, dims) for value in (stride, padding, dilation, output_padding))
    found = map(_spans, input[-dims:], _numbers(weight[2:]), *every)
    return (*input[: -dims - 1], product((weight[1], constant(groups))), *found)


def _pool(input: Sizes, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
          ceil_mode: Any = False, *, dims: int, **_: Any) -> Sizes:  # fmt: skip
    if ceil_mode:
        raise TypeError("a last window that sticks out")
    kernel = _each(kernel_size, dims)
    every = (_each(value, dims) for value in (stride or kernel, padding, dilation))
    return (*input[:-dims], *map(count, input[-dims:], kernel, *every))


def _avg_pool(input: Sizes, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: Any = False,
              *_: Any, dims: int, **__: Any) -> Sizes:  # fmt: skip
    return _pool(input, kernel_size, stride, padding, 1, ceil_mode, dims=dims)


def _adaptive_pool(input: Sizes, output_size: Any, *, dims: int) -> Sizes:
    wanted = _each(output_size, dims)
    found = (old if new is None else term(new) for old, new in zip(input[-dims:], wanted, strict=True))
    return (*input[:-dims], *found)


def _interpolate(input: Sizes, size: Any = None, scale_factor: Any = None, *_: Any, **__: Any) -> Sizes:
    dims = len(input) - 2
    if size is not None:
        return (*input[:2], *map(term, _each(size, dims)))
    return (*input[:2], *map(_scaled, input[2:], _each(scale_factor, dims)))


def _scaled(size: Known, factor: float) -> Known:
    scaled = apply(operator.mul, size, constant(factor))
    return scaled if isinstance(factor, int) else apply(floor, scaled)


def _pixel_shuffle(input: Sizes, upscale_factor: int) -> Sizes:
    *lead, channels, height, width = input
    each = constant(upscale_factor)
    return (*lead, quotient(channels, constant(upscale_factor**2)), product((height, each)), product((width, each)))


_OF_DIMS: dict[str, Callable[..., Any]] = {
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "max_pool": _pool,
    "avg_pool": _avg_pool,
    "adaptive_avg_pool": _adaptive_pool,
    "adaptive_max_pool": _adaptive_pool,
}
RULES: dict[str, Callable[..., Any]] = {
    f"{name}{dims}d": functools.partial(rule, dims=dims) for name, rule in _OF_DIMS.items() for dims in (1, 2, 3)
} | {"interpolate": _interpolate, "pixel_shuffle": _pixel_shuffle}
"""Name of a function -> its rule."""

_CONV = ("stride", "padding", "dilation")
_OF_CLASS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Conv": ("conv", _CONV),
    "ConvTranspose": ("conv_transpose", (*_CONV, "output_padding", "groups")),
    "MaxPool": ("max_pool", ("kernel_size", "stride", "padding", "dilation", "ceil_mode")),
    "AvgPool": ("avg_pool", ("kernel_size", "stride", "padding", "ceil_mode")),
    "AdaptiveAvgPool": ("adaptive_avg_pool", ("output_size",)),
    "AdaptiveMaxPool": ("adaptive_max_pool", ("output_size",)),
}
ATTRIBUTES: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    getattr(nn, f"{cls}{dims}d"): (f"{function}{dims}d", names)
    for cls, (function, names) in _OF_CLASS.items()
    for dims in (1, 2, 3)
} | {
    nn.Upsample: ("interpolate", ("size", "scale_factor")),
    nn.PixelShuffle: ("pixel_shuffle", ("upscale_factor",)),
}
"""Class -> the function that its forward calls, and the attributes that the sizes of the result follow from."""
