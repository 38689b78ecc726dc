"""gated_linear on the CPU: two oneDNN products, the second one multiplied in its epilogue; else the plain sequence."""

import functools
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from fxfuse import choose
from fxfuse.choose import Key
from fxfuse.ops import onednn, prepack
from fxfuse.ops.activations import activation
from fxfuse.ops.gated_linear import plain
from fxfuse.ops.kept import Kept
from fxfuse.ops.linear_act.cpu import PrepackedSite, Site


class GatedSite:
    """gated_linear at one place of a region: right for any tensors, quick for those of the call before."""

    __slots__ = ("gate", "up")
    product = Site

    def __init__(self, act: str, act_args: Sequence[float] = (), *, weights: onednn.Weights = onednn.Weight):
        op = f"gated_linear {act}"
        self.gate, self.up = self.product(act, act_args, op=op, weights=weights), weights(op=op)

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

    def key(
        self, x: Tensor, gate_weight: Tensor, gate_bias: Tensor | None, up_weight: Tensor, up_bias: Tensor | None
    ) -> Key | None:
        """What a choice for this call is kept by; None where there is nothing to choose."""
        fits = up_weight.shape == gate_weight.shape and onednn.can(x, up_weight, up_bias)
        return self.gate.key(x, gate_weight, gate_bias) if fits else None

    def expected(
        self, x: Tensor, gate_weight: Tensor, gate_bias: Tensor | None, up_weight: Tensor, up_bias: Tensor | None
    ) -> str:
        """The implementation that is taken for this call until something is measured."""
        return self.gate.expected(x, gate_weight, gate_bias)


class PrepackedGatedSite(GatedSite):
    """The same with packed copies of weights, where those are wanted."""

    __slots__ = ()
    product = PrepackedSite
    up: prepack.Weight

    def run(
        self, x: Tensor, gate_weight: Tensor, gate_bias: Tensor | None, up_weight: Tensor, up_bias: Tensor | None
    ) -> Tensor:
        gate = self.gate.run(x, gate_weight, gate_bias)
        try:
            if self.up.way(x, up_weight, up_bias) is not None and up_weight.shape == gate_weight.shape:
                return onednn.binary(x, gate, self.up.operand(x, up_weight), up_bias, "mul")
        except onednn.REFUSALS:
            pass
        return gate * F.linear(x, up_weight, up_bias)


class PackedSite:
    """gated_linear_packed at one place of a region: right for any tensors, quick for those of the call before."""

    __slots__ = ("act", "halves", "layout", "unpacked", "unpacked_bias", "whole")
    product, gated = Site, GatedSite

    def __init__(self, act: str, act_args: Sequence[float], layout: str, *, weights: onednn.Weights = onednn.Weight):
        self.act, self.layout = activation(act).of(act_args), layout
        parts = 2 if layout in plain.BLOCKS else 1
        self.whole = self.product(op=f"gated_linear_packed {act} {layout}", parts=parts, weights=weights)
        self.halves = self.gated(act, act_args, weights=self._of_halves(weights))
        self.unpacked = Kept(lambda weight: plain.unpack(weight, layout, 0))
        self.unpacked_bias = Kept(lambda bias: plain.unpack(bias, layout, 0))

    def _of_halves(self, weights: onednn.Weights) -> onednn.Weights:
        """They run where oneDNN was chosen for the whole."""
        return functools.partial(weights, only=choose.ONEDNN)

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

    def key(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Key | None:
        """What a choice for this call is kept by; None where there is nothing to choose."""
        return self.whole.key(x, weight, bias)

    def expected(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
        """The implementation that is taken for this call until something is measured."""
        return self.whole.expected(x, weight, bias)


class PrepackedPackedSite(PackedSite):
    """The same with copies of the weight in oneDNN's layout, where those are wanted."""

    __slots__ = ()
    product, gated = PrepackedSite, PrepackedGatedSite

    def _of_halves(self, weights: onednn.Weights) -> onednn.Weights:
        return functools.partial(weights, whole=self.whole.weight)


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
