"""A plain linear gets the implementation that is faster on its device, on the model's own weight: on the CPU oneDNN's,
on a GPU kernels that read the weight at the speed of memory for few rows, and hide the bias for many.

linear(x, w, b)  ->  fxfuse.ops.linear(x, w, b)
"""

from __future__ import annotations

from fxfuse.ops import linear, onednn
from fxfuse.ops.gpu.product import unserved
from fxfuse.rule import Rule


class LowerLinear(Rule):
    kind = "lowered"

    def pattern(self, op, x, w, b):
        return op.linear(x, w, b)

    def check(self, m):
        weight = m.fact("w")
        m.expect(weight is not None and len(weight.shape) == 2, "a weight of unknown shape")
        if weight.device.type == "cpu":
            m.expect(onednn.may_gain(weight.dtype, *weight.shape, epilogue=m.b is not None), "eager is as fast")
        else:
            m.expect(weight.device.type == "cuda" and not unserved(weight.dtype, weight.device), "eager is as fast")

    def rewrite(self, m, graph):
        return graph.call_function(linear, (m.x, m.w, m.b))


RULES = (LowerLinear(),)
