"""The public functions, and the operators `fxfuse::gated_linear` and `fxfuse::gated_linear_packed`."""

import math
from collections.abc import Sequence

from torch import Tensor

from fxfuse.ops import door
from fxfuse.ops.gated_linear import cpu, cuda, plain
from fxfuse.ops.registration import register


def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    act: str,
    act_args: Sequence[float] = (),
) -> Tensor:
    """act(x @ gate_weight.T + gate_bias, *act_args) * (x @ up_weight.T + up_bias): GLU and its variants (Shazeer 2020).

    Shapes: x [..., K], both weights [H, K] of any strides, biases [H] or None; returns [..., H] in x's dtype.
    `act` and `act_args` as for `linear_act`. Errors are those of torch.nn.functional.linear and of the product.
    """
    if door.is_open(x, gate_weight, gate_bias) and door.are_plain(up_weight, up_bias):
        return (cuda if x.is_cuda else cpu).gated_linear(x, gate_weight, gate_bias, up_weight, up_bias, act, act_args)
    return door.behind(
        gated_linear,
        _gated_linear,
        plain.gated_linear,
        (x, gate_weight, gate_bias, up_weight, up_bias),
        (act, act_args),
    )


def gated_linear_packed(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: str, act_args: Sequence[float], layout: str
) -> Tensor:
    """act(gate) * up where gate and up are the halves of x @ weight.T + bias.

    Shapes: x [..., K], weight [2H, K] of any strides, bias [2H] or None; returns [..., H] in x's dtype. `layout` is one
    of LAYOUTS (ValueError otherwise) and says which rows are the gate's.
    """
    if door.is_open(x, weight, bias):
        return (cuda if x.is_cuda else cpu).gated_linear_packed(x, weight, bias, act, act_args, layout)
    return door.behind(
        gated_linear_packed,
        _gated_linear_packed,
        plain.gated_linear_packed,
        (x, weight, bias),
        (act, act_args, layout),
    )


def _flops(
    x: tuple[int, ...], gate: tuple[int, ...], gate_bias: object, up: tuple[int, ...], *_: object, **__: object
) -> int:
    return 2 * math.prod(x) * (gate[0] + up[0])


def _packed_flops(x: tuple[int, ...], weight: tuple[int, ...], *_: object, **__: object) -> int:
    return 2 * math.prod(x) * weight[0]


_gated_linear = register(
    "gated_linear(Tensor x, Tensor gate_weight, Tensor? gate_bias, Tensor up_weight, Tensor? up_bias, str act, "
    "float[] act_args=[]) -> Tensor",
    plain.gated_linear,
    cpu.gated_linear,
    cuda.gated_linear,
    _flops,
)
_gated_linear_packed = register(
    "gated_linear_packed(Tensor x, Tensor weight, Tensor? bias, str act, float[] act_args, str layout) -> Tensor",
    plain.gated_linear_packed,
    cpu.gated_linear_packed,
    cuda.gated_linear_packed,
    _packed_flops,
)
