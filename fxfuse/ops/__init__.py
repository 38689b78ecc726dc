"""Fused operators, as plain functions: the targets of the calls in rewritten graphs.

Each has a plain sequence of eager's own operators (the reference, and the fallback), implementations by device, and an
operator of the same name under torch.ops.fxfuse.
"""

from collections.abc import Callable

from torch import Tensor

from fxfuse.ops.activations import ACTIVATIONS, Activation
from fxfuse.ops.gated_linear import LAYOUTS, gated_linear, gated_linear_packed
from fxfuse.ops.gated_linear import cpu as _gated_cpu
from fxfuse.ops.linear_act import cpu as _linear_cpu
from fxfuse.ops.linear_act import linear, linear_act

BEHIND_THE_DOOR: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    linear: _linear_cpu.linear,
    linear_act: _linear_cpu.linear_act,
    gated_linear: _gated_cpu.gated_linear,
    gated_linear_packed: _gated_cpu.gated_linear_packed,
}
"""operator -> what it runs where the door is open, for a caller that has looked at the door once for all of its calls.

Right on every device: what an implementation does not take, it gives to the plain sequence.
"""

__all__ = [
    "ACTIVATIONS",
    "BEHIND_THE_DOOR",
    "LAYOUTS",
    "Activation",
    "gated_linear",
    "gated_linear_packed",
    "linear",
    "linear_act",
]

# Printed and pickled graphs then name a call as users write it: fxfuse.ops.linear_act.
for _function in (gated_linear, gated_linear_packed, linear, linear_act):
    _function.__module__ = __name__
