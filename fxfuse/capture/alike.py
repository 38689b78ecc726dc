"""Whether the trace of one layer of a model is that of another, which then needs none of its own.

Two modules have one trace where the modules below them are of the same classes and hold equal things. Only attributes
that no forward read while it was traced may differ, as the number of a layer does.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from fxfuse.capture.assumed import Assumed
from fxfuse.capture.tree import contents, hooked, is_opaque, plain_attributes, same
from fxfuse.facts import Fact

_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
_PLAIN = (bool, int, float, str, type(None))


def alike(first: nn.Module, second: nn.Module, assumed: Assumed, inlined: Collection[str]) -> bool:
    """Whether the trace of ``first`` is that of ``second``, called alike.

    ``assumed`` and ``inlined`` are those of the trace. A rewrite reads attributes of modules that are no part of
    ``inlined``, so these are all to be equal.
    """
    ours, theirs = dict(first.named_modules()), dict(second.named_modules())
    if ours.keys() != theirs.keys():
        return False
    pairs = {id(ours[path]): theirs[path] for path in ours}
    equal = _Equal(pairs)
    return all(_same_module(ours[p], theirs[p], _may_differ(p, assumed, inlined), equal) for p in ours)


def _may_differ(path: str, assumed: Assumed, inlined: Collection[str]) -> Collection[str] | None:
    """The names of a module's attributes that were read; None where any may be."""
    return {name for where, name in assumed.attributes if where == path} if path in inlined else None


def _same_module(a: nn.Module, b: nn.Module, read: Collection[str] | None, equal: _Equal) -> bool:
    if type(a) is not type(b) or is_opaque(a) or hooked(a) or hooked(b):
        return False
    ours, theirs = plain_attributes(a), plain_attributes(b)
    if "forward" in ours or ours.keys() != theirs.keys() or hasattr(type(a), "__slots__"):
        return False
    for table in _TABLES:
        if list(ours[table]) != list(theirs[table]):
            return False
    for name, value in ours.items():
        other = theirs[name]
        unread = read is not None and name not in read and name != "training"
        if unread and isinstance(value, _PLAIN) and isinstance(other, _PLAIN):
            continue
        if not equal(value, other):
            return False
    return True


class _Equal:
    """Whether an attribute of the second tree is to a trace what that of the first is."""

    def __init__(self, pairs: dict[int, nn.Module]):
        self.pairs = pairs
        """id of a module of the first tree -> that in its place in the second."""
        self.tensors: dict[int, int] = {}
        """id of a tensor of the first tree -> that in its place: one that is tied there is tied here."""
        self.taken: dict[int, int] = {}

    def __call__(self, a: Any, b: Any) -> bool:
        if type(a) is not type(b):
            return False
        if isinstance(a, nn.Module):
            return self.pairs.get(id(a), a) is b
        if isinstance(a, torch.Tensor):
            return self.tensor(a, b)
        if isinstance(a, types.MethodType):
            return a.__func__ is b.__func__ and self(a.__self__, b.__self__)
        if type(a) is functools.partial:
            return a.func is b.func and self(a.args, b.args) and self(a.keywords, b.keywords)
        if isinstance(a, dict):
            return list(a) == list(b) and all(self(a[key], b[key]) for key in a)
        if isinstance(a, (list, tuple)):
            return len(a) == len(b) and all(map(self, a, b))
        return same(contents(a), contents(b))

    def tensor(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        tied = self.tensors.setdefault(id(a), id(b)) == id(b) and self.taken.setdefault(id(b), id(a)) == id(a)
        return (
            tied
            and Fact.of(a) == Fact.of(b)
            and a.layout == b.layout
            and a.requires_grad == b.requires_grad
            and (a.layout is not torch.strided or a.stride() == b.stride())
        )


def same_call(a: Any, b: Any) -> bool:
    """Whether two recorded arguments, or structures of them, are of one kind to a trace."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_call, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_call(a[key], b[key]) for key in a)
    return bool(a == b)  # facts, numbers, strings, dtypes, devices, members of an Enum, classes of what is handed on
