"""A product with a matrix and a bias becomes one linear.

x @ w + b, torch.mm(x, w) + b, b + x @ w.T          ->  F.linear(x, w.T, b)
torch.add(x @ w, b, alpha=2)                        ->  F.linear(x, w.T, 2 b)
torch.add(b, torch.mm(x, w), alpha=2)               ->  torch.addmm(b, x, w, alpha=2)
F.linear(x, w) + b                                  ->  F.linear(x, w, b)
torch.addmm(b, x, w, beta=2)                        ->  F.linear(x, w.T, 2 b)
einsum("bsk,kn->bsn", x, w), tensordot(x, w, 1)     ->  x @ w, for the rules above
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx

from fxfuse.rule import Rule


def _scaled(graph: fx.Graph, b: fx.Node | None, factor: float) -> fx.Node | None:
    return b if factor == 1 or b is None else graph.call_function(torch.mul, (b, factor))


def _implicit(letters: str) -> str:
    """The output of an equation without an arrow: what stands there once, in alphabetical order, after the ellipsis."""
    once = sorted(c for c in set(letters) if letters.count(c) == 1 and c != ".")
    return "." * ("." in letters) + "".join(once)


class EinsumToMatmul(Rule):
    """einsum and tensordot over the last dimension of x and one of a matrix -> x @ w or x @ w.T."""

    kind = "tidied"

    def pattern(self, op, x, w):
        return [op.any_of("einsum", ("einsum",)), op.any_of("tensordot", ("tensordot",), x, w)]

    def check(self, m):
        rank, side = self.einsum(m) if "einsum" in m.calls else self.tensordot(m)
        m.require_weight("w")
        if rank is not None:
            m.require_rank("x", rank, f"the equation holds for {rank} dimensions only")
        m.bindings["side"] = side

    def einsum(self, m):
        equation, *operands = (m.arg("einsum", k) for k in ("equation", "input", "other"))
        m.expect(isinstance(equation, str) and equation.count(",") == 1, "not two operands")
        terms, arrow, out = equation.replace(" ", "").replace("...", ".").partition("->")
        out = out if arrow else _implicit(terms.replace(",", ""))
        first, second = zip(terms.split(","), operands, strict=True)
        for (a, x), (b, w) in ((first, second), (second, first)):  # the matrix may stand first
            new = b.replace(a[-1], "") if a else ""
            if len(b) == 2 and "." not in b and len(new) == 1 and len({*a, new}) == len(a) + 1 and out == a[:-1] + new:
                m.expect("." not in a or len(a) == 2, "holds for some ranks only")
                m.bindings.update(x=x, w=w)
                return None if a[0] == "." else len(a), b.index(a[-1])
        m.expect(False, "no product with a matrix over the last dimension")

    def tensordot(self, m):
        dims = m.arg("tensordot", "dims")
        if dims == 1:
            return None, 0
        m.expect(isinstance(dims, (list, tuple)) and len(dims) == 2, "not over one dimension")
        ours, theirs = (d[0] if isinstance(d, (list, tuple)) and len(d) == 1 else d for d in dims)
        m.expect(isinstance(ours, int) and ours and theirs in (0, 1, -1, -2), "not over the last dimension")
        return (None if ours == -1 else ours + 1), theirs % 2

    def rewrite(self, m, graph):
        return graph.call_function(torch.matmul, (m.x, m.w if m.side == 0 else graph.call_function(torch.t, (m.w,))))


def _expect_bias(m):
    """Leave alone what is no candidate: a residual, another projection, or a mask on the product of two activations."""
    m.require(isinstance(m.b, fx.Node), "the added term is the number {}, not a bias", m.b)
    fact, owned = m.fact("b"), m.b in m.facts.static
    m.expect(m.given("b") is not None and (owned or fact is None or len(fact.shape) == 1), "adds an activation")
    m.expect(m.b in m.facts.static or m.given("w") is not None, "a product of activations")


class MatmulAdd(Rule):
    """matmul(x, w) + alpha b -> linear(x, w.T, alpha b)."""

    def pattern(self, op, x, w, b):
        return op.any_of("add", ("add",), op.any_of("product", ("matmul", "mm"), x, w), b)

    def check(self, m):
        _expect_bias(m)
        w = m.require_weight("w")
        m.require_bias("b", w.shape[1], w.dtype)
        m.require(isinstance(m.arg("add", "alpha"), (int, float)), "alpha is computed at run time")
        if m.op("product") == "mm":
            m.require_rank("x", 2, "torch.mm takes two dimensions only")

    def rewrite(self, m, graph):
        w = graph.call_function(torch.t, (m.w,))
        return graph.call_function(F.linear, (m.x, w, _scaled(graph, m.b, m.arg("add", "alpha"))))


class ScaledMatmulAdd(Rule):
    """b + alpha matmul(x, w) -> addmm(b, x, w, alpha=alpha), for a matrix x."""

    def pattern(self, op, x, w, b):
        return op.any_of("add", ("add",), b, op.any_of("product", ("matmul", "mm"), x, w))

    def check(self, m):
        m.expect(m.arg("add", "alpha") != 1, "MatmulAdd takes it")
        m.require(m.arg("add", "alpha") != 0, "alpha=0 would leave the product out, its NaN and inf with it")
        _expect_bias(m)
        w = m.require_weight("w")
        m.require_bias("b", w.shape[1], w.dtype)
        m.require_rank("x", 2, "alpha scales the product, which only addmm on two dimensions does")

    def rewrite(self, m, graph):
        return graph.call_function(torch.addmm, (m.b, m.x, m.w), {"alpha": m.arg("add", "alpha")})


class LinearAdd(Rule):
    """linear(x, w) + alpha b -> linear(x, w, alpha b)."""

    def pattern(self, op, x, w, c, b):
        return op.any_of("add", ("add",), op.linear(x, w, c), b)

    def check(self, m):
        _expect_bias(m)
        # What a module with a bias of its own is given to add is a residual, as far as one can tell without its shape.
        m.expect(m.c is None or m.b in m.facts.static or m.fact("b") is not None, "adds an activation")
        m.require(m.c is None, "the projection has a bias already")
        fact = m.fact("w")
        m.require(fact is not None, "the weight's shape is not known")
        m.require_bias("b", fact.shape[0], fact.dtype)

    def rewrite(self, m, graph):
        return graph.call_function(F.linear, (m.x, m.w, _scaled(graph, m.b, m.arg("add", "alpha"))))


class AddmmToLinear(Rule):
    """addmm(b, x, w, beta) -> linear(x, w.T, beta b)."""

    def pattern(self, op, b, x, w):
        return op.any_of("addmm", ("addmm",), b, x, w)

    def check(self, m):
        m.expect(m.root.meta.get("fxfuse") != ScaledMatmulAdd.__name__, "made of a scaled product")
        m.require(m.arg("addmm", "alpha") == 1, "alpha={} scales the product", m.arg("addmm", "alpha"))
        w = m.require_weight("w")
        m.require_bias("b", w.shape[1], w.dtype)
        m.require(isinstance(m.arg("addmm", "beta"), (int, float)), "beta is computed at run time")
        m.require_rank("x", 2, "torch.addmm takes two dimensions only")

    def rewrite(self, m, graph):
        beta = m.arg("addmm", "beta")
        # beta = 0 leaves the bias out altogether, NaN and all.
        b = None if beta == 0 else _scaled(graph, m.b, beta)
        return graph.call_function(F.linear, (m.x, graph.call_function(torch.t, (m.w,)), b))


RULES = (EinsumToMatmul(), MatmulAdd(), ScaledMatmulAdd(), LinearAdd(), AddmmToLinear())
