"""A roofline (Williams, Waterman and Patterson, 2009): each region at the operations it does a byte, and a second."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

from fxfuse.bench.charts import series
from fxfuse.drawing.markup import element, svg

_LEFT, _TOP, _WIDTH, _HEIGHT = 84.0, 10.0, 440.0, 300.0
#: Circle, square, triangle, diamond, drawn from the centre: set-ups differ in shape and not only in colour.
_MARKS = ("m-6 0a6 6 0 1 0 12 0a6 6 0 1 0 -12 0z", "m-6 -6h12v12h-12z", "m0 -8l7 13h-14z", "m0 -8l8 8l-8 8l-8 -8z")


@dataclass(frozen=True)
class _Point:
    setup: str
    region: str
    x: float
    """Operations a byte."""
    y: float
    """Operations a second."""
    roof: float | None
    """Operations a second in the floor time of the profile."""

    def __str__(self) -> str:
        return f"{self.setup}, region {self.region}: {self.x:.1f} operations a byte, {si(self.y, 'FLOP')} a second"


@dataclass(frozen=True)
class _Scale:
    """Powers of ten at the edges, both axes logarithmic."""

    xs: tuple[int, int]
    ys: tuple[int, int]

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - self.xs[0]) / (self.xs[1] - self.xs[0])
        up = (math.log10(y) - self.ys[0]) / (self.ys[1] - self.ys[0])
        return _LEFT + _WIDTH * across, _TOP + _HEIGHT * (1 - up)


def roofline(setups: Sequence[Mapping[str, Any]], rates: Mapping[str, Any] | None = None) -> Element | None:
    """The regions of the set-ups of a ``fxfuse.profile/1``, each with a line up to what its floor time would be.

    ``rates``: ``bandwidth``, bytes a second, and ``flops``, dtype -> operations a second, draw the roof itself. None
    where no region has all of its figures.
    """
    points = list(_points(setups))
    if not points:
        return None
    tops = [*(p.y for p in points), *(p.roof for p in points if p.roof), *(rates["flops"].values() if rates else ())]
    scale = _Scale(_decades([p.x for p in points]), _decades(tops))
    names = list(dict.fromkeys(p.setup for p in points))
    looks = {name: _MARKS[i % len(_MARKS)] for i, name in enumerate(names)}
    return svg(
        *_grid(scale),
        *(_roofs(scale, rates) if rates else ()),
        *(_mark(scale, point, looks[point.setup]) for point in points),
        *(e for i, name in enumerate(names) for e in _key(name, looks[name], 24.0 + 20 * i)),
        width=_LEFT + _WIDTH + 150,
        height=_TOP + _HEIGHT + 46,
        title="Regions under the roofline",
        desc="; ".join(map(str, points)),
    )


def _points(setups: Sequence[Mapping[str, Any]]) -> Iterator[_Point]:
    for setup in setups:
        for r in setup["regions"]:
            if r["flops"] and r["bytes"] and r["observed_us"]:
                roof = r["flops"] / r["floor_us"] * 1e6 if r["floor_us"] else None
                seconds = r["observed_us"] * 1e-6
                yield _Point(setup["name"], r["region"] or ".", r["flops"] / r["bytes"], r["flops"] / seconds, roof)


def _mark(scale: _Scale, point: _Point, look: str) -> Element:
    x, y = scale.at(point.x, point.y)
    up = f"M{x:.1f} {y:.1f}V{scale.at(point.x, point.roof)[1]:.1f}m-5 0h10" if point.roof else None
    return element(
        "g",
        element("title", str(point)),
        element("path", d=up, class_="to-roof") if up else None,
        element("path", d=f"M{x:.1f} {y:.1f}{look}", class_=f"point {series(point.setup)}"),
    )


def _key(name: str, look: str, y: float) -> tuple[Element, Element]:
    x = _LEFT + _WIDTH + 24
    mark = element("path", d=f"M{x:.1f} {y - 4:.1f}{look}", class_=f"point {series(name)}")
    return mark, element("text", name, x=x + 14, y=y)


def _roofs(scale: _Scale, rates: Mapping[str, Any]) -> Iterator[Element]:
    """Up with the bandwidth, and level from where products take longer than their operands."""
    bandwidth = rates["bandwidth"]
    right = 10.0 ** scale.xs[1]
    left = max(10.0 ** scale.xs[0], 10.0 ** scale.ys[0] / bandwidth)
    for dtype, flops in rates["flops"].items():
        corners = [x for x in (left, flops / bandwidth, right) if left <= x <= right]
        line = [scale.at(x, min(flops, x * bandwidth)) for x in corners]
        end = line[-1]
        yield element("path", d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in line), class_="roof")
        text = f"{dtype}: {si(flops, 'FLOP')}/s"
        yield element("text", text, x=end[0] - 4, y=end[1] - 5, text_anchor="end", class_="faint")


def _grid(scale: _Scale) -> Iterator[Element]:
    right, bottom = _LEFT + _WIDTH, _TOP + _HEIGHT
    for power in range(scale.xs[0], scale.xs[1] + 1):
        x, _ = scale.at(10.0**power, 10.0 ** scale.ys[0])
        yield element("line", x1=x, x2=x, y1=_TOP, y2=bottom, class_="grid")
        yield element("text", f"{10.0**power:g}", x=x, y=bottom + 14, text_anchor="middle", class_="faint")
    for power in range(scale.ys[0], scale.ys[1] + 1):
        _, y = scale.at(10.0 ** scale.xs[0], 10.0**power)
        yield element("line", x1=_LEFT, x2=right, y1=y, y2=y, class_="grid")
        yield element("text", f"{si(10.0**power, 'FLOP')}/s", x=_LEFT - 6, y=y + 4, text_anchor="end", class_="faint")
    middle = _LEFT + _WIDTH / 2
    yield element("text", "operations a byte", x=middle, y=bottom + 34, text_anchor="middle", class_="faint")


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten around all values, at least one apart."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def si(amount: float, unit: str) -> str:
    """``1.2e12`` as 1.2 TFLOP."""
    for power, name in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if amount >= 10.0**power:
            return f"{amount / 10.0**power:.3g} {name}{unit}"
    return f"{amount:.3g} {unit}"
