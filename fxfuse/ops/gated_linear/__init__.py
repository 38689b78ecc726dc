"""act(linear(x, gate)) * linear(x, up), with two weights or with one packed weight."""

from fxfuse.ops.gated_linear.op import gated_linear, gated_linear_packed
from fxfuse.ops.gated_linear.plain import LAYOUTS

__all__ = ["LAYOUTS", "gated_linear", "gated_linear_packed"]
