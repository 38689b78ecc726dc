"""Charts of the HTML report, as SVG: speed-ups as bars, and what ran in a call on a time line."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from fxfuse.bench import render
from fxfuse.bench.measure import Result
from fxfuse.bench.timer import Spread, rankable, speedup
from fxfuse.drawing.markup import element, svg, text_width

_NAMES, _BARS, _VALUES, _BAR = 118.0, 150.0, 74.0, 28.0
"""Widths of a bar chart, together those of a narrow phone, and the height of a bar."""
_TIMES, _LANE = 880.0, 62.0


def speedups(result: Result) -> Element:
    """How many times as fast as eager each variant is; a whisker from the 20th to the 80th percentile of the rounds."""
    eager = result.timings["eager"]
    ratios = {name: speedup(timing, eager) for name, timing in result.timings.items()}
    scale = _BARS / max(1.2, *(ratio.p80 for ratio in ratios.values()))
    height = _BAR * len(ratios) + 30
    one = _NAMES + scale
    said = "; ".join(f"{name} {ratio.median:.2f} times as fast as eager" for name, ratio in ratios.items())
    return svg(
        element("line", x1=one, x2=one, y1=4, y2=height - 18, class_="axis"),
        element("text", "1 = eager", x=one, y=height - 5, text_anchor="middle", class_="faint"),
        *(_bar(name, ratio, scale, 8 + i * _BAR) for i, (name, ratio) in enumerate(ratios.items())),
        width=_NAMES + _BARS + _VALUES,
        height=height,
        title=f"Speed of {result.label} over eager",
        desc=said,
    )


def _bar(name: str, ratio: Spread, scale: float, y: float) -> Element:
    low, middle, high = (_NAMES + scale * value for value in (ratio.p20, ratio.median, ratio.p80))
    # Where the rounds do not agree on the winner the figure ranks nothing, and does not look as if it did.
    value = f"{ratio.median:.2f} ×" if rankable(ratio) or name == "eager" else f"≈ {ratio.median:.2f} ×"
    ours = name == "fxfuse"
    whisker = f"M{low:.1f} {y + 10:.1f}H{high:.1f}M{low:.1f} {y + 5:.1f}v10M{high:.1f} {y + 5:.1f}v10"
    spread = f"20–80 %: {ratio.p20:.3f}–{ratio.p80:.3f}"
    return element(
        "g",
        element("title", f"{name}: {ratio.median:.3f} times as fast as eager ({spread})"),
        element("text", name, x=_NAMES - 8, y=y + 14, text_anchor="end", class_="sub" if ours else None),
        element("rect", x=_NAMES, y=y, width=middle - _NAMES, height=20, rx=2, class_=f"bar {series(name)}"),
        element("path", d=whisker, class_="whisker"),
        element("text", value, x=max(high, middle) + 6, y=y + 14),
    )


def ran(setup: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The kernels of a set-up of a ``fxfuse.profile/1``; on a CPU, which has none, the operators that were called."""
    ops = [op for op in setup.get("ops", ()) if op["called"]]
    return setup["kernels"] or [{**op, "kind": op["name"].rpartition("::")[2]} for op in ops]


def timeline(setups: Sequence[Mapping[str, Any]]) -> Element | None:
    """What ran in one call of each set-up of a ``fxfuse.profile/1``, from its first on, all on one scale.

    None where nothing did.
    """
    lanes = [(setup["name"], ran(setup)) for setup in setups if ran(setup)]
    what = {setup["name"]: "kernels" if setup["kernels"] else "operators" for setup in setups}
    if not lanes:
        return None
    first = {name: min(kernel["start_us"] for kernel in kernels) for name, kernels in lanes}
    lasted = {name: max(k["start_us"] + k["us"] for k in kernels) - first[name] for name, kernels in lanes}
    longest = max(lasted.values()) or 1.0
    said = {
        name: f"{name}: {len(kernels)} {what[name]} in {render.time(lasted[name] * 1e-6, like=longest * 1e-6)}"
        for name, kernels in lanes
    }
    scale, bottom = _TIMES / longest, _LANE * len(lanes) + 6
    body = []
    for i, (name, kernels) in enumerate(lanes):
        body.append(element("text", said[name], x=10, y=_LANE * i + 14, class_="sub"))
        body += [_kernel(k, 10 + (k["start_us"] - first[name]) * scale, scale, _LANE * i + 22) for k in kernels]
    for tick in ticks(longest):
        x = 10 + tick * scale
        body.append(element("line", x1=x, x2=x, y1=bottom - 4, y2=bottom, class_="axis"))
        body.append(
            element(
                "text",
                render.time(tick * 1e-6, like=longest * 1e-6) if tick else "0",
                x=x,
                y=bottom + 12,
                class_="faint",
            )
        )
    seen = {_look(kernel["kind"]) for _, kernels in lanes for kernel in kernels}
    for i, look in enumerate(look for look in _LOOKS if look in seen):
        x, y = 10 + 150.0 * i, bottom + 24.0
        body.append(element("rect", x=x, y=y, width=14, height=14, class_=f"key {look}"))
        body.append(element("text", _LOOKS[look], x=x + 20, y=y + 11, class_="faint"))
    return svg(
        *body,
        width=_TIMES + 20,
        height=bottom + 46,
        title="What ran, on one time scale",
        desc="; ".join(said.values()),
    )


def _kernel(kernel: Mapping[str, Any], x: float, scale: float, y: float) -> Element:
    width, kind = max(1.0, kernel["us"] * scale), kernel["kind"]
    fits = text_width(kind, 10) + 6 <= width
    return element(
        "g",
        element("title", f"{kernel['name']}\n{kind}, {kernel['us']:.2f} µs"),
        element("rect", x=x, y=y, width=width, height=26, class_=f"kernel {_look(kind)}"),
        element("text", kind, x=x + 4, y=y + 17, class_="tiny") if fits else None,
    )


def _look(kind: str) -> str:
    return "product-fused" if "fused" in kind else "product" if any(part in kind for part in _PRODUCTS) else "rest"


_LOOKS = {"product": "product", "product-fused": "product, something fused", "rest": "anything else"}
_PRODUCTS = ("gemm", "mm", "linear", "matmul")


def series(name: str) -> str:
    """The class that colours a variant."""
    return "ours" if name == "fxfuse" else "theirs"


def ticks(longest: float) -> list[float]:
    """Four to ten round numbers from 0 to about ``longest``."""
    power = 10.0 ** math.floor(math.log10(longest))
    step = next(power / part for part in (1, 2, 5, 10) if longest * part / power >= 4)
    return list(itertools.takewhile(lambda tick: tick <= 0.95 * longest, (i * step for i in itertools.count())))
