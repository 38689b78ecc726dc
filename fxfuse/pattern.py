"""What a rule looks for: a small tree of ops over named wildcards, built by calling ``op.linear(x, w, b)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fxfuse.spellings import OPS, Op


@dataclass(frozen=True, eq=False)
class Wildcard:
    """Binds any operand (a node, a number, None) to a name; the same name twice must meet the same operand."""

    name: str


@dataclass(frozen=True, eq=False)
class Pattern:
    """A node that is one of ``ops`` and whose leading operands match ``operands``."""

    ops: tuple[Op, ...]
    operands: tuple[Any, ...]
    name: str | None = None
    """Binds the call itself, so that a rule may ask for its arguments."""
    any_options: bool = False
    """Whether options that the pattern does not mention may have any value, since the rule asks for them itself."""

    def __str__(self) -> str:
        return "|".join(op.name for op in self.ops)


class Builder:
    """The ``op`` argument of ``Rule.pattern``: ``op.<name>(operands...)`` and ``op.any_of(name, ops, operands...)``.

    An operand that is left out is not looked at. Options such as ``alpha`` are at their defaults in what ``op.<name>``
    matches; a rule that names the call with ``any_of`` asks for them itself.
    """

    def __getattr__(self, name: str) -> Callable[..., Pattern]:
        if name not in OPS:
            raise AttributeError(f"no op is called {name!r}; fxfuse/spellings.py has the table")
        return lambda *operands: Pattern((OPS[name],), operands, name)

    def any_of(self, name: str, ops: Iterable[str], *operands: Any) -> Pattern:
        return Pattern(tuple(OPS[o] for o in ops), operands, name, any_options=True)
