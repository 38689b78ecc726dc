"""Reads arithmetic on one value as algebra, so that 0.5 * x * (1 + t) and x * (t + 1) / 2 are the same expression."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from torch import fx

from fxfuse.spellings import Call, spell

Polynomial = dict[int, float]
"""power of the variable -> coefficient."""


def factors(root: fx.Node) -> tuple[float, list[fx.Node], list[fx.Node]]:
    """A product taken apart: (its constant, the nodes that are multiplied, the inner product nodes).

    Inner products are opened only where nobody else reads them: what is read twice is a value in its own right.
    """
    constant, values, inner = 1.0, [], []
    open_nodes = [root]
    while open_nodes:
        node = open_nodes.pop()
        call = spell(node)
        if call is not None and (node is root or len(node.users) == 1):
            if call.name == "mul":
                parts = [call.args["input"], call.args["other"]]
            elif call.name == "div" and isinstance(call.args["other"], Real) and call.args["rounding_mode"] is None:
                parts = [call.args["input"], 1.0 / call.args["other"] if call.args["other"] else math.inf]
            else:
                parts = []
            if parts:
                if node is not root:
                    inner.append(node)
                for part in parts:
                    if isinstance(part, fx.Node):
                        open_nodes.append(part)
                    elif isinstance(part, Real):
                        constant *= float(part)
                continue
        values.append(node)
    return constant, values, inner


def polynomial(value: Any, x: fx.Node, seen: list[fx.Node]) -> Polynomial | None:
    """``value`` as a polynomial in ``x``, or None; nodes on the way are added to ``seen``."""
    if value is x:
        return {1: 1.0}
    if isinstance(value, Real):
        return {0: float(value)}
    call = spell(value)
    if call is None or call.writes:
        return None
    result = _step(call, x, seen)
    if result is not None:
        seen.append(call.node)
    return result


def _step(call: Call, x: fx.Node, seen: list[fx.Node]) -> Polynomial | None:
    a = (
        polynomial(call.args["input"], x, seen)
        if call.name in ("add", "sub", "mul", "div", "pow", "square", "neg")
        else None
    )
    if a is None:
        return None
    if call.name == "neg":
        return {p: -c for p, c in a.items()}
    if call.name == "square":
        return _times(a, a)
    if call.name == "pow":
        exponent = call.args["exponent"]
        if not isinstance(exponent, (int, float)) or exponent not in (1, 2, 3):
            return None
        result = a
        for _ in range(int(exponent) - 1):
            result = _times(result, a)
        return result
    b = polynomial(call.args["other"], x, seen)
    alpha = call.args.get("alpha", 1)
    if b is None or not isinstance(alpha, Real) or call.args.get("rounding_mode") is not None:
        return None
    if call.name == "mul":
        return _times(a, b)
    if call.name == "div":
        return {p: c / b[0] for p, c in a.items()} if set(b) == {0} and b[0] else None
    scale = float(alpha) if call.name == "add" else -float(alpha)
    return {p: a.get(p, 0.0) + scale * b.get(p, 0.0) for p in {*a, *b}}


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    product: Polynomial = {}
    for p, c in a.items():
        for q, d in b.items():
            product[p + q] = product.get(p + q, 0.0) + c * d
    return product


def one_plus(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """For ``1 + v`` in either order: (v, the addition)."""
    call = spell(node)
    if call is None or call.name != "add" or call.args["alpha"] != 1 or call.writes:
        return None
    a, b = call.args["input"], call.args["other"]
    if isinstance(a, Real) and a == 1 and isinstance(b, fx.Node):
        return b, call.node
    if isinstance(b, Real) and b == 1 and isinstance(a, fx.Node):
        return a, call.node
    return None


def same(value: Polynomial | float, wanted: Polynomial | float) -> bool:
    """Equal but for the rounding of a constant to single precision, as 0.79788456 is for sqrt(2 / pi)."""
    if isinstance(value, dict) and isinstance(wanted, dict):
        nonzero = {p for p, c in value.items() if c}
        return nonzero == set(wanted) and all(same(value[p], wanted[p]) for p in wanted)
    return math.isclose(value, wanted, rel_tol=1e-7)  # type: ignore[arg-type]
