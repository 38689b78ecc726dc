"""A gated projection becomes one operator: act(gate(x)) * up(x).

    act(linear(x, wg, bg)) * linear(x, wu, bu)      ->  gated_linear(x, wg, bg, wu, bu, act)
    a, b = linear(x, w, bias).chunk(2, -1)
    act(a) * b                                      ->  gated_linear_packed(x, w, bias, act, "gate_up")
    a * act(b), glu(linear(x, w, bias))             ->  gated_linear_packed(x, w, bias, act, "up_gate")

Operands of the product in either order. The two parts may be taken apart by chunk, split, narrow, slices (halves) or
strided slices (every other feature).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from fxfuse.match import Match
from fxfuse.ops import gated_linear, gated_linear_packed
from fxfuse.rule import Rule
from fxfuse.spellings import ACTIVATIONS, spell

_PRODUCTS = ("linear", "matmul")


class GatedLinear(Rule):
    """Two projections of one input."""

    def pattern(self, op, x, wg, bg, wu, bu):
        return op.mul(
            op.any_of("act", ACTIVATIONS, op.any_of("gate", _PRODUCTS, x, wg, bg)),
            op.any_of("up", _PRODUCTS, x, wu, bu),
        )

    def check(self, m):
        m.activation("act")
        for call, weight in (("gate", "wg"), ("up", "wu")):
            if m.op(call) == "matmul":
                m.require_weight(weight)
        gate, up = m.fact("wg"), m.fact("wu")
        m.require(
            gate is None or up is None or self.features(m, "gate", gate) == self.features(m, "up", up),
            "gate has {} features, up {}",
            gate and gate.shape,
            up and up.shape,
        )

    def features(self, m, call, weight):
        return weight.shape[0 if m.op(call) == "linear" else -1]

    def rewrite(self, m, graph):
        wg, wu = (
            w if m.op(call) == "linear" else graph.call_function(torch.t, (w,))
            for call, w in (("gate", m.wg), ("up", m.wu))
        )
        return graph.call_function(gated_linear, (m.x, wg, m.bg, wu, m.bu, *m.activation("act")))


class PackedGatedLinear(Rule):
    """Two halves, or every other feature, of one projection."""

    def pattern(self, op, gate, up):
        return op.mul(op.any_of("act", ACTIVATIONS, gate), up)

    def check(self, m):
        gate, up = part_of(m, m.gate), part_of(m, m.up)
        m.expect(gate is not None and up is not None and gate.whole is up.whole, "not two parts of one value")
        linear = spell(gate.whole)
        m.expect(linear is not None and linear.name == "linear", "not parts of a projection")
        m.activation("act")
        m.require(
            {gate.which, up.which} == {0, 1} and gate.strided == up.strided,
            "the two parts are not the two halves of {}",
            gate.whole,
        )
        if gate.dim != -1:
            m.bindings["whole"] = linear.args["input"]
            m.require_rank(
                "whole", gate.dim + 1, f"dimension {gate.dim} is the last one only of {gate.dim + 1} dimensions"
            )
        m.bindings["linear"] = linear.args
        m.bindings["layout"] = ("gate_up" if gate.which == 0 else "up_gate") + ("_strided" if gate.strided else "")
        m.nodes.extend(dict.fromkeys([*gate.nodes, *up.nodes, gate.whole]))

    def rewrite(self, m, graph):
        x, w, b = (m.linear[k] for k in ("input", "weight", "bias"))
        act, act_args = m.activation("act")
        return graph.call_function(gated_linear_packed, (x, w, b, act, act_args, m.layout))


class GluLinear(Rule):
    """glu(linear(x, w, b)): the first half times the sigmoid of the second."""

    def pattern(self, op, x, w, b):
        return op.any_of("glu", ("glu",), op.linear(x, w, b))

    def check(self, m):
        dim = m.arg("glu", "dim")
        if dim != -1:
            m.require(isinstance(dim, int) and dim >= 0, "glu over dimension {}, not the last", dim)
            m.require_rank("x", dim + 1, f"dimension {dim} is the last one only of {dim + 1} dimensions")

    def rewrite(self, m, graph):
        return graph.call_function(gated_linear_packed, (m.x, m.w, m.b, "sigmoid", (), "up_gate"))


class Part(NamedTuple):
    """One of two equal parts of a value."""

    whole: fx.Node
    which: int
    strided: bool
    dim: int
    nodes: tuple[fx.Node, ...]


def part_of(m: Match, node: Any) -> Part | None:
    """Read ``node`` as one of two equal parts of a projection's features, or None."""
    call = spell(node)
    if call is None:
        return None
    if call.name == "narrow":
        return _range(m, call.args["input"], call.args["start"], call.args["length"], call.args["dim"], (node,))
    if call.name != "getitem":
        return None
    whole, index = call.args["input"], call.args["index"]
    pieces = spell(whole)
    if pieces is not None and pieces.name in ("chunk", "split", "split_with_sizes") and index in (0, 1, -1, -2):
        return _piece(m, pieces, index % 2, node)
    # h[..., :n], h[:, :, n:], h[..., ::2]: everything but the last index is complete
    if not isinstance(index, tuple) or not isinstance(index[-1], slice):
        return None
    if not all(i is Ellipsis or i == slice(None) for i in index[:-1]):
        return None
    dim = -1 if Ellipsis in index[:-1] else len(index) - 1
    last = index[-1]
    if last.step == 2 and last.stop is None and last.start in (None, 0, 1) and _features(m, whole):
        return Part(whole, last.start or 0, True, dim, (node,))
    if last.step not in (None, 1):
        return None
    n = _features(m, whole)
    start, stop = _number(m, whole, last.start, 0), _number(m, whole, last.stop, n)
    return None if start is None or stop is None else _range(m, whole, start, stop - start, dim, (node,))


def _piece(m: Match, pieces: Any, which: int, node: fx.Node) -> Part | None:
    whole = pieces.args.get("input", pieces.args.get("tensor"))
    n = _features(m, whole)
    sizes = {
        "chunk": pieces.args.get("chunks"),
        "split": pieces.args.get("split_size_or_sections"),
        "split_with_sizes": pieces.args.get("split_sizes"),
    }[pieces.name]
    if pieces.name == "chunk":
        halves = sizes == 2
    elif isinstance(sizes, (list, tuple)):
        halves = n is not None and [_number(m, whole, s, None) for s in sizes] == [n // 2, n // 2]
    else:
        halves = n is not None and _number(m, whole, sizes, None) == n // 2
    return Part(whole, which, False, pieces.args["dim"], (node, pieces.node)) if halves and n else None


def _range(m: Match, whole: Any, start: Any, length: Any, dim: int, nodes: tuple[fx.Node, ...]) -> Part | None:
    n = _features(m, whole)
    if n is None or length != n // 2 or start not in (0, n // 2):
        return None
    return Part(whole, 0 if start == 0 else 1, False, dim, nodes)


def _features(m: Match, whole: Any) -> int | None:
    """The number of features of a projection, where it is known and even."""
    call = spell(whole)
    fact = m.facts.get(call.args["weight"]) if call is not None and call.name == "linear" else None
    return fact.shape[0] if fact is not None and len(fact.shape) == 2 and fact.shape[0] % 2 == 0 else None


def _number(m: Match, whole: fx.Node, value: Any, otherwise: int | None) -> int | None:
    """A number, also where it is spelled as a part of the projection's own size: h.shape[-1] // 2, h.size(-1)."""
    if value is None:
        return otherwise
    n = _features(m, whole)
    if isinstance(value, int):
        return value if value >= 0 or n is None else value + n
    if not isinstance(value, fx.Node) or n is None:
        return None
    if getattr(value.target, "__name__", "") == "floordiv":
        a, b = value.args
        a = _number(m, whole, a, None)
        return a // b if a is not None and isinstance(b, int) and b else None
    call = spell(value)
    if call is not None and call.name == "size" and call.args["input"] is whole and call.args["dim"] == -1:
        return n
    if call is not None and call.name == "getitem" and call.args["index"] == -1:
        shape = spell(call.args["input"])
        if shape is not None and shape.name in ("getattr", "size") and shape.args["input"] is whole:
            return n
    return None


RULES = (GatedLinear(), PackedGatedLinear(), GluLinear())
