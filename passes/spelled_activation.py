"""Activations written out by hand become the op that they compute, whatever the order and grouping of the arithmetic.

x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))   ->  F.gelu(x, approximate="tanh")
x/2 (1 + erf(x / sqrt(2)))                      ->  F.gelu(x)
x sigmoid(x)                                    ->  F.silu(x)
x sigmoid(c x)                                  ->  quick_gelu(x, c)
x tanh(softplus(x))                             ->  F.mish(x)
relu(x)^2                                       ->  relu2(x)
max(x, 0)                                       ->  F.relu(x)
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import fx

from fxfuse import algebra
from fxfuse.ops.activations import quick_gelu, relu2
from fxfuse.rule import Rule
from fxfuse.spellings import spell

_TANH = {1: math.sqrt(2 / math.pi), 3: math.sqrt(2 / math.pi) * 0.044715}
_ERF = {1: 1 / math.sqrt(2)}


class _Product(Rule):
    """A product of a constant, x and one other factor that is a function of x."""

    kind = "tidied"

    def pattern(self, op, x, factor):
        return op.any_of("product", ("mul", "div"))

    def split(self, m, *, constant):
        """Bind x and the other factor of constant * x * factor(x)."""
        value, parts, inner = algebra.factors(m.root)
        m.expect(len(parts) == 2 and algebra.same(value, constant) and not m.calls["product"].writes, "another product")
        m.expect(all(not spell(n).writes for n in inner), "writes in place")
        factor, x = parts if self.is_factor(parts[0]) else reversed(parts)
        m.expect(self.is_factor(factor), "another product")
        m.expect(m.facts.is_floating(x), "not known to be floating point, as its op takes")
        m.bindings.update(x=x, factor=factor)
        m.nodes.extend([*inner, factor])

    def is_factor(self, node):
        raise NotImplementedError

    def argument(self, m, node, name):
        """The argument of ``node``, a call of ``name``, as a polynomial in x."""
        call = spell(node)
        m.expect(call is not None and call.name == name and not call.writes, "not {}", name)
        seen: list[fx.Node] = []
        result = algebra.polynomial(call.args["input"], m.x, seen)
        m.expect(result is not None, "not of the value that it multiplies")
        m.nodes.extend(dict.fromkeys(n for n in seen if n not in m.nodes))
        return result


class HandwrittenGelu(_Product):
    def is_factor(self, node):
        return algebra.one_plus(node) is not None and spell(algebra.one_plus(node)[0]) is not None

    def check(self, m):
        self.split(m, constant=0.5)
        curve, _ = algebra.one_plus(m.factor)
        m.nodes.append(curve)
        name = spell(curve).name
        m.expect(name in ("tanh", "erf"), "another curve")
        wanted = _TANH if name == "tanh" else _ERF
        inner = self.argument(m, curve, name)
        m.require(algebra.same(inner, wanted), "looks like gelu, but its constants are {}, not {}", inner, wanted)
        m.bindings["curve"] = name

    def rewrite(self, m, graph):
        return graph.call_function(F.gelu, (m.x,), {"approximate": "tanh" if m.curve == "tanh" else "none"})


class HandwrittenSilu(_Product):
    def is_factor(self, node):
        call = spell(node)
        return call is not None and call.name == "sigmoid"

    def check(self, m):
        self.split(m, constant=1.0)
        scale = self.argument(m, m.factor, "sigmoid")
        m.expect(set(scale) == {1} and scale[1] > 0, "not of a multiple of the value that it multiplies")
        m.bindings["scale"] = scale[1]

    def rewrite(self, m, graph):
        return graph.call_function(F.silu, (m.x,)) if m.scale == 1 else graph.call_function(quick_gelu, (m.x, m.scale))


class HandwrittenMish(_Product):
    def is_factor(self, node):
        call = spell(node)
        return call is not None and call.name == "tanh"

    def check(self, m):
        self.split(m, constant=1.0)
        soft = spell(spell(m.factor).args["input"])
        m.expect(soft is not None and soft.name == "softplus" and soft.args["input"] is m.x, "not of softplus")
        m.expect(soft.args["beta"] == 1 and soft.args["threshold"] == 20, "another softplus")
        m.nodes.append(soft.node)

    def rewrite(self, m, graph):
        return graph.call_function(F.mish, (m.x,))


class SquaredRelu(Rule):
    kind = "tidied"

    def pattern(self, op, x):
        return [op.pow(op.relu(x), 2), op.square(op.relu(x)), op.mul(op.relu(x), op.relu(x))]

    def check(self, m):
        m.expect(len(set(m.nodes)) == 2, "not one value times itself")
        m.nodes = list(dict.fromkeys(m.nodes))

    def rewrite(self, m, graph):
        return graph.call_function(relu2, (m.x,))


RULES = (HandwrittenGelu(), HandwrittenSilu(), HandwrittenMish(), SquaredRelu())
