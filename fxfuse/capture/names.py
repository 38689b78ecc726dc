"""What a function finds by name, in its module or in the function that it was defined in, and a trace took as it was.

Numbers, tensors and functions may be bound anew; of objects and modules, the attributes that the function names too.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fxfuse.capture.foreign import has_state

_PLAIN = (type(None), bool, int, float, str, torch.Tensor)
_CONTAINERS = (list, tuple, dict, set)


@dataclass(frozen=True)
class Name:
    """One name, and where it is looked up."""

    name: str
    place: dict[str, Any] | types.CellType
    value: Any


def names_of(functions: Iterable[Any], code: Mapping[types.CodeType, dict[str, Any]]) -> list[Name]:
    """The names in ``functions``, in those of their files or closures that they name, and in ``code``.

    ``code``: what else was seen to run, with the names of its file. Of containers only those that a function closes
    over are taken: a file's own tables would cost too much to compare.
    """
    found: dict[tuple[int, str], Name] = {}
    for ran, names in code.items():
        found |= _all(ran, _global(ran, names))
    seen: set[types.FunctionType] = set()
    pending = list(functions)
    while pending:
        function = pending.pop()
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        named = _all(function.__code__, (*_global(function.__code__, function.__globals__), *_closed_over(function)))
        found |= named
        for name in named.values():
            if isinstance(name.value, types.FunctionType):
                same_file = name.value.__globals__ is function.__globals__
                pending += [name.value] if same_file or isinstance(name.place, types.CellType) else []
    return [name for name in found.values() if _is_kept(name)]


def _is_kept(name: Name) -> bool:
    value = name.value
    if isinstance(value, _PLAIN if isinstance(name.place, dict) else _PLAIN + _CONTAINERS):
        return True
    return (callable(value) and not isinstance(value, type)) or has_state(value)


def _all(code: types.CodeType, names: Iterable[Name]) -> dict[tuple[int, str], Name]:
    """``names``, and what ``code`` reads of the objects and modules among them, as far as their names are in it."""
    found = {}
    for name in names:
        found[id(name.place), name.name] = name
        if _is_looked_into(name.value):
            place = vars(name.value)
            read = _reads(code, type(name.value)) & place.keys()
            found |= {(id(place), n): Name(n, place, place[n]) for n in sorted(read)}
    return found


def _reads(code: types.CodeType, cls: type) -> set[str]:
    """Names in ``code``, and in the methods and properties of ``cls`` that it names, and so on."""
    names, pending = set(code.co_names), list(code.co_names)
    while pending:
        given = inspect.getattr_static(cls, pending.pop(), None)
        function = given.fget if isinstance(given, property) else given
        if isinstance(function, types.FunctionType):
            pending += set(function.__code__.co_names) - names
            names |= set(function.__code__.co_names)
    return names


def _is_looked_into(value: Any) -> bool:
    """An object with attributes, or a module of Python's that belongs to the model, not to a library below it."""
    if isinstance(value, types.ModuleType):
        root = value.__name__.partition(".")[0]
        return root not in sys.stdlib_module_names and root not in ("torch", "numpy", "fxfuse")
    return has_state(value) and isinstance(getattr(value, "__dict__", None), dict)


def tensors_of(names: list[Name]) -> set[int]:
    """Identities of the tensors that ``names`` lead to."""
    return {id(t) for t in tree_leaves([name.value for name in names]) if isinstance(t, torch.Tensor)}


def _global(code: types.CodeType, names: dict[str, Any]) -> Iterator[Name]:
    for name in code.co_names:
        if name in names and not name.startswith("__"):
            yield Name(name, names, names[name])


def _closed_over(function: types.FunctionType) -> Iterator[Name]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield Name(name, cell, cell.cell_contents)
        except ValueError:  # a cell that nothing was put into yet
            continue
