"""linear and linear_act on CUDA devices: one kernel where there is one that is faster, else the plain sequence."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fxfuse.choose import Key
from fxfuse.ops.activations import activation
from fxfuse.ops.gpu.product import Product
from fxfuse.ops.linear_act import plain


class Site:
    """linear or linear_act at one place of a region: right for any tensors, quick for those of the call before."""

    __slots__ = ("function", "product", "relu")

    def __init__(
        self, act: str = "", act_args: Sequence[float] = (), *, only: str | None = None, vouched: bool = False
    ):
        """``act``: "" for the linear alone; ValueError for an unknown one. ``only``, ``vouched``: see ``Product``."""
        self.function = activation(act).of(act_args) if act else None
        self.product = Product(act, act_args, gated=False, only=only, vouched=vouched)
        self.relu = act == "relu"

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = self.product.run(x, weight, weight, bias, None)
        if y is not None:
            return y
        if self.relu and self.product.vouched and bias is not None and bias.dim() == 1 and x.numel():
            return relu_of_linear(x, weight, bias)
        return self.plain(x, weight, bias)

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = plain.linear(x, weight, bias)
        return product if self.function is None else self.function(product)

    def key(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Key | None:
        """What a choice for this call is kept by; None where there is nothing to choose."""
        return self.product.key(x, weight, weight, bias, None)

    def implementations(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[str, ...]:
        """Names of the kernels that may compute this call."""
        return self.product.implementations(x, weight, weight, bias, None)

    def expected(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
        """The implementation that is taken for this call until something is measured."""
        return self.product.expected(x, weight, weight, bias, None)


def relu_of_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(linear(x, weight, bias)) by the library's own epilogue: cuBLASLt has relu's, which costs nothing.

    Its gelu costs as much as a kernel does (float32: 839 us against 835 of the two, 8192 x 768 x 3072 on an H200).
    """
    y = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t())
    return y.view(*x.shape[:-1], weight.shape[0])


@functools.lru_cache(maxsize=256)
def _shared(act: str, act_args: tuple[float, ...], _shape: tuple[int, ...]) -> Site:
    """A site for calls that come from no region: one for each operator and shape of weight."""
    return Site(act, act_args)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear_act(x, weight, bias, "")


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, act: str, act_args: Sequence[float] = ()) -> Tensor:
    site = _shared(act, tuple(act_args), tuple(weight.shape))
    return (
        site.run(x, weight, bias) if site.product.fits(x, weight, weight, bias, None) else site.plain(x, weight, bias)
    )
