"""Numbers and tensors that a function finds by name: in its module, or in the function that it was defined in.

They may be bound anew after the trace, which took them as they were.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_PLAIN = (type(None), bool, int, float, str, torch.Tensor)
_CONTAINERS = (list, tuple, dict, set)


@dataclass(frozen=True)
class Name:
    """One name, and where it is looked up."""

    name: str
    place: dict[str, Any] | types.CellType
    value: Any


def names_of(functions: Iterable[Any], code: Mapping[types.CodeType, dict[str, Any]]) -> list[Name]:
    """The names of data in ``functions``, in those of their files or closures that they name, and in ``code``.

    ``code``: what else was seen to run, with the names of its file. Of containers only those that a function closes
    over are taken: a file's own tables would cost too much to compare.
    """
    found = {(id(name.place), name.name): name for ran, names in code.items() for name in _global(ran, names)}
    seen: set[types.FunctionType] = set()
    pending = list(functions)
    while pending:
        function = pending.pop()
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        for name in (*_global(function.__code__, function.__globals__), *_closed_over(function)):
            found[id(name.place), name.name] = name
            closed_over = isinstance(name.place, types.CellType)
            if isinstance(name.value, types.FunctionType):
                same_file = name.value.__globals__ is function.__globals__
                pending += [name.value] if same_file or closed_over else []
    return [name for name in found.values() if _is_data(name)]


def _is_data(name: Name) -> bool:
    return isinstance(name.value, _PLAIN if isinstance(name.place, dict) else _PLAIN + _CONTAINERS)


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
