"""Numbers that the sizes of a call's arguments settle, as Python text that a region evaluates at each call."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

MAY_RAISE = re.compile(r"[/%]|\*\*|fx_math")
"""What may raise where an argument has a size of 0, say."""
SHAPE = "fx_shape_"
"""Before the name of a placeholder, its shape in generated code."""
_LONGEST = 400
"""Characters of text. Longer ones cost too much at each call; nothing is said to be known of such a number."""


@dataclass(frozen=True)
class Term:
    """A number, and how it follows from the shapes of arguments."""

    text: str
    value: Any
    """What it is in the example."""
    factors: tuple[Term, ...] = ()
    """Of a product: so that one can be divided by another without a remainder."""
    spread: tuple[Term, ...] = ()
    """Of sizes that broadcast: so that one of them adds nothing when it is broadcast again."""

    @property
    def is_constant(self) -> bool:
        return SHAPE not in self.text


def arguments_of(text: str) -> set[str]:
    """Placeholder names of the arguments whose shape a term's text reads."""
    return set(re.findall(rf"{SHAPE}(\w+)", text))


Known = Term | None
"""None: the arguments' sizes do not tell, as far as is known."""


def shown(text: str, expressions: dict[str, str]) -> str:
    """``text`` for people; ``expressions``: placeholder name -> the argument in Python."""
    text = re.sub(rf"{SHAPE}(\w+)", lambda found: f"{expressions[found[1]]}.shape", text)
    return (
        text.replace("fx_", "").removeprefix("(").removesuffix(")") if _is_enclosed(text) else text.replace("fx_", "")
    )


def _is_enclosed(text: str) -> bool:
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0 and i < len(text) - 1:
            return False
    return text.startswith("(")


def constant(value: Any) -> Term:
    return Term(repr(value), value)


def size(placeholder: str, dim: int, value: int) -> Term:
    return Term(f"{SHAPE}{placeholder}[{dim}]", value)


def term(value: Any) -> Known:
    """A number of a graph, which may be a term already."""
    return value if value is None or isinstance(value, Term) else constant(value)


def _made(text: str, value: Any, operands: Iterable[Term], factors: tuple[Term, ...] = ()) -> Known:
    if all(o.is_constant for o in operands):
        return constant(value)
    return Term(text, value, factors) if len(text) <= _LONGEST else None


_SYMBOLS: dict[Callable[..., Any], str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
    operator.and_: "&",
    operator.or_: "|",
}


_COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)


def slice_length(size: int, start: int | None, stop: int | None, step: int | None) -> int:
    return len(range(size)[start:stop:step])


def broadcast_size(a: int, b: int) -> int:
    return b if a == 1 else a


SCOPE: dict[str, Any] = {"fx_math": math, "fx_int": int, "fx_abs": abs, "fx_round": round}
SCOPE |= {"fx_slice_length": slice_length, "fx_broadcast_size": broadcast_size}
_FUNCTIONS: dict[Any, str] = {
    int: "fx_int",
    abs: "fx_abs",
    operator.abs: "fx_abs",
    round: "fx_round",
    slice_length: "fx_slice_length",
    broadcast_size: "fx_broadcast_size",
} | {function: f"fx_math.{name}" for name, function in vars(math).items() if callable(function)}


def apply(function: Callable[..., Any], *operands: Known) -> Known:
    """The term of ``function`` of these; None where one is not known or the function is none of arithmetic."""
    if any(o is None for o in operands):
        return None
    known = [o for o in operands if o is not None]
    if function is operator.mul and all(type(o.value) is int for o in known):
        return product(known)
    if function is operator.neg:
        return _made(f"(-{known[0].text})", -known[0].value, known)
    symbol, name = _SYMBOLS.get(function), _FUNCTIONS.get(function)
    if symbol is None and name is None:
        return None
    if function in (operator.add, operator.sub) and known[1] == constant(0):
        return known[0]
    if function in _COMPARISONS and known[0].text == known[1].text:
        return constant(function(0, 0))
    text = f" {symbol} ".join(o.text for o in known) if symbol else ", ".join(o.text for o in known)
    return _made(f"{name or ''}({text})", function(*(o.value for o in known)), known)


def product(terms: Iterable[Known]) -> Known:
    factors: list[Term] = []
    number = 1
    for t in terms:
        if t is None:
            return None
        for factor in t.factors or (t,):
            if factor.is_constant:
                number *= factor.value
            else:
                factors.append(factor)
    if not factors:
        return constant(number)
    if number != 1:
        factors.append(constant(number))
    if len(factors) == 1:
        return factors[0]
    text = "(" + " * ".join(f.text for f in factors) + ")"
    return _made(text, math.prod(f.value for f in factors), factors, tuple(factors))


def quotient(whole: Known, part: Known) -> Known:
    """What is left of a product of sizes when it is divided by another, as by the -1 of ``view``."""
    if whole is None or part is None:
        return None
    left, over = list(whole.factors or (whole,)), []
    for factor in part.factors or (part,):
        if factor in left:
            left.remove(factor)
        else:
            over.append(factor)
    dividend, divisor = product(left), product(over)
    if dividend is None or divisor is None or divisor.value == 0:
        return None
    if divisor.is_constant and divisor.value == 1:
        return dividend
    if divisor.is_constant:
        for i, factor in enumerate(left):
            if factor.is_constant and factor.value % divisor.value == 0:
                left[i] = constant(factor.value // divisor.value)
                return product(left)
    return apply(operator.floordiv, dividend, divisor)


def broadcast(a: Known, b: Known) -> Known:
    """The size that two sizes broadcast to."""
    if a == b:
        return a
    for one, other in ((a, b), (b, a)):
        if one is not None and one.is_constant:
            return other if one.value == 1 else one
    if a is None or b is None:
        return None
    ours, theirs = a.spread or (a,), b.spread or (b,)
    both = tuple(dict.fromkeys((*ours, *theirs)))
    if len(both) in (len(ours), len(theirs)):
        return a if len(both) == len(ours) else b
    made = apply(broadcast_size, a, b)
    return made if made is None or made.is_constant else replace(made, spread=both)
