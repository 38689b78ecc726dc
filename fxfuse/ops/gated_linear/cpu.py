"""gated_linear on the CPU: two oneDNN products, the second one multiplied in its epilogue; else the plain sequence."""

from collections.abc import Sequence

from torch import Tensor

from fxfuse.ops import onednn
from fxfuse.ops.activations import activation
from fxfuse.ops.gated_linear import plain
from fxfuse.ops.linear_act.cpu import taken


def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    act: str,
    act_args: Sequence[float] = (),
) -> Tensor:
    try:
        # Eager would broadcast a gate of one column; oneDNN multiplies equal shapes.
        if (
            onednn.takes(x, gate_weight, gate_bias)
            and up_weight.shape == gate_weight.shape
            and onednn.fits(up_weight, up_bias, x.dtype, up_weight.shape[0])
        ):
            gate = taken(x, gate_weight, gate_bias, act, act_args)
            return onednn.binary(x, gate, up_weight, up_bias, "mul")
    except onednn.REFUSALS:
        pass
    return plain.gated_linear(x, gate_weight, gate_bias, up_weight, up_bias, act, act_args)


def gated_linear_packed(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: str, act_args: Sequence[float], layout: str
) -> Tensor:
    try:
        if onednn.takes(x, weight, bias):
            if weight.is_contiguous() and layout in ("gate_up", "up_gate"):
                gate_weight, up_weight = plain.unpack(weight, layout, 0)
                gate_bias, up_bias = (None, None) if bias is None else plain.unpack(bias, layout, 0)
                return gated_linear(x, gate_weight, gate_bias, up_weight, up_bias, act, act_args)
            # Halves of other weights are not dense: one product, then its halves.
            gate, up = plain.unpack(onednn.pointwise(x, weight, bias, "none", (), ""), layout, -1)
            return activation(act).apply(gate, *act_args) * up
    except onednn.REFUSALS:
        pass
    return plain.gated_linear_packed(x, weight, bias, act, act_args, layout)
