"""Graphs as SVG: boxes for operators, a letter on each that was rewritten, a dashed frame round what repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.etree.ElementTree import Element

import networkx as nx

from fxfuse.drawing.fold import folded
from fxfuse.drawing.layout import Layout, layered
from fxfuse.drawing.markup import element, style, svg, text_width
from fxfuse.drawing.view import Change, Part, View

_MARGIN = 16.0
_FRAME = 12.0
_KINDS = {"fused": "fused", "lowered": "one operator, a faster implementation", "tidied": "tidied"}


def page(view: View) -> Element:
    """The whole view as one SVG that stands by itself."""
    head = f"{view.model}: before and after"
    drawn = [_line(_MARGIN, 24, head, "head")]
    y, right = 34.0, text_width(head, 15)
    for change in view.changes:
        drawn += [
            _letter(_MARGIN + 9, y + 8, change.kind, change.letter),
            _line(_MARGIN + 26, y + 12, _in_words(change)),
        ]
        y, right = y + 22, max(right, 26 + text_width(_in_words(change), 12))
    for note in notes(view):
        drawn.append(_line(_MARGIN, y + 14, note, "faint"))
        y, right = y + 16, max(right, text_width(note, 10))
    for part in view.parts:
        one, width, height = _side_by_side(part, y + 34)
        drawn += one
        y, right = y + 34 + height, max(right, width)
    return svg(
        element("style", style()),
        element("rect", width="100%", height="100%", style="fill: var(--page)"),
        *drawn,
        width=right + 2 * _MARGIN,
        height=y + _MARGIN,
        title=f"{view.model} before and after fxfuse",
        desc=" ".join(_in_words(change) + "." for change in view.changes) or "Nothing was rewritten.",
    )


def _side_by_side(part: Part, y: float) -> tuple[list[Element], float, float]:
    """A heading at ``y`` and both graphs below it; their width and height."""
    drawn, height, x = [_line(_MARGIN, y, heading(part), "head")], 0.0, _MARGIN
    for when, graph in (("before", part.before), ("after", part.after)):
        one = drawing(graph, f"{heading(part)}, {when}", inner=True)
        one.set("x", f"{x:.0f}")
        one.set("y", f"{y + 36:.0f}")
        drawn += [_line(x, y + 24, caption(when, graph), "sub"), one]
        height = max(height, 36 + float(one.get("height", 0)))
        x += max(float(one.get("width", 0)), text_width(caption(when, graph), 12)) + 2 * _MARGIN
    return drawn, max(text_width(heading(part), 15), x - 2 * _MARGIN), height


def drawing(graph: nx.DiGraph, title: str, *, fold: bool = True, inner: bool = False) -> Element:
    """One graph of a ``Part``, its repeated blocks drawn once unless ``fold`` is off."""
    if fold:
        graph = folded(graph)
    sizes = {name: _size(attributes) for name, attributes in graph.nodes(data=True)}
    layout = layered(graph, sizes)
    shift = _MARGIN + _FRAME
    frames = [_frame(graph, layout, sizes, block, times) for block, times in enumerate(graph.graph.get("times", ()))]
    body = element(
        "g",
        *frames,
        *(_edge(points) for points in layout.edges.values()),
        *(_node(graph.nodes[name], layout.centres[name], sizes[name]) for name in graph),
        transform=f"translate({shift:.0f} {shift:.0f})",
    )
    # The frame's own words stand to its right.
    beside = max((text_width(_times(times), 12) + 20 for times in graph.graph.get("times", ())), default=0.0)
    ops = [a for _, a in graph.nodes(data=True) if a["role"] == "op"]
    said = "; ".join(f"{a['label']} {a['detail']}".strip() + (f" ({a['note']})" if a["note"] else "") for a in ops)
    return svg(
        body,
        width=layout.width + 2 * shift + beside,
        height=layout.height + 2 * shift,
        title=title,
        desc=f"{len(ops)} operators, from top to bottom: {said}.",
        inner=inner,
    )


def repeats(graph: nx.DiGraph) -> bool:
    """Whether drawing it folded leaves anything out."""
    return bool(folded(graph).graph["times"])


def heading(part: Part) -> str:
    """``model.layers.*.mlp (LlamaMLP), 12 regions alike``."""
    alike = f", {len(part.paths)} regions alike" if len(part.paths) > 1 else ""
    return f"{_common(part.paths) or 'the whole model'} ({part.kind}){alike}"


def caption(when: str, graph: nx.DiGraph) -> str:
    """``before: 17 operators``, all that repeat counted."""
    count = sum(role == "op" for _, role in graph.nodes(data="role"))
    return f"{when}: {count} operator{'s' * (count != 1)}"


def notes(view: View) -> list[str]:
    """What is in no drawing."""
    hidden = sum(g.graph["hidden"] * len(p.paths) for p in view.parts for g in (p.before, p.after))
    lines = [f"Not drawn: {hidden} views, sizes and parameters, which compute nothing."]
    if view.uncaptured:
        lines.append(f"Not drawn: {view.uncaptured} modules in no region; the report says why.")
    if not view.parts:
        lines.append("No region was captured.")
    return lines


def _common(paths: Sequence[str]) -> str:
    """The parts that differ between the paths as stars."""
    split = [path.split(".") for path in paths]
    if len({len(parts) for parts in split}) > 1:
        return f"{paths[0]}, ..."
    return ".".join(names[0] if len(set(names)) == 1 else "*" for names in zip(*split, strict=True))


def _in_words(change: Change) -> str:
    times = f", {change.count} times" if change.count > 1 else ""
    return f"{change.letter}, {_KINDS[change.kind]}: {change.before or 'a view'} is now {change.after}{times}"


def _line(x: float, y: float, text: str, kind: str | None = None) -> Element:
    return element("text", text, x=x, y=y, class_=kind)


def _letter(x: float, y: float, kind: str, letter: str) -> Element:
    return element(
        "g",
        element("circle", cx=x, cy=y, r=5 + 3 * len(letter)),
        element("text", letter, x=x, y=y + 3.5),
        class_=f"badge {kind}",
    )


def _size(attributes: dict[str, Any]) -> tuple[float, float]:
    wide = max(text_width(attributes["label"], 12), text_width(attributes["detail"], 10))
    return wide + 24 + 8 * bool(attributes["letter"]), 40.0 if attributes["detail"] else 26.0


def _node(attributes: dict[str, Any], centre: tuple[float, float], size: tuple[float, float]) -> Element:
    (x, y), (width, height) = centre, size
    label, detail = attributes["label"], attributes["detail"]
    rows = [element("text", label, x=x, y=y + (-2 if detail else 4), text_anchor="middle")]
    if detail:
        rows.append(element("text", detail, x=x, y=y + 12, text_anchor="middle", class_="faint"))
    letter = attributes["letter"]
    said = f"{label} {detail}".strip(), attributes["note"], attributes["source"]
    return element(
        "g",
        element("title", "\n".join(filter(None, said))),
        element("rect", x=x - width / 2, y=y - height / 2, width=width, height=height, rx=6),
        *rows,
        _letter(x - width / 2, y - height / 2 + 2, attributes["mark"], letter) if letter else None,
        class_=" ".join(filter(None, ("node", attributes["role"], attributes["mark"]))),
        role="img",
        tabindex=0 if attributes["mark"] else None,
    )


def _edge(points: Sequence[tuple[float, float]]) -> Element:
    """A line that leaves and enters straight up and down, with a small tip."""
    (x, y), *rest = points
    path = [f"M{x:.1f} {y:.1f}"]
    for next_x, next_y in rest:
        middle = (y + next_y) / 2
        path.append(f"C{x:.1f} {middle:.1f} {next_x:.1f} {middle:.1f} {next_x:.1f} {next_y:.1f}")
        x, y = next_x, next_y
    return element(
        "g",
        element("path", d=" ".join(path), class_="edge"),
        element("path", d=f"M{x - 3.5:.1f} {y - 6:.1f}h7L{x:.1f} {y:.1f}z", class_="tip"),
    )


def _frame(graph: nx.DiGraph, layout: Layout, sizes: dict[Any, tuple[float, float]], block: int, times: int) -> Element:
    inside = {name for name, of in graph.nodes(data="block") if of == block}
    boxes = [(*layout.centres[name], *sizes[name]) for name in inside]
    top = min(y - height / 2 for _, y, _, height in boxes) - _FRAME
    bottom = max(y + height / 2 for _, y, _, height in boxes) + _FRAME
    # What comes from above and is read far down runs inside the frame, too.
    lines = [x for (_, to), points in layout.edges.items() if to in inside for x, y in points if top < y < bottom]
    left = min(*(x - width / 2 for x, _, width, _ in boxes), *lines) - _FRAME
    right = max(*(x + width / 2 for x, _, width, _ in boxes), *lines) + _FRAME
    return element(
        "g",
        element("rect", x=left, y=top, width=right - left, height=bottom - top, rx=10, class_="block"),
        element("text", _times(times), x=right + 8, y=top + 14, class_="sub"),
    )


def _times(times: int) -> str:
    return f"× {times}"
