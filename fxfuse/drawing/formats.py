"""A view as SVG, HTML, DOT or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from xml.etree.ElementTree import Element

import networkx as nx

from fxfuse.drawing import svg
from fxfuse.drawing.markup import as_html, as_xml, element, page_style
from fxfuse.drawing.view import Part, View

SCHEMA = "fxfuse.graph/1"


def to_svg(view: View) -> str:
    """One SVG with every part, repeated blocks folded; it needs nothing else and follows the reader's light or dark."""
    return as_xml(svg.page(view))


def to_html(view: View) -> str:
    """A page with every part, repeated blocks folded and, under a click or a key, written out."""
    parts = [e for part in view.parts for e in (element("h2", svg.heading(part)), section(part))]
    page = element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("title", f"{view.model} before and after fxfuse"),
            element("style", page_style()),
        ),
        element(
            "body",
            element("main", element("h1", f"{view.model}: before and after"), legend(view), *parts),
        ),
        lang="en",
    )
    return f"<!DOCTYPE html>\n{as_html(page)}\n"


def to_dot(view: View) -> str:
    """Graphviz: a cluster for each graph of each part, nothing folded."""
    lines = ["digraph fxfuse {", "  node [shape=box, style=rounded];"]
    for number, part in enumerate(view.parts):
        for when, graph in (("before", part.before), ("after", part.after)):
            name = f"{number}_{when}"
            lines += [f"  subgraph cluster_{name} {{", f"    label={_quoted(f'{svg.heading(part)}, {when}')};"]
            for node, a in graph.nodes(data=True):
                label = "\n".join(filter(None, (f"{a['letter']} {a['label']}".strip(), a["detail"])))
                bold = ', style="rounded,bold"' if a["mark"] == "fused" else ""
                lines.append(f"    {_quoted(f'{name}_{node}')} [label={_quoted(label)}{bold}];")
            lines += [f"    {_quoted(f'{name}_{a}')} -> {_quoted(f'{name}_{b}')};" for a, b in graph.edges]
            lines.append("  }")
    return "\n".join([*lines, "}", ""])


def to_json(view: View) -> str:
    """``fxfuse.graph/1``: what was rewritten, and each graph as ``networkx.node_link_graph(..., edges="edges")`` reads
    it."""
    document = {
        "schema": SCHEMA,
        "model": view.model,
        "changes": [asdict(change) for change in view.changes],
        "uncaptured": view.uncaptured,
        "parts": [
            {"kind": part.kind, "paths": part.paths, "before": _linked(part.before), "after": _linked(part.after)}
            for part in view.parts
        ],
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


#: By the ending of a file's name.
FORMATS: dict[str, Callable[[View], str]] = {"svg": to_svg, "dot": to_dot, "json": to_json, "html": to_html}


_LEGEND = ("", "kind", "before", "after", "times", "first source")


def legend(view: View) -> Element:
    """What became what, as a table, and what is not drawn."""
    head = element("tr", *(element("th", name, scope="col") for name in _LEGEND))
    rows = [
        element(
            "tr",
            element("th", c.letter, scope="row"),
            element("td", element("span", c.kind, class_=f"kind {c.kind}")),
            *(element("td", text) for text in (c.before or "a view", c.after, str(c.count))),
            element("td", element("code", c.source)),
        )
        for c in view.changes
    ]
    table = element("table", element("thead", head), element("tbody", *rows)) if rows else None
    return element(
        "div",
        _scrolling("What was rewritten", table) if table is not None else element("p", "Nothing was rewritten."),
        *(element("p", line, class_="faint") for line in svg.notes(view)),
    )


def section(part: Part) -> Element:
    """One part: before and after side by side, on a narrow screen one below the other."""
    folds = svg.repeats(part.before) or svg.repeats(part.after)
    written_out = element("details", element("summary", "Every repeated block written out"), _pair(part, fold=False))
    paths = element(
        "details",
        element("summary", f"The {len(part.paths)} regions"),
        element("ul", *(element("li", path) for path in part.paths)),
    )
    return element(
        "section",
        _pair(part, fold=True),
        written_out if folds else None,
        paths if len(part.paths) > 1 else None,
    )


def _pair(part: Part, *, fold: bool) -> Element:
    figures = []
    for when, graph in (("before", part.before), ("after", part.after)):
        title = f"{svg.heading(part)}, {when}"
        drawing = _scrolling(title, svg.drawing(graph, title, fold=fold))
        figures.append(element("figure", element("figcaption", svg.caption(when, graph)), drawing))
    return element("div", *figures, class_="pair")


def _scrolling(name: str, child: Element) -> Element:
    """Something wider than a narrow screen, which keys can scroll."""
    return element("div", child, class_="scroll", tabindex=0, role="region", aria_label=name)


def _linked(graph: nx.DiGraph) -> dict[str, object]:
    linked: dict[str, object] = nx.node_link_data(graph, edges="edges")
    for node in linked["nodes"]:  # type: ignore[attr-defined]
        node.pop("alike")
    return linked


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
