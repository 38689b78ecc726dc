"""gated_linear on the CPU: two oneDNN products, the second one multiplied in its epilogue; else the plain sequence."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from fxfuse.ops import onednn
from fxfuse.ops.activations import activation
from fxfuse.ops.gated_linear import plain
from fxfuse.ops.kept import Kept
from fxfuse.ops.linear_act.cpu import Site


class GatedSite:
    """gated_linear at one place of a region: right for any tensors, quick for those of the call before."""

    __slots__ = ("gate", "up")

    def __init__(self, act: str, act_args: Sequence[float] = ()):
        self.gate, self.up = Site(act, act_args), onednn.Weight()

    def run(
        self, x: Tensor, gate_weight: Tensor, gate_bias: Tensor | None, up_weight: Tensor, up_bias: Tensor | None
    ) -> Tensor:
        gate = self.gate.run(x, gate_weight, gate_bias)
        try:
            # Eager would broadcast a gate of one column; oneDNN multiplies equal shapes.
            if self.up.way(x, up_weight, up_bias) is not None and up_weight.shape == gate_weight.shape:
                return onednn.binary(x, gate, up_weight, up_bias, "mul")
        except onednn.REFUSALS:
            pass
        return gate * F.linear(x, up_weight, up_bias)


class PackedSite:
    """gated_linear_packed at one place of a region: right for any tensors, quick for those of the call before."""

    __slots__ = ("act", "halves", "layout", "unpacked", "unpacked_bias", "whole")

    def __init__(self, act: str, act_args: Sequence[float], layout: str):
        self.act, self.layout = activation(act).of(act_args), layout
        self.whole, self.halves = Site(), GatedSite(act, act_args)
        self.unpacked = Kept(lambda weight: plain.unpack(weight, layout, 0))
        self.unpacked_bias = Kept(lambda bias: plain.unpack(bias, layout, 0))

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        try:
            dense = self.layout in plain.BLOCKS and weight.is_contiguous()
            if dense and self.whole.weight.way(x, weight, bias) is not None:
                gate, up = self.unpacked(weight)
                gate_bias, up_bias = (None, None) if bias is None else self.unpacked_bias(bias)
                return self.halves.run(x, gate, gate_bias, up, up_bias)
        except onednn.REFUSALS:
            pass
        # Halves of other weights are not dense: one product, then its halves.
        gate, up = plain.unpack(self.whole.run(x, weight, bias), self.layout, -1)
        return self.act(gate) * up


def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    act: str,
    act_args: Sequence[float] = (),
) -> Tensor:
    return GatedSite(act, act_args).run(x, gate_weight, gate_bias, up_weight, up_bias)


def gated_linear_packed(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: str, act_args: Sequence[float], layout: str
) -> Tensor:
    return PackedSite(act, act_args, layout).run(x, weight, bias)
