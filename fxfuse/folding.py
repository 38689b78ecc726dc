"""Rows that say the same of each layer of a model, as one row: ``layers.{0..11}.mlp`` for twelve paths."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

Row = Sequence[str]
"""The cells of a line in a table."""

_WORD = re.compile(r"(?<![\w.])[A-Za-z_][\w.]*")
"""A module path or the name of a node. A number by itself is none: sizes and constants must be equal."""
_PART = re.compile(r"(?<=[._])\d+(?![^\W_])")
_PATH, _COUNT = "\0p", "\0c"
"""Marks in the place of a number in a path, and of the one behind a node's name."""
_LISTED = 4


def folded(rows: Sequence[Row], *, paths: Sequence[int] = ()) -> list[tuple[int, list[str]]]:
    """How often each row comes, and the row; in the order in which rows come first.

    Rows are one where they differ in nothing but the numbers in module paths and names of nodes, and these numbers are
    then all named: ``h.{0..3}.fc``, ``mul_{5,11}``, and ``gelu*`` for ``gelu`` and ``gelu_1``.

    Args:
        rows: of equal length.
        paths: the columns that are nothing but a module path, which may begin with a number.
    """
    alike: defaultdict[tuple[str, ...], list[list[str | None]]] = defaultdict(list)
    for row in rows:
        cells = [f".{cell}" if i in paths else cell for i, cell in enumerate(row)]
        split = [_split(cell, whole=i in paths) for i, cell in enumerate(cells)]
        alike[tuple(template for template, _ in split)].append([n for _, numbers in split for n in numbers])
    return [(len(members), _filled(templates, members, paths)) for templates, members in alike.items()]


def _split(text: str, *, whole: bool) -> tuple[str, list[str | None]]:
    """``text`` with a mark in the place of each number that may differ, and these numbers."""
    numbers: list[str | None] = []

    def part(found: re.Match[str]) -> str:
        numbers.append(found[0])
        return _PATH

    def word(found: re.Match[str]) -> str:
        name, _, last = found[0].rpartition("_")
        # What torch.fx puts behind the second node of a name; the first has nothing there.
        stem, count = (name, last) if name and last.isdecimal() else (found[0], None)
        stem = _PART.sub(part, stem)
        numbers.append(count)
        return stem + _COUNT

    template = _PART.sub(part, text) if whole else _WORD.sub(word, text)
    return template, numbers


def _filled(templates: Sequence[str], members: Sequence[Sequence[str | None]], paths: Sequence[int]) -> list[str]:
    """The cells of one row for all members: numbers that differ in braces."""
    slots = iter(list(zip(*members, strict=True)))

    def fill(mark: re.Match[str]) -> str:
        found = dict.fromkeys(next(slots))
        numbers = [number for number in found if number is not None]
        if mark[0] == _COUNT:
            if len(numbers) < len(found):
                return "*" if numbers else ""
            return f"_{_range(numbers)}"
        return _range(numbers)

    cells = [re.sub(f"{_PATH}|{_COUNT}", fill, template) for template in templates]
    return [cell[1:] if i in paths else cell for i, cell in enumerate(cells)]


def _range(numbers: Sequence[str]) -> str:
    """``{0..11}`` for those between without a gap, ``{1,3}`` for a few, ``{5,11,..,137}`` for others."""
    if len(numbers) == 1:
        return numbers[0]
    values = sorted(map(int, numbers))
    if len(values) > 2 and values == list(range(values[0], values[-1] + 1)):
        return f"{{{values[0]}..{values[-1]}}}"
    shown = [*values[:2], "..", values[-1]] if len(values) > _LISTED else values
    return f"{{{','.join(map(str, shown))}}}"
