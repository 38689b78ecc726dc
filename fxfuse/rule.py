"""What a pass is made of."""

from __future__ import annotations

import inspect
from typing import Any, Literal

from torch import fx

from fxfuse.match import Match
from fxfuse.pattern import Builder, Pattern, Wildcard


class Rule:
    """``pattern`` says what to look for, ``check`` when it may be taken, ``rewrite`` what to put in its place.

    The engine does everything else: spellings, operand order, nodes that others read, mutation and aliasing, the
    place of insertion, metadata, deletion and the report.
    """

    numerics = "fused"
    """``"exact"``: calls the same kernels on the same operands. ``"fused"``: may round at other places."""

    kind: Literal["fused", "tidied", "lowered"] = "fused"
    """How the report counts it: a fusion, a clean-up that makes fusions possible, or one op made faster."""

    unites: str | None = None
    """The operand that takes the root's place where the root was memory of its own; nobody may be able to tell."""

    def pattern(self, op: Builder, **operands: Wildcard) -> Pattern:  # rules name their operands one by one
        """The pattern, or a list of alternatives. Parameter names after ``op`` are the names of the bindings."""
        raise NotImplementedError

    def check(self, m: Match) -> None:
        """``m.require`` what the algebra needs; the first line that fails is the reported reason."""

    def rewrite(self, m: Match, graph: fx.Graph) -> fx.Node:
        """Build the replacement and return the node that takes the root's place."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The pass that the rule belongs to: the stem of its file."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def form(self) -> str:
        return type(self).__name__

    def alternatives(self) -> list[Pattern]:
        built: Any = self.pattern(Builder(), **{n: Wildcard(n) for n in self.operands()})
        return built if isinstance(built, list) else [built]

    def operands(self) -> list[str]:
        """The names that the pattern binds; those absent from the alternative that matched are bound to None."""
        return [n for n in inspect.signature(self.pattern).parameters if n != "op"]
