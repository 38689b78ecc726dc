"""Removes what computes nothing, so that the parts of a pattern come to stand side by side.

x.T.T                     ->  x
w.transpose(-2, -1)       ->  torch.t(w), for a matrix w
dropout(x) that drops nothing, x / 1.0, x * 1, x.view(x.shape)   ->  x
f(x), f(x)                ->  one f(x)
act(view(linear(x)))      ->  view(act(linear(x)))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxfuse.rule import Rule
from fxfuse.spellings import ACTIVATIONS, spell


class MatrixTranspose(Rule):
    """Any spelling of a matrix's transpose -> torch.t."""

    kind = "tidied"
    numerics = "exact"

    def pattern(self, op, x):
        return op.any_of("view", ("transpose", "permute", "getattr"), x)

    def check(self, m):
        fact = m.fact("x")
        m.expect(fact is not None and m.x in m.facts.static and len(fact.shape) == 2, "not known to be a matrix")
        call = m.calls["view"]
        if call.name == "transpose":
            dims = [call.args["dim0"], call.args["dim1"]]
            m.expect(all(isinstance(d, int) for d in dims) and {d % 2 for d in dims} == {0, 1}, "keeps its dimensions")
        elif call.name == "permute":
            m.expect(tuple(call.args["dims"]) in ((1, 0), (-1, 0), (1, -2), (-1, -2)), "keeps its dimensions")
        else:
            m.expect(call.args["name"] in ("T", "mT"), "is no transpose")

    def rewrite(self, m, graph):
        return graph.call_function(torch.t, (m.x,))


class TransposeTwice(Rule):
    """t(t(x)), x.transpose(0, 1).transpose(0, 1), x.T.T, x.permute(1, 2, 0).permute(2, 0, 1) -> x."""

    kind = "tidied"
    numerics = "exact"

    def pattern(self, op, x):
        names = ("transpose", "getattr", "permute")
        return [op.t(op.t(x)), *(op.any_of("outer", (n,), op.any_of("inner", (n,), x)) for n in names)]

    def check(self, m):
        if "outer" in m.calls:
            outer, inner = m.calls["outer"].args, m.calls["inner"].args
            m.expect(_UNDOES[m.op("outer")](outer, inner), "another order of dimensions")
        del m.nodes[1:]  # the inner transpose may serve others

    def rewrite(self, m, graph):
        return m.x


_UNDOES = {
    "transpose": lambda outer, inner: {outer["dim0"], outer["dim1"]} == {inner["dim0"], inner["dim1"]},
    "getattr": lambda outer, inner: outer["name"] == inner["name"] and outer["name"] in ("T", "mT", "H", "mH"),
    "permute": lambda outer, inner: _keeps_order([inner["dims"][d] for d in outer["dims"]]),
}


class PermuteNothing(Rule):
    """x.permute(0, 1, 2) -> x."""

    kind = "tidied"
    numerics = "exact"

    def pattern(self, op, x):
        return op.any_of("view", ("permute",), x)

    def check(self, m):
        m.expect(_keeps_order(m.arg("view", "dims")), "another order of dimensions")

    def rewrite(self, m, graph):
        return m.x


class IdleDropout(Rule):
    """dropout(x) with p = 0 or outside of training -> x, which is what it returns."""

    kind = "tidied"
    numerics = "exact"

    def pattern(self, op, x):
        return op.any_of("drop", ("dropout",), x)

    def check(self, m):
        m.expect(m.arg("drop", "training") is False or m.arg("drop", "p") == 0, "it drops")

    def rewrite(self, m, graph):
        return m.x


class TimesOne(Rule):
    """x / 1.0, x * 1 -> x, for floating-point x."""

    kind = "tidied"
    numerics = "exact"
    unites = "x"

    def pattern(self, op, x):
        return [op.div(x, 1), op.mul(x, 1)]

    def check(self, m):
        m.expect(m.facts.is_floating(m.x), "not known to be floating point")

    def rewrite(self, m, graph):
        return m.x


class SameShape(Rule):
    """x.view(x.shape) -> x."""

    kind = "tidied"
    numerics = "exact"

    def pattern(self, op, x):
        return op.any_of("view", ("reshape",), x)

    def check(self, m):
        shape = m.arg("view", "shape")
        m.expect(_is_shape_of(shape, m.x), "another shape")
        if isinstance(shape, (list, tuple)):
            m.require_rank("x", len(shape), "the view leaves out a dimension")

    def rewrite(self, m, graph):
        return m.x


class CommonSubexpression(Rule):
    """Of two equal calls the later one -> the earlier one."""

    kind = "tidied"
    numerics = "exact"
    unites = "twin"

    def pattern(self, op, x, twin):
        return op.any_of(
            "call", (*ACTIVATIONS, "linear", "matmul", "mm", "addmm", "t", "transpose", "getattr", "size", "reshape"), x
        )

    def check(self, m):
        m.expect(isinstance(m.x, fx.Node) and not m.calls["call"].writes, "no operand")
        twins = [user for user in m.x.users if user is not m.root and _same_call(user, m.root) and user < m.root]
        m.expect(twins, "computed once")
        m.bindings["twin"] = twins[0]

    def rewrite(self, m, graph):
        return m.twin


class ActivationBeforeView(Rule):
    """act(view(h)) -> view(act(h)) where h is a projection: elementwise, so the view may come after."""

    kind = "tidied"
    numerics = "exact"

    def pattern(self, op, h):
        return op.any_of("act", ACTIVATIONS, op.any_of("view", ("reshape", "unflatten", "flatten"), h))

    def check(self, m):
        product = spell(m.h)
        m.expect(
            product is not None and product.name in ("linear", "matmul", "mm", "addmm"), "not a view of a projection"
        )
        if m.calls["act"].writes:
            m.nodes.append(m.h)  # it writes the projection itself, which nobody else may read then

    def rewrite(self, m, graph):
        view, act = m.calls["view"].node, m.calls["act"].node
        inner = _copy(graph, act, view, m.h)
        return _copy(graph, view, m.h, inner)


def _keeps_order(dims: Any) -> bool:
    return all(isinstance(d, int) and d % len(dims) == i for i, d in enumerate(dims))


def _copy(graph: fx.Graph, call: fx.Node, operand: fx.Node, other: fx.Node) -> fx.Node:
    """The same call on another operand."""
    args, kwargs = fx.map_arg((call.args, call.kwargs), lambda n: other if n is operand else n)
    return graph.create_node(call.op, call.target, args, kwargs)


def _is_shape_of(shape: Any, x: Any) -> bool:
    """Whether ``shape`` is spelled x.shape or x.size(), or as all the sizes of x one by one."""
    if isinstance(shape, (list, tuple)):
        calls = [spell(size) if isinstance(size, fx.Node) else None for size in shape]
        dims = [c.args["dim"] for c in calls if c is not None and c.name == "size" and c.args["input"] is x]
        return len(shape) > 0 and dims == [*range(len(shape) - 1), -1]
    if isinstance(shape, fx.Node):
        call = spell(shape)
        return (
            call is not None
            and call.args["input"] is x
            and (
                (call.name == "size" and call.args["dim"] is None)
                or (call.name == "getattr" and call.args["name"] == "shape")
            )
        )
    return False


def _same_call(a: fx.Node, b: fx.Node) -> bool:
    return a.op == b.op and a.target is b.target and a.args == b.args and a.kwargs == b.kwargs


RULES = (
    IdleDropout(),
    TimesOne(),
    SameShape(),
    CommonSubexpression(),
    MatrixTranspose(),
    TransposeTwice(),
    PermuteNothing(),
)
HOIST = (ActivationBeforeView(),)
