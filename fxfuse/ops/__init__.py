"""Fused operators, as plain functions: the targets of the calls in rewritten graphs.

Each has a plain sequence of eager's own operators (the reference, and the fallback), implementations by device, and an
operator of the same name under torch.ops.fxfuse.
"""

from collections.abc import Callable

from torch import Tensor, fx

from fxfuse.ops.activations import ACTIVATIONS, Activation
from fxfuse.ops.gated_linear import LAYOUTS, gated_linear, gated_linear_packed
from fxfuse.ops.gated_linear.cpu import GatedSite, PackedSite
from fxfuse.ops.kept import Kept
from fxfuse.ops.linear_act import linear, linear_act
from fxfuse.ops.linear_act.cpu import Site

SITES: dict[Callable[..., Tensor], tuple[int, Callable[..., Site | GatedSite | PackedSite]]] = {
    linear: (3, Site),
    linear_act: (3, Site),
    gated_linear: (5, GatedSite),
    gated_linear_packed: (3, PackedSite),
}
"""operator -> how many tensors it takes first, and the class of its sites, made of the arguments that follow."""


def site(node: fx.Node) -> tuple[Callable[..., Tensor], tuple[fx.node.Argument, ...]] | None:
    """What runs a node's fused operator behind the door, and its arguments; None where the node calls another function.

    A caller makes one site for each place at which it calls an operator, and asks for it what the door asks: types,
    modes and gradients, and beyond that dtypes and shapes that fit each other.
    """
    if node.op != "call_function" or node.target not in SITES:
        return None
    tensors, make = SITES[node.target]
    return make(*node.args[tensors:]).run, node.args[:tensors]


__all__ = [
    "ACTIVATIONS",
    "LAYOUTS",
    "Activation",
    "Kept",
    "gated_linear",
    "gated_linear_packed",
    "linear",
    "linear_act",
    "site",
]

# Printed and pickled graphs then name a call as users write it: fxfuse.ops.linear_act.
for _function in (gated_linear, gated_linear_packed, linear, linear_act):
    _function.__module__ = __name__
