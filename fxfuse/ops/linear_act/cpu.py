"""linear and linear_act on the CPU: oneDNN where it can and pays, else the plain sequence."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fxfuse.ops import onednn
from fxfuse.ops.activations import activation
from fxfuse.ops.linear_act import plain


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    try:
        if onednn.takes(x, weight, bias):
            return onednn.pointwise(x, weight, bias, "none", (), "")
    except onednn.REFUSALS:
        pass
    return plain.linear(x, weight, bias)


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, act: str, act_args: Sequence[float] = ()) -> Tensor:
    try:
        if onednn.takes(x, weight, bias):
            return taken(x, weight, bias, act, act_args)
    except onednn.REFUSALS:
        pass
    return plain.linear_act(x, weight, bias, act, act_args)


def taken(x: Tensor, weight: Tensor, bias: Tensor | None, act: str, act_args: Sequence[float]) -> Tensor:
    """linear_act of operands that oneDNN takes: the activation in the epilogue, or in place on the fresh product."""
    post_op = onednn.POST_OPS.get(act)
    # Of one fp32 row oneDNN computes erf-gelu by another kernel: inf and 3e38 where eager has NaN and inf.
    # With a slope of 0 it makes a number of NaN.
    exact = post_op is not None and not (act == "leaky_relu" and act_args and act_args[0] == 0)
    if not exact or (act == "gelu" and x.numel() == weight.shape[1] and x.dtype is torch.float32):
        return activation(act).apply(onednn.pointwise(x, weight, bias, "none", (), ""), *act_args)
    assert post_op is not None
    attr, scalars, algorithm = post_op
    return onednn.pointwise(x, weight, bias, attr, act_args or scalars, algorithm)
