"""Fitting a pattern to a node: bindings, the nodes that a rewrite would take in, and how far a miss came."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxfuse.facts import Fact, Facts
from fxfuse.ops.gpu.product import unserved
from fxfuse.pattern import Pattern, Wildcard
from fxfuse.spellings import Call, activation, spell


class NoMatch(Exception):
    """Why a rule left a node alone. ``candidate``: a refusal worth reporting, not a mere difference in structure."""

    def __init__(self, reason: str, *values: Any, node: fx.Node | None = None, depth: int = 0, candidate: bool = False):
        super().__init__(reason)
        self.template, self.values = reason, values
        self.node, self.depth, self.candidate = node, depth, candidate

    @property
    def reason(self) -> str:
        # Formatted when somebody asks: most misses are never shown.
        return self.template.format(*self.values)


class Match:
    """A pattern fitted to the graph. Bindings are attributes: ``m.x``, ``m.w``; named calls too: ``m.act``."""

    def __init__(self, root: fx.Node, facts: Facts):
        self.root, self.facts = root, facts
        self.bindings: dict[str, Any] = {}
        self.calls: dict[str, Call] = {}
        self.nodes: list[fx.Node] = []
        """Root first, then every inner node; all but the root vanish, so nobody else may read them."""
        self.ranks: dict[fx.Node, int] = {}
        """Assumptions: placeholder -> the rank that the rule counts on."""
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}
        """Assumptions: placeholder used as a weight or bias -> its shape."""

    def __getattr__(self, name: str) -> Any:
        for table in ("bindings", "calls"):
            found = self.__dict__.get(table, {})
            if name in found:
                return found[name]
        raise AttributeError(f"no operand of the pattern is called {name!r}")

    def copy(self) -> Match:
        other = Match(self.root, self.facts)
        other.bindings, other.calls, other.nodes = dict(self.bindings), dict(self.calls), list(self.nodes)
        other.ranks, other.shapes = dict(self.ranks), dict(self.shapes)
        return other

    def adopt(self, other: Match) -> None:
        self.__dict__.update(other.__dict__)

    # What a rule's check asks and demands.

    def require(self, ok: object, reason: str, *values: Any, at: str | None = None) -> None:
        """Refuse, with a reason that is reported, unless ``ok``."""
        if not ok:
            raise NoMatch(reason, *values, node=self._node(at), candidate=True)

    def expect(self, ok: object, difference: str, *values: Any) -> None:
        """Leave alone, without a report, what only looks like the pattern at its root."""
        if not ok:
            raise NoMatch(difference, *values, node=self.root)

    def _node(self, at: str | None) -> fx.Node:
        found = self.bindings.get(at) if at in self.bindings else self.calls[at].node if at in self.calls else None
        return found if isinstance(found, fx.Node) else self.root

    def arg(self, call: str, name: str) -> Any:
        return self.calls[call].args[name]

    def op(self, call: str) -> str:
        return self.calls[call].name

    def activation(self, call: str) -> tuple[str, tuple[float, ...]]:
        name, args = activation(self.calls[call])
        self.require(
            all(isinstance(a, (int, float)) for a in args), "{} has an argument computed at run time", name, at=call
        )
        return name, tuple(float(a) for a in args)

    def fact(self, name: str) -> Fact | None:
        return self.facts.get(self.bindings[name])

    def given(self, name: str) -> fx.Node | None:
        """The parameter or argument that settles the operand's shape (``Facts.given``); None for an activation."""
        found, projected = self.facts.given(self.bindings[name]), self.bindings.get("x")
        if found is None or found in self.facts.static:
            return found
        # What the projection is applied to varies from call to call, so its shape is none to count on.
        return None if projected in self.facts.static or _depends(projected, found) else found

    def require_rank(self, name: str, rank: int, reason: str) -> None:
        """Refuse unless the operand has ``rank`` dimensions, or is an argument that can be checked at every call."""
        known = self.facts.rank(self.bindings[name])
        if isinstance(known, fx.Node) and known in self.ranks:
            known = self.ranks[known]
        if isinstance(known, fx.Node) and not self.facts.checked:
            known = None
        if isinstance(known, fx.Node):
            example = self.facts.examples.get(str(known.target))
            known_rank = len(example.shape) if isinstance(example, Fact) else None
            if known_rank in (None, rank):
                self.ranks[known] = rank
                return
            known = known_rank
        self.require(known == rank, reason + (" (its rank is not known)" if known is None else ""), at=name)

    def require_weight(self, name: str, *, what: str = "weight") -> Fact:
        """Refuse unless the operand is a floating-point matrix that the model owns (or an argument used as one)."""
        fact = self._owned(name, what)
        self.require(len(fact.shape) == 2, "{} has shape {}, not two dimensions", what, fact.shape, at=name)
        self.require(fact.dtype.is_floating_point, "{} is {}, not floating point", what, _dtype(fact.dtype), at=name)
        return fact

    def require_served(self, name: str, *, relu_and_bias: bool = False) -> None:
        """Refuse where no implementation of a fused operator can beat eager, given the weight's dtype and device.

        ``relu_and_bias``: the product is followed by these.
        """
        fact = self.fact(name)
        reason = "" if fact is None else unserved(fact.dtype, fact.device, relu_and_bias=relu_and_bias)
        self.require(not reason, "{}", reason, at=name)

    def require_bias(self, name: str, features: int, dtype: torch.dtype) -> None:
        """Refuse unless the operand is None or a vector of one number a feature, of the weight's dtype."""
        bias = self.bindings[name]
        if bias is None:
            return
        self.require(isinstance(bias, fx.Node), "the added term is the number {}, not a bias", bias)
        fact = self._owned(name, "bias")
        self.require(fact.shape == (features,), "bias has shape {}, not ({},)", fact.shape, features, at=name)
        self.require(fact.dtype == dtype, "bias is {}, weight {}", _dtype(fact.dtype), _dtype(dtype), at=name)

    def _owned(self, name: str, what: str) -> Fact:
        node = self.bindings[name]
        self.require(isinstance(node, fx.Node), "{} is the number {}", what, node)
        fact = self.facts.get(node)
        if node in self.facts.static:
            self.require(fact is not None, "{} is computed by {}, whose shape is not known", what, node, at=name)
            assert fact is not None
            return fact
        argument = self.given(name)
        self.require(argument is not None, "{} is an activation ({})", what, node, at=name)
        assert argument is not None
        self.require(
            self.facts.checked, "{} is an argument, whose shape a graph by itself does not check", what, at=name
        )
        source = self.facts.get(argument)
        known = fact is not None and source is not None
        self.require(known, "{} is an argument of unknown shape; example inputs would tell", what, at=name)
        assert fact is not None
        assert source is not None
        self.shapes[argument] = source.shape
        return fact


def _depends(value: Any, on: fx.Node) -> bool:
    """Whether ``value`` is ``on``, or computed from it."""
    seen, waiting = set(), [value]
    while waiting:
        node = waiting.pop()
        if node is on:
            return True
        if isinstance(node, fx.Node) and node not in seen:
            seen.add(node)
            waiting += _data(node)
    return False


def _data(node: fx.Node) -> list[fx.Node]:
    """The operands of a node, but of a projection only what it projects: a weight may serve two layers in a row."""
    call = spell(node)
    product = call is not None and call.name in ("linear", "matmul", "mm")
    own = (getattr(node.target, "__module__", None) or "").startswith("fxfuse.ops")
    return node.all_input_nodes[:1] if product or own else node.all_input_nodes


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def unify(pattern: Any, operand: Any, m: Match, depth: int = 0) -> None:
    """Bind ``pattern`` to ``operand`` in ``m``, or raise the NoMatch that came deepest over the operand orders."""
    if isinstance(pattern, Wildcard):
        if pattern.name in m.bindings and m.bindings[pattern.name] is not operand:
            raise NoMatch("{!r} would be two different values", pattern.name, depth=depth)
        m.bindings[pattern.name] = operand
        return
    if not isinstance(pattern, Pattern):
        if isinstance(operand, bool) or operand != pattern:
            raise NoMatch("wanted {}, found {}", pattern, operand, depth=depth)
        return
    call = spell(operand)
    if call is None or call.op not in pattern.ops:
        raise NoMatch(
            "wanted {}, found {}",
            pattern,
            call.name if call else operand,
            node=operand if isinstance(operand, fx.Node) else None,
            depth=depth,
        )
    _check_options(pattern, call, depth)
    orders = [call.op.args]
    if call.op.commutative and _symmetric(call):
        orders.append((call.op.args[1], call.op.args[0], *call.op.args[2:]))
    misses = []
    for order in orders:
        trial = m.copy()
        trial.nodes.append(call.node)
        if pattern.name:
            trial.calls[pattern.name] = call
        try:
            for sub, key in zip(pattern.operands, order, strict=False):
                unify(sub, call.args[key], trial, depth + 1)
        except NoMatch as miss:
            misses.append(miss)
            continue
        m.adopt(trial)
        return
    raise max(misses, key=lambda miss: miss.depth)


def _check_options(pattern: Pattern, call: Call, depth: int) -> None:
    """Refuse an option that the pattern does not speak of, unless it is at its default or the rule asks for it."""
    given = call.op.args[: len(pattern.operands)]
    for option, default in call.op.defaults.items():
        if option not in given and not pattern.any_options and call.args[option] != default:
            raise NoMatch("{} has {}={}", pattern, option, call.args[option], node=call.node, depth=depth)


def _symmetric(call: Call) -> bool:
    return all(call.args[key] == default for key, default in call.op.defaults.items())
