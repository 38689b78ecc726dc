"""act(linear(x, w, b))  ->  one product whose epilogue is the activation. Also for a bare product with a matrix."""

from __future__ import annotations

import torch

from fxfuse.ops import linear_act
from fxfuse.rule import Rule
from fxfuse.spellings import ACTIVATIONS


class LinearAct(Rule):
    """act(linear(x, w, b)) -> linear_act(x, w, b, act)."""

    def pattern(self, op, x, w, b):
        return op.any_of("act", ACTIVATIONS, op.linear(x, w, b))

    def check(self, m):
        act, _ = m.activation("act")
        m.require_served("w", relu_and_bias=act == "relu" and m.b is not None)

    def rewrite(self, m, graph):
        return graph.call_function(linear_act, (m.x, m.w, m.b, *m.activation("act")))


class MatmulAct(Rule):
    """act(x @ w) -> linear_act(x, w.T, None, act)."""

    def pattern(self, op, x, w):
        return op.any_of("act", ACTIVATIONS, op.any_of("product", ("matmul", "mm"), x, w))

    def check(self, m):
        m.require_weight("w")
        m.activation("act")
        m.require_served("w")
        if m.op("product") == "mm":
            m.require_rank("x", 2, "torch.mm takes two dimensions only")

    def rewrite(self, m, graph):
        w = graph.call_function(torch.t, (m.w,))
        return graph.call_function(linear_act, (m.x, w, None, *m.activation("act")))


RULES = (LinearAct(), MatmulAct())
