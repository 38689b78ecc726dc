"""Elements of SVG and HTML, so that no text has to be escaped by hand."""

from __future__ import annotations

import itertools
from importlib import resources
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

SVG = "http://www.w3.org/2000/svg"


def element(tag: str, *children: Element | str | None, **attributes: object) -> Element:
    """``element("a", "text", href="#x", class_="y", stroke_width=2)``.

    Attributes and children that are None are left out, numbers are rounded to tenths.
    """
    made = Element(tag)
    for name, value in attributes.items():
        if value is not None:
            text = f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
            made.set("viewBox" if name == "viewBox" else name.rstrip("_").replace("_", "-"), text)
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif child and len(made):
            made[-1].tail = (made[-1].tail or "") + child
        elif child:
            made.text = (made.text or "") + child
    return made


def svg(*children: Element, width: float, height: float, title: str, desc: str, inner: bool = False) -> Element:
    """An ``svg`` element of this size with a title and a description for those who do not see it.

    ``inner``: it stands in another ``svg``, which has the name space.
    """
    number = next(_NUMBERS)
    return element(
        "svg",
        element("title", title, id=f"fx-title-{number}"),
        element("desc", desc, id=f"fx-desc-{number}"),
        *children,
        xmlns=None if inner else SVG,
        class_="fx",
        role="group",
        aria_labelledby=f"fx-title-{number} fx-desc-{number}",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=round(width),
        height=round(height),
    )


_NUMBERS = itertools.count(1)
"""Ids must differ in the page that several drawings come to stand in."""


def text_width(text: str, size: float) -> float:
    """About how wide a text of ``size`` pixels is in the sans-serif fonts of common systems; rather more than less."""
    return 0.62 * size * len(text)


def as_html(root: Element) -> str:
    return ElementTree.tostring(root, encoding="unicode", method="html")


def as_xml(root: Element) -> str:
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def style() -> str:
    """The style sheet of drawings; dark where the reader's system is."""
    return _resource("style.css")


def page_style() -> str:
    """That, and what a page round drawings needs."""
    return style() + _resource("page.css")


def _resource(name: str) -> str:
    return resources.files("fxfuse.drawing").joinpath(name).read_text(encoding="utf-8")
