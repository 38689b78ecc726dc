"""gated_linear on CUDA devices: one kernel for both products where there is one, else the plain sequence."""

import functools
from collections.abc import Sequence

from torch import Tensor

from fxfuse import choose
from fxfuse.choose import Key
from fxfuse.ops.gated_linear import plain
from fxfuse.ops.gpu.product import Product
from fxfuse.ops.kept import Kept


class GatedSite:
    """gated_linear at one place of a region: right for any tensors, quick for those of the call before."""

    __slots__ = ("act", "act_args", "product")

    def __init__(self, act: str, act_args: Sequence[float] = (), *, only: str | None = None, vouched: bool = False):
        """``only``, ``vouched``: as for ``Product``."""
        self.act, self.act_args = act, act_args
        self.product = Product(act, act_args, gated=True, only=only, vouched=vouched)

    def run(
        self, x: Tensor, gate_weight: Tensor, gate_bias: Tensor | None, up_weight: Tensor, up_bias: Tensor | None
    ) -> Tensor:
        y = self.product.run(x, gate_weight, up_weight, gate_bias, up_bias)
        if y is not None:
            return y
        return plain.gated_linear(x, gate_weight, gate_bias, up_weight, up_bias, self.act, self.act_args)

    def key(
        self, x: Tensor, gate_weight: Tensor, gate_bias: Tensor | None, up_weight: Tensor, up_bias: Tensor | None
    ) -> Key | None:
        """What a choice for this call is kept by; None where there is nothing to choose."""
        return self.product.key(x, gate_weight, up_weight, gate_bias, up_bias)

    def implementations(
        self, x: Tensor, gate_weight: Tensor, gate_bias: Tensor | None, up_weight: Tensor, up_bias: Tensor | None
    ) -> tuple[str, ...]:
        """Names of the kernels that may compute this call."""
        return self.product.implementations(x, gate_weight, up_weight, gate_bias, up_bias)

    def expected(
        self, x: Tensor, gate_weight: Tensor, gate_bias: Tensor | None, up_weight: Tensor, up_bias: Tensor | None
    ) -> str:
        """The implementation that is taken for this call until something is measured."""
        return self.product.expected(x, gate_weight, up_weight, gate_bias, up_bias)


class PackedSite:
    """gated_linear_packed at one place of a region: right for any tensors, quick for those of the call before."""

    __slots__ = ("act", "act_args", "layout", "product", "unpacked", "unpacked_bias")

    def __init__(
        self, act: str, act_args: Sequence[float], layout: str, *, only: str | None = None, vouched: bool = False
    ):
        """``only``, ``vouched``: as for ``Product``."""
        self.act, self.act_args, self.layout = act, act_args, layout
        self.product = Product(act, act_args, gated=True, only=only, vouched=vouched)
        self.unpacked = Kept(lambda weight: plain.unpack(weight, layout, 0))
        self.unpacked_bias = Kept(lambda bias: plain.unpack(bias, layout, 0))

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        halves = self._halves(weight, bias)
        if halves is not None:
            y = self.product.run(x, *halves)
            if y is not None:
                return y
        return plain.gated_linear_packed(x, weight, bias, self.act, self.act_args, self.layout)

    def key(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Key | None:
        """What a choice for this call is kept by; None where there is nothing to choose."""
        halves = self._halves(weight, bias)
        return None if halves is None else self.product.key(x, *halves)

    def implementations(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[str, ...]:
        """Names of the kernels that may compute this call."""
        halves = self._halves(weight, bias)
        return () if halves is None else self.product.implementations(x, *halves)

    def expected(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
        """The implementation that is taken for this call until something is measured."""
        halves = self._halves(weight, bias)
        return choose.PLAIN if halves is None else self.product.expected(x, *halves)

    def _halves(
        self, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None:
        """Weights and biases of gate and up, as kernels read them where they lie: of biases, only whole blocks."""
        if weight.dim() != 2 or weight.shape[0] % 2 or (self.layout not in plain.BLOCKS and bias is not None):
            return None
        gate, up = self.unpacked(weight)
        gate_bias, up_bias = (None, None) if bias is None else self.unpacked_bias(bias)
        return gate, up, gate_bias, up_bias


@functools.lru_cache(maxsize=256)
def _shared(act: str, act_args: tuple[float, ...], _shape: tuple[int, ...]) -> GatedSite:
    """A site for calls that come from no region: one for each operator and shape of weight."""
    return GatedSite(act, act_args)


def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    act: str,
    act_args: Sequence[float] = (),
) -> Tensor:
    site = _shared(act, tuple(act_args), tuple(gate_weight.shape))
    if site.product.fits(x, gate_weight, up_weight, gate_bias, up_bias):
        return site.run(x, gate_weight, gate_bias, up_weight, up_bias)
    return plain.gated_linear(x, gate_weight, gate_bias, up_weight, up_bias, act, act_args)


def gated_linear_packed(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: str, act_args: Sequence[float], layout: str
) -> Tensor:
    if (
        weight.dim() == 2
        and weight.shape[0] % 2 == 0
        and (bias is None or (bias.dim() == 1 and layout in plain.BLOCKS))
    ):
        gate, up = plain.unpack(weight, layout, 0)
        gate_bias, up_bias = (None, None) if bias is None else plain.unpack(bias, layout, 0)
        site = _shared(act, tuple(act_args), tuple(gate.shape))
        if site.product.fits(x, gate, up, gate_bias, up_bias):
            y = site.product.run(x, gate, up, gate_bias, up_bias)
            if y is not None:
                return y
    return plain.gated_linear_packed(x, weight, bias, act, act_args, layout)
