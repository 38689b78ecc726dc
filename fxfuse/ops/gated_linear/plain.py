"""What eager PyTorch runs: the reference, and the fallback."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from fxfuse.ops.activations import activation

BLOCKS = ("gate_up", "up_gate")
LAYOUTS = (*BLOCKS, "gate_up_strided", "up_gate_strided")
"""Which rows of a packed weight [2H, K] are the gate's: the first half, the last half, the even rows, the odd rows."""


def unpack(packed: Tensor, layout: str, dim: int) -> tuple[Tensor, Tensor]:
    """The gate and up halves of `packed` along `dim`, as views; ValueError for an unknown layout.

    A weight and a bias are taken apart along dim 0, the output of their linear along dim -1.
    """
    if layout in BLOCKS:
        first, second = packed.chunk(2, dim)
    elif layout in ("gate_up_strided", "up_gate_strided"):
        first, second = (packed[::2], packed[1::2]) if dim == 0 else (packed[..., ::2], packed[..., 1::2])
    else:
        raise ValueError(f"unknown layout {layout!r}; known are {', '.join(LAYOUTS)}")
    return (first, second) if layout.startswith("gate") else (second, first)


def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    act: str,
    act_args: Sequence[float] = (),
) -> Tensor:
    gate = activation(act).function(F.linear(x, gate_weight, gate_bias), *act_args)
    return gate * F.linear(x, up_weight, up_bias)


def gated_linear_packed(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: str, act_args: Sequence[float], layout: str
) -> Tensor:
    gate, up = unpack(F.linear(x, weight, bias), layout, -1)
    return activation(act).function(gate, *act_args) * up
