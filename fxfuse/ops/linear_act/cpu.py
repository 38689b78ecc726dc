"""linear and linear_act on the CPU: oneDNN where it can and pays, else the plain sequence."""

from collections.abc import Sequence

from torch import Tensor

from fxfuse import choose
from fxfuse.choose import Key
from fxfuse.ops import onednn, prepack
from fxfuse.ops.activations import activation
from fxfuse.ops.linear_act import plain


class Site:
    """linear or linear_act at one place of a region: right for any tensors, quick for those of the call before."""

    __slots__ = ("finish", "function", "weight")

    def __init__(
        self,
        act: str = "",
        act_args: Sequence[float] = (),
        *,
        op: str = "",
        parts: int = 1,
        weights: onednn.Weights = onednn.Weight,
    ):
        """
        Args:
            act: "" for the linear alone; ValueError for an unknown one.
            op, parts: as for ``onednn.Weight``, where this is a part of another operator.
            weights: makes what is known of the weight.
        """
        self.function = activation(act).of(act_args) if act else None
        self.finish = activation(act).over(act_args) if act else None
        self.weight = weights(act, act_args, op=op or (f"linear_act {act}" if act else "linear"), parts=parts)

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        try:
            way = self.weight.way(x, weight, bias)
            if way is not None:
                product = onednn.pointwise(x, weight, bias, *way)
                return product if way is not onednn.NO_POST_OP or self.finish is None else self.finish(product)
        except onednn.REFUSALS:
            pass
        product = plain.linear(x, weight, bias)
        return product if self.function is None else self.function(product)

    def key(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Key | None:
        """What a choice for this call is kept by; None where there is nothing to choose."""
        chosen = onednn.has(x.dtype) and onednn.can(x, weight, bias) and x.numel()
        return self.weight.key(x, weight, bias) if chosen else None

    def expected(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
        """The implementation that is taken for this call until something is measured."""
        bucket = (x.numel() // weight.shape[1]).bit_length()
        return self.weight.expected(x, weight, choose.least_rows(bucket))


class PrepackedSite(Site):
    """The same with packed copies of weights, where those are wanted."""

    __slots__ = ()
    weight: prepack.Weight

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        try:
            way = self.weight.way(x, weight, bias)
            if way is not None:
                product = onednn.pointwise(x, self.weight.operand(x, weight), bias, *way)
                return product if way is not onednn.NO_POST_OP or self.finish is None else self.finish(product)
        except onednn.REFUSALS:
            pass
        product = plain.linear(x, weight, bias)
        return product if self.function is None else self.function(product)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return Site().run(x, weight, bias)


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, act: str, act_args: Sequence[float] = ()) -> Tensor:
    return Site(act, act_args).run(x, weight, bias)
