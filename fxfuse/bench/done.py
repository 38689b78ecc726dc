"""What a report says, shortened: what was done to each layer of a model alike is one row, with a count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fxfuse.report import Report, short_source

TITLES = {
    "fused": "Fused",
    "lowered": "Lowered: one operator, a faster implementation",
    "tidied": "Tidied, so that more could be fused",
    "kept": "Kept",
}

Row = tuple[str, str, str, str]
"""How often, what, what became of it or why not, and where."""


def done(report: Report) -> list[tuple[str, list[Row]]]:
    """Sections with a title and rows; those that are empty are not there."""
    sections = [
        (title, _counted((e.rule, e.reason, short_source(e.source)) for e in report.events if e.kind == kind))
        for kind, title in TITLES.items()
    ]
    outside = [(u.kind, u.reason, _pattern(u.path)) for u in report.uncaptured]
    outside += [(r.kind, r.note, _pattern(r.path)) for r in report.regions if not r.installed]
    sections.append(("Not captured", _counted(outside)))
    return [(title, rows) for title, rows in sections if rows]


def _counted(rows: Iterable[tuple[str, str, str]]) -> list[Row]:
    return [(f"{count} ×", *row) for row, count in Counter(rows).items()]


def _pattern(path: str) -> str:
    """``layers.*.attention`` for each of the layers; "." is the model itself."""
    return ".".join("*" if part.isdecimal() else part for part in path.split(".")) or "."
