"""A plain linear gets the implementation that is faster on its device: on the CPU, oneDNN's on the user's own weight.

linear(x, w, b)  ->  fxfuse.ops.linear(x, w, b)
"""

from __future__ import annotations

from fxfuse.ops import linear, onednn
from fxfuse.rule import Rule


class LowerLinear(Rule):
    kind = "lowered"

    def pattern(self, op, x, w, b):
        return op.linear(x, w, b)

    def check(self, m):
        weight = m.fact("w")
        m.expect(weight is not None and weight.device.type == "cpu" and len(weight.shape) == 2, "not on the CPU")
        m.expect(onednn.may_gain(weight.dtype, *weight.shape, epilogue=m.b is not None), "eager is as fast")

    def rewrite(self, m, graph):
        return graph.call_function(linear, (m.x, m.w, m.b))


RULES = (LowerLinear(),)
