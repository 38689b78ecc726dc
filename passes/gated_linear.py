"""A gated projection becomes one operator: act(gate(x)) * up(x).

    act(linear(x, wg, bg)) * linear(x, wu, bu)      ->  gated_linear(x, wg, bg, wu, bu, act)
    a, b = linear(x, w, bias).chunk(2, -1)
    act(a) * b                                      ->  gated_linear_packed(x, w, bias, act, "gate_up")
    a * act(b), glu(linear(x, w, bias))             ->  gated_linear_packed(x, w, bias, act, "up_gate")

Operands of the product in either order. The two parts may be taken apart by chunk, split, narrow, slices (halves) or
strided slices (every other feature).
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from fxfuse.match import Match
from fxfuse.ops import gated_linear, gated_linear_packed
from fxfuse.rule import Rule
from fxfuse.spellings import ACTIVATIONS, Call, spell

_PRODUCTS = ("linear", "matmul", "mm")


def _require_product(m, name: str, x: str, weight: str) -> None:
    """What a projection must be: a linear, or a product with a [K, N] matrix, that a fused operator may serve."""
    if m.op(name) != "linear":
        m.require_weight(weight)
    if m.op(name) == "mm":
        m.require_rank(x, 2, "torch.mm takes two dimensions only")
    m.require_served(weight)


def _rows(m, graph: fx.Graph, name: str, weight: str) -> fx.Node:
    """The weight as [N, K]."""
    return m.bindings[weight] if m.op(name) == "linear" else graph.call_function(torch.t, (m.bindings[weight],))


class GatedLinear(Rule):
    """Two projections of one input."""

    def pattern(self, op, x, wg, bg, wu, bu):
        return op.mul(
            op.any_of("act", ACTIVATIONS, op.any_of("gate", _PRODUCTS, x, wg, bg)),
            op.any_of("up", _PRODUCTS, x, wu, bu),
        )

    def check(self, m):
        m.expect(m.gate.node is not m.up.node, "one projection, read twice")
        m.activation("act")
        _require_product(m, "gate", "x", "wg")
        _require_product(m, "up", "x", "wu")
        gate, up = self.features(m, "gate", "wg"), self.features(m, "up", "wu")
        m.require(gate is None or up is None or gate == up, "gate has {} features, up {}", gate, up)

    def features(self, m, name: str, weight: str) -> int | None:
        fact = m.fact(weight)
        return None if fact is None or len(fact.shape) != 2 else fact.shape[0 if m.op(name) == "linear" else 1]

    def rewrite(self, m, graph):
        wg, wu = _rows(m, graph, "gate", "wg"), _rows(m, graph, "up", "wu")
        return graph.call_function(gated_linear, (m.x, wg, m.bg, wu, m.bu, *m.activation("act")))


class PackedGatedLinear(Rule):
    """Two halves, or every other feature, of one projection."""

    def pattern(self, op, gate, up):
        return op.mul(op.any_of("act", ACTIVATIONS, gate), up)

    def check(self, m):
        gate, up = part_of(m, m.gate), part_of(m, m.up)
        m.expect(gate is not None and up is not None and gate.whole is up.whole, "not two parts of one projection")
        m.activation("act")
        halves = {gate.which, up.which} == {0, 1} and gate.strided == up.strided
        m.require(halves, "the two parts are not the two halves of {}", gate.whole)
        packed = spell(gate.whole)
        m.calls["packed"] = packed
        x, w, *bias = (packed.args[name] for name in packed.op.args)
        m.bindings.update(x=x, w=w, b=bias[0] if bias else None)
        _require_product(m, "packed", "x", "w")
        for dim in {gate.dim, up.dim} - {-1}:
            m.require(isinstance(dim, int) and dim >= 0, "taken apart along dimension {}, not the last", dim)
            m.require_rank("x", dim + 1, f"dimension {dim} is the last one only of {dim + 1} dimensions")
        m.bindings["layout"] = ("gate_up" if gate.which == 0 else "up_gate") + ("_strided" if gate.strided else "")
        m.nodes.extend(dict.fromkeys([*gate.nodes, *up.nodes, gate.whole]))

    def rewrite(self, m, graph):
        w = _rows(m, graph, "packed", "w")
        return graph.call_function(gated_linear_packed, (m.x, w, m.b, *m.activation("act"), m.layout))


class GluLinear(Rule):
    """glu(linear(x, w, b)): the first half times the sigmoid of the second."""

    def pattern(self, op, x, w, b):
        return op.any_of("glu", ("glu",), op.any_of("packed", _PRODUCTS, x, w, b))

    def check(self, m):
        _require_product(m, "packed", "x", "w")
        dim = m.arg("glu", "dim")
        m.require(isinstance(dim, int) and dim >= -1, "glu over dimension {}, not the last", dim)
        if dim != -1:
            m.require_rank("x", dim + 1, f"dimension {dim} is the last one only of {dim + 1} dimensions")

    def rewrite(self, m, graph):
        return graph.call_function(
            gated_linear_packed, (m.x, _rows(m, graph, "packed", "w"), m.b, "sigmoid", (), "up_gate")
        )


class Part(NamedTuple):
    """One of two equal parts of a value."""

    whole: fx.Node
    which: int
    """0 for the first, 1 for the second, -1 for a part that is neither half."""
    strided: bool
    dim: int
    nodes: tuple[fx.Node, ...]


def part_of(m: Match, node: Any) -> Part | None:
    """Read ``node`` as a part of a projection's features, or None."""
    call = spell(node)
    if call is None or call.name not in ("narrow", "getitem"):
        return None
    whole = call.args["input"]
    pieces = spell(whole)
    if pieces is not None and pieces.name in ("chunk", "split", "split_with_sizes"):
        whole = pieces.args.get("input", pieces.args.get("tensor"))
    features = _features(m, whole)
    if features is None:
        return None
    sizes = _Sizes(whole, features)
    if call.name == "narrow":
        dim, start = call.args["dim"], sizes.number(call.args["start"])
        length = sizes.number(call.args["length"])
        stop = None if start is None or length is None else start + length
        return sizes.between(start, stop, dim, node)
    index = call.args["index"]
    if pieces is not None and whole is not call.args["input"]:
        halves = sizes.halves(pieces)
        return (
            Part(whole, index % 2, False, pieces.args["dim"], (node, pieces.node, *sizes.nodes))
            if (halves and index in (0, 1, -1, -2))
            else None
        )
    # h[..., :n], h[:, :, n:], h[..., ::2]: everything but the last index is complete
    if not isinstance(index, tuple) or not isinstance(index[-1], slice):
        return None
    if not all(i is Ellipsis or i == slice(None) for i in index[:-1]):
        return None
    dim, last = -1 if Ellipsis in index[:-1] else len(index) - 1, index[-1]
    if last.step == 2 and last.stop is None and last.start in (None, 0, 1):
        return Part(whole, last.start or 0, True, dim, (node,))
    if last.step not in (None, 1):
        return None
    start = 0 if last.start is None else sizes.number(last.start)
    stop = features if last.stop is None else sizes.number(last.stop)
    return sizes.between(start, stop, dim, node)


class _Sizes:
    """Numbers that take a projection of ``features`` features apart, some of them spelled by its own size."""

    def __init__(self, whole: fx.Node, features: int):
        self.whole, self.features = whole, features
        self.nodes: list[fx.Node] = []
        """Nodes that computed such a number, and that nobody needs once the projection is taken in."""

    def number(self, value: Any) -> int | None:
        """A number, also where it is spelled h.shape[-1] // 2 or h.size(-1)."""
        if isinstance(value, int):
            return value if value >= 0 else value + self.features
        if not isinstance(value, fx.Node):
            return None
        if value.target is operator.floordiv:
            a, b = value.args
            a = self.number(a)
            self.nodes.insert(0, value)
            return a // b if a is not None and isinstance(b, int) and b else None
        call = spell(value)
        if call is None or call.name not in ("size", "getitem"):
            return None
        shape, dim = (
            (call, call.args["dim"]) if call.name == "size" else (spell(call.args["input"]), call.args["index"])
        )
        if shape is None or shape.name not in ("size", "getattr") or shape.args["input"] is not self.whole:
            return None
        if shape.args.get("name", "shape") != "shape":
            return None
        self.nodes += [value, shape.node] if shape is not call else [value]
        return self.features if dim == -1 else None

    def halves(self, pieces: Call) -> bool:
        """Whether chunk, tensor_split or split cut in the middle."""
        half = self.features // 2
        if pieces.name == "chunk":
            chunks = pieces.args["chunks"]
            return chunks == 2 or (isinstance(chunks, (list, tuple)) and [self.number(c) for c in chunks] == [half])
        sizes = pieces.args.get("split_size_or_sections", pieces.args.get("split_sizes"))
        if isinstance(sizes, (list, tuple)):
            return [self.number(s) for s in sizes] == [half, half]
        return self.number(sizes) == half

    def between(self, start: int | None, stop: int | None, dim: Any, node: fx.Node) -> Part | None:
        if start is None or stop is None or not isinstance(dim, int):
            return None
        half = self.features // 2
        which = {(0, half): 0, (half, self.features): 1}.get((start, min(stop, self.features)), -1)
        return Part(self.whole, which, False, dim, (node, *self.nodes))


def _features(m: Match, whole: Any) -> int | None:
    """The number of features of a projection, where it is known and even."""
    call = spell(whole)
    if call is None or call.name not in _PRODUCTS:
        return None
    fact = m.facts.get(call.args["weight" if call.name == "linear" else call.op.args[1]])
    if fact is None or len(fact.shape) != 2:
        return None
    features = fact.shape[0 if call.name == "linear" else 1]
    return features if features % 2 == 0 else None


RULES = (GatedLinear(), PackedGatedLinear(), GluLinear())
