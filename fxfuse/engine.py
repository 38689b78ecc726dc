"""Runs passes over a graph, and carries the burdens that every rule shares.

For each rule, in order: fit the pattern at each node, ask the rule's check, make sure that nobody outside can tell the
difference, put the replacement at the root's place, and note what was done or why not.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxfuse import errors
from fxfuse.dependence import Dependence
from fxfuse.facts import Facts
from fxfuse.match import Match, NoMatch, unify
from fxfuse.options import Options
from fxfuse.report import Event
from fxfuse.rule import Rule
from fxfuse.spellings import may_spell, spell

SWEEPS = 16
"""A rule whose own replacement keeps matching it is stopped after this many sweeps and named in the error."""

_NO_KERNEL = {
    "t",
    "transpose",
    "permute",
    "reshape",
    "flatten",
    "unflatten",
    "contiguous",
    "dropout",
    "chunk",
    "split",
    "split_with_sizes",
    "narrow",
    "getitem",
    "getattr",
    "size",
}


@dataclass
class Rewriting:
    """What came of rewriting one graph."""

    events: list[Event] = field(default_factory=list)
    ranks: dict[str, int] = field(default_factory=dict)
    """Assumptions that rules took: placeholder name -> rank."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Assumptions that rules took: name of a placeholder used as weight or bias -> shape."""


def run(
    gm: fx.GraphModule,
    passes: Sequence[Rule],
    options: Options,
    region: str = "",
    examples: dict[str, Any] | None = None,
    *,
    checked: bool = True,
) -> Rewriting:
    """Apply ``passes`` to ``gm`` in place. ``examples``: placeholder name -> Fact, where a call was recorded.

    ``checked``: whether the ranks and shapes that come back as assumptions are checked at each call; otherwise rules
    that need any refuse.
    """
    _merge_reads(gm.graph)
    work = _Run(gm, options, region, Facts(gm, examples, checked=checked))
    work.drop_dead()
    for rule in passes:
        if rule.kind == "fused" or rule.name not in options.exclude:
            work.apply(rule)
    gm.recompile()
    alive = {n.name for n in gm.graph.nodes}
    result = work.result
    result.events = [e for e in result.events if e.kind != "kept" or e.nodes[0] in alive]
    return result


def _merge_reads(graph: fx.Graph) -> None:
    """One node for each parameter, however often it is read: all of them are the same tensor."""
    reads: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr" and reads.setdefault(str(node.target), node) is not node:
            node.replace_all_uses_with(reads[str(node.target)])
            graph.erase_node(node)


class _Run:
    def __init__(self, gm: fx.GraphModule, options: Options, region: str, facts: Facts):
        self.gm, self.options, self.region, self.facts = gm, options, region, facts
        self.dependence = Dependence(gm)
        self.result = Rewriting()

    def impure(self, node: fx.Node) -> bool:
        """Whether a node must stay although nobody reads it."""
        return node.is_impure() or node in self.dependence.writes or _random(node)

    def drop_dead(self) -> None:
        """Erase what nobody reads, so that it is no reader of what it was computed from."""
        dead = []
        for node in reversed(self.gm.graph.nodes):
            if not node.users and node.op not in ("placeholder", "output") and not self.impure(node):
                self.gm.graph.erase_node(node)
                dead.append(node)
        self.dependence.forget(dead)

    def apply(self, rule: Rule) -> None:
        alternatives = rule.alternatives()
        roots = {op.name for pattern in alternatives for op in pattern.ops}
        for _ in range(SWEEPS):
            # Program order, so that inner matches come first; on a list, since rewriting inserts nodes.
            nodes = [node for node in self.gm.graph.nodes if may_spell(node, roots)]
            if not sum(self.attempt(rule, alternatives, node) for node in nodes):
                break
            self.drop_dead()
            self.lint(rule.form)
        else:
            raise errors.rewrite_failed(rule.form, RuntimeError(f"it still found work after {SWEEPS} sweeps"))

    def lint(self, name: str) -> None:
        try:
            self.gm.graph.lint()
        except Exception as error:
            raise errors.rewrite_failed(name, error) from error

    def attempt(self, rule: Rule, alternatives: Sequence[Any], node: fx.Node) -> bool:
        call = spell(node) if not node._erased else None
        if call is None:
            return False
        misses = []
        for pattern in alternatives:
            if call.op not in pattern.ops:
                continue
            m = Match(node, self.facts)
            try:
                unify(pattern, node, m)
                for name in rule.operands():
                    m.bindings.setdefault(name, None)
                rule.check(m)
            except NoMatch as miss:
                misses.append(miss)
                continue
            try:
                self.check_surroundings(m)
                self.check_aliasing(rule, m)
                if rule.name in self.options.exclude:
                    raise NoMatch("excluded by Options.exclude", node=node, candidate=True)
                if rule.numerics == "fused" and self.options.numerics == "exact":
                    raise NoMatch("numerics='exact' forbids rounding at other places", node=node, candidate=True)
            except NoMatch as miss:
                if rule.kind == "fused":  # a clean-up that cannot be had is worth no line; what it would have led to is
                    misses.append(miss)
                continue
            self.rewrite(rule, m)
            return True
        refusal = max(misses, key=lambda miss: (miss.candidate, miss.depth), default=None)
        if refusal and refusal.candidate:
            self.note(
                Event(
                    "kept",
                    rule.name,
                    rule.form,
                    self.region,
                    (node.name,),
                    source_of(refusal.node or node, node),
                    refusal.reason,
                )
            )
        return False

    def note(self, event: Event) -> None:
        # Sweeps and alternatives meet the same node again; it is one candidate.
        if event.kind == "kept":
            for known in self.result.events:
                if (known.kind, known.rule, known.nodes) == ("kept", event.rule, event.nodes):
                    return
        self.result.events.append(event)

    def check_surroundings(self, m: Match) -> None:
        """Refuse a match that somebody outside it could notice."""
        inside = set(m.nodes)
        for node in m.nodes[1:]:
            others = [user for user in node.users if user not in inside]
            for user in others:
                if user.op == "output":
                    raise NoMatch("{} is returned as well", node, node=node, candidate=True)
                if user in self.dependence.writes and self.dependence.writes[user] & self.dependence.memory[node]:
                    raise NoMatch("{} is written by {}", node, user, node=node, candidate=True)
                raise NoMatch("{} is read by {} as well", node, user, node=node, candidate=True)
        # An in-place spelling inside the match is harmless where it writes memory that the match itself made.
        for node in m.nodes:
            if self.writes_outside(node, inside):
                written = node.kwargs.get("out", node.all_input_nodes[0])
                raise NoMatch("{} writes {} in place", node, written, node=node, candidate=True)
        read = inside | {arg for n in inside for arg in n.all_input_nodes}
        writer = self.dependence.writer_between(inside, m.root, read)
        if writer is not None:
            raise NoMatch("{} writes, before {}, what the match reads", writer, m.root, node=writer, candidate=True)
        between = self.dependence.convex(inside)
        if between is not None:
            raise NoMatch(
                "{} depends on one part of the match and another part on it", between, node=between, candidate=True
            )

    def check_aliasing(self, rule: Rule, m: Match) -> None:
        """Two values may become one only where nobody writes either of them or could tell them apart outside."""
        if rule.unites is None:
            return
        kept = m.bindings[rule.unites]
        writer = self.dependence.writer_between({kept, m.root}, m.root, [kept, *m.root.all_input_nodes])
        if writer is not None:
            raise NoMatch(
                "{} writes, between {} and {}, what both read", writer, kept, m.root, node=writer, candidate=True
            )
        for node in (m.root, kept):
            if self.dependence.written_later(node):
                raise NoMatch("{} is written later", node, node=node, candidate=True)
        if self.dependence.leaves_region(m.root):
            raise NoMatch("{} is returned, and must stay memory of its own", m.root, node=m.root, candidate=True)

    def writes_outside(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        written = self.dependence.writes.get(node, frozenset())
        return bool(written - inside)

    def rewrite(self, rule: Rule, m: Match) -> None:
        graph, root = self.gm.graph, m.root
        mark = root.prev
        with graph.inserting_before(root):
            new = rule.rewrite(m, graph)
        created = []
        node = mark.next
        while node is not root:
            created.append(node)
            node = node.next
        # What another rule made stands for what that was made of.
        traced = tuple(dict.fromkeys(name for n in m.nodes for name in n.meta.get("fxfuse_from", (n.name,))))
        for node in created:
            node.meta = {**_inherited(root), "fxfuse": rule.form, "fxfuse_from": traced}
            self.facts.inherit(node, root) if node is new else self.derive(node)
        names = tuple(n.name for n in m.nodes)
        kernels = sum(map(kernels_of, m.nodes)) - sum(map(kernels_of, created))
        root.replace_all_uses_with(new)
        gone = []
        for n in sorted(m.nodes, key=self.dependence.position.__getitem__, reverse=True):
            if not n.users:
                graph.erase_node(n)
                gone.append(n)
        self.dependence.replace(gone, root, created, new)
        for name, rank in m.ranks.items():
            self.result.ranks[str(name.target)] = rank
        for name, shape in m.shapes.items():
            self.result.shapes[str(name.target)] = shape
        self.note(
            Event(
                rule.kind,
                rule.name,
                rule.form,
                self.region,
                names,
                source_of(root),
                f"is now {target_name(new)}",
                kernels,
                self.bytes_between(m),
            )
        )

    def derive(self, node: fx.Node) -> None:
        """Facts of a helper node (a transposed weight, say) that a rule created beside its replacement."""
        inputs = node.all_input_nodes
        if all(n in self.facts.static for n in inputs):
            self.facts.static.add(node)
        if node.target is torch.t and inputs[0] in self.facts.known:
            old = self.facts.known[inputs[0]]
            self.facts.known[node] = type(old)(old.shape[::-1], old.dtype, old.device)

    def bytes_between(self, m: Match) -> int | None:
        """Bytes to and from memory for the values inside the match, where the example tells their sizes."""
        total = 0
        for node in m.nodes[1:]:
            fact = self.facts.get(node)
            if fact is None:
                return None
            if kernels_of(node):
                total += 2 * torch.Size(fact.shape).numel() * fact.dtype.itemsize
        return total


def kernels_of(node: fx.Node) -> int:
    """GPU kernels that a node launches, by prediction."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return 0
    call = spell(node)
    if call is None and node.target is operator.floordiv:  # h.shape[-1] // 2 is arithmetic of the host
        return int(any(map(kernels_of, node.all_input_nodes)))
    return 0 if call is not None and call.name in _NO_KERNEL else 1


def _inherited(root: fx.Node) -> dict[str, Any]:
    return {k: v for k, v in root.meta.items() if k not in ("fxfuse", "fxfuse_from")}


def _random(node: fx.Node) -> bool:
    """Dropping a node that draws random numbers would shift every later draw."""
    call = spell(node)
    if call is not None and call.name == "dropout":
        return call.args["training"] is not False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return "dropout" in name or "rand" in name


def source_of(node: fx.Node, otherwise: fx.Node | None = None) -> str:
    """``file:line: code`` of the user's statement that a node was traced from, or ""."""
    # Where a parameter is read says less than where it is used.
    found = node.meta.get("source", "") if node.op != "get_attr" else ""
    return found or (otherwise.meta.get("source", "") if otherwise is not None else "")


def target_name(node: fx.Node) -> str:
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))
