"""linear(x, weight, bias), and act(linear(x, weight, bias))."""

from fxfuse.ops.linear_act.op import linear, linear_act

__all__ = ["linear", "linear_act"]
