"""Fused operators, as plain functions: the targets of the calls in rewritten graphs.

Each has a plain sequence of eager's own operators (the reference, and the fallback), implementations by device, and an
operator of the same name under torch.ops.fxfuse.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxfuse import choose
from fxfuse.ops import door, onednn, prepack
from fxfuse.ops.activations import ACTIVATIONS, Activation
from fxfuse.ops.gated_linear import LAYOUTS, gated_linear, gated_linear_packed
from fxfuse.ops.gated_linear import cuda as gated_linear_cuda
from fxfuse.ops.gated_linear.cpu import GatedSite, PackedSite, PrepackedGatedSite, PrepackedPackedSite
from fxfuse.ops.kept import Kept
from fxfuse.ops.linear_act import cuda as linear_act_cuda
from fxfuse.ops.linear_act import linear, linear_act
from fxfuse.ops.linear_act.cpu import PrepackedSite, Site

CudaSite = linear_act_cuda.Site | gated_linear_cuda.GatedSite | gated_linear_cuda.PackedSite
AnySite = Site | GatedSite | PackedSite | CudaSite


class Sites(NamedTuple):
    """How an operator's sites are made."""

    tensors: int
    """How many tensors the operator takes first; the class takes the arguments that follow."""
    site: Callable[..., AnySite]
    prepacked: Callable[..., AnySite]
    """The class for a model that packs weights."""
    cuda: Callable[..., CudaSite]
    """The class for CUDA devices."""


SITES: dict[Callable[..., Tensor], Sites] = {
    linear: Sites(3, Site, PrepackedSite, linear_act_cuda.Site),
    linear_act: Sites(3, Site, PrepackedSite, linear_act_cuda.Site),
    gated_linear: Sites(5, GatedSite, PrepackedGatedSite, gated_linear_cuda.GatedSite),
    gated_linear_packed: Sites(3, PackedSite, PrepackedPackedSite, gated_linear_cuda.PackedSite),
}


def site(
    node: fx.Node, store: prepack.Store | None = None, *, vouched: bool = False
) -> tuple[Callable[..., Tensor], tuple[fx.node.Argument, ...]] | None:
    """What runs a node's fused operator behind the door, and its arguments; None where the node calls another function.

    A caller makes one site for each place at which it calls an operator, and asks for it what the door asks: types,
    modes and gradients. ``vouched``: and that shapes of weights and biases are the same at each call, and their dtypes
    alike. ``store`` takes the packed copies of weights.
    """
    if node.op != "call_function" or node.target not in SITES:
        return None
    sites = SITES[node.target]
    tensors, rest = node.args[: sites.tensors], node.args[sites.tensors :]
    made = sites.site(*rest) if store is None else sites.prepacked(*rest, weights=partial(prepack.Weight, store))
    if not torch.cuda.is_available():
        return made.run, tensors
    return OnEither(made.run, sites.cuda(*rest, vouched=vouched).run).run, tensors


class OnEither:
    """A site for the CPU and one for CUDA devices: a model may move from one to the other."""

    __slots__ = ("cpu", "cuda")

    def __init__(self, cpu: Callable[..., Tensor], cuda: Callable[..., Tensor]):
        self.cpu, self.cuda = cpu, cuda

    def run(self, *tensors: Tensor) -> Tensor:
        return self.cuda(*tensors) if tensors[0].is_cuda else self.cpu(*tensors)


def _of_device(target: Callable[..., Tensor], x: Tensor | None) -> Callable[..., AnySite]:
    return SITES[target].cuda if x is not None and x.is_cuda else SITES[target].site


def key(target: Callable[..., Tensor], tensors: Sequence[Tensor | None], rest: Sequence[Any]) -> choose.Key | None:
    """What a choice for this call is kept by; None where there is nothing to choose."""
    if not all(tensor is None or type(tensor) in door.PLAIN_TYPES for tensor in tensors):
        return None
    try:
        made: Any = _of_device(target, tensors[0])(*rest)
        found: choose.Key | None = made.key(*tensors)
        return found
    except onednn.REFUSALS:
        return None


def implementations(
    target: Callable[..., Tensor], tensors: Sequence[Tensor | None], rest: Sequence[Any], *, pack: bool
) -> tuple[str, ...]:
    """The names of those that this call may choose from, the one that asks for least first."""
    if tensors[0] is not None and tensors[0].is_cuda:
        made: Any = SITES[target].cuda(*rest)
        return (choose.PLAIN, *made.implementations(*tensors))
    return prepack.Weight.choices if pack else onednn.Weight.choices


def expected(target: Callable[..., Tensor], tensors: Sequence[Tensor | None], rest: Sequence[Any]) -> str:
    """The implementation that is taken for a call, one that has a ``key``, until something is measured."""
    made: Any = _of_device(target, tensors[0])(*rest)
    name: str = made.expected(*tensors)
    return name


def fixed(
    target: Callable[..., Tensor], tensors: Sequence[Tensor | None], rest: Sequence[Any], name: str
) -> Callable[..., Tensor]:
    """What runs this call by the implementation ``name``. ``rest``: the operator's arguments after the tensors."""
    sites = SITES[target]
    if tensors[0] is not None and tensors[0].is_cuda:
        return sites.cuda(*rest, only=name).run
    if name == choose.ONEDNN_PACKED:
        return sites.prepacked(*rest, weights=partial(prepack.Weight, prepack.Store(_NO_LIMIT), only=name)).run
    return sites.site(*rest, weights=partial(onednn.Weight, only=name)).run


_NO_LIMIT = 2**63


__all__ = [
    "ACTIVATIONS",
    "LAYOUTS",
    "Activation",
    "Kept",
    "expected",
    "fixed",
    "gated_linear",
    "gated_linear_packed",
    "implementations",
    "key",
    "linear",
    "linear_act",
    "site",
]

# Printed and pickled graphs then name a call as users write it: fxfuse.ops.linear_act.
for _function in (gated_linear, gated_linear_packed, linear, linear_act):
    _function.__module__ = __name__
