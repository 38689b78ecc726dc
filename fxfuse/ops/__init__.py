"""Fused operators, as plain functions: the targets of the calls in rewritten graphs.

Each has a plain sequence of eager's own operators (the reference, and the fallback), implementations by device, and an
operator of the same name under torch.ops.fxfuse.
"""

from fxfuse.ops.activations import ACTIVATIONS, Activation
from fxfuse.ops.gated_linear import LAYOUTS, gated_linear, gated_linear_packed
from fxfuse.ops.linear_act import linear, linear_act

__all__ = ["ACTIVATIONS", "LAYOUTS", "Activation", "gated_linear", "gated_linear_packed", "linear", "linear_act"]

# Printed and pickled graphs then name a call as users write it: fxfuse.ops.linear_act.
for _function in (gated_linear, gated_linear_packed, linear, linear_act):
    _function.__module__ = __name__
