"""The public functions, and the operators `fxfuse::linear` and `fxfuse::linear_act`."""

import math
from collections.abc import Sequence

from torch import Tensor

from fxfuse.ops import door
from fxfuse.ops.linear_act import cpu, cuda, plain
from fxfuse.ops.registration import register


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias.

    Shapes: x [..., K], weight [N, K] of any strides, bias [N] or None; returns [..., N] in x's dtype.
    Same dtypes, devices and errors as torch.nn.functional.linear.
    """
    if door.is_open(x, weight, bias):
        return (cuda if x.is_cuda else cpu).linear(x, weight, bias)
    return door.behind(linear, _linear, plain.linear, (x, weight, bias))


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, act: str, act_args: Sequence[float] = ()) -> Tensor:
    """act(x @ weight.T + bias, *act_args).

    Shapes as for `linear`. `act` is a name of fxfuse.ops.activations.ACTIVATIONS (ValueError otherwise); `act_args`
    are its parameters in order, and may be left out where they have defaults.
    """
    if door.is_open(x, weight, bias):
        return (cuda if x.is_cuda else cpu).linear_act(x, weight, bias, act, act_args)
    return door.behind(linear_act, _linear_act, plain.linear_act, (x, weight, bias), (act, act_args))


def _flops(x: tuple[int, ...], weight: tuple[int, ...], *_: object, **__: object) -> int:
    return 2 * math.prod(x) * weight[0]


_linear = register(
    "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", plain.linear, cpu.linear, cuda.linear, _flops
)
_linear_act = register(
    "linear_act(Tensor x, Tensor weight, Tensor? bias, str act, float[] act_args=[]) -> Tensor",
    plain.linear_act,
    cpu.linear_act,
    cuda.linear_act,
    _flops,
)
