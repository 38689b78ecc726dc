"""The report of ``fxfuse bench`` as one HTML file: what was done to each model, and what it brought."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from fxfuse.bench import charts, render
from fxfuse.bench.done import done
from fxfuse.bench.measure import Result
from fxfuse.bench.peers import FLOORS
from fxfuse.bench.roofline import roofline
from fxfuse.bench.timer import rankable, speedup
from fxfuse.drawing import formats
from fxfuse.drawing.markup import as_html, page_style
from fxfuse.drawing.svg import heading
from fxfuse.drawing.view import Part
from fxfuse.errors import missing_package

if TYPE_CHECKING:
    import jinja2


def environment() -> jinja2.Environment:
    """What renders the template. ``errors.MissingPackage`` without jinja2."""
    try:
        import jinja2
    except ImportError as missing:
        raise missing_package("--html", "jinja2", "'fxfuse[report]'") from missing
    return jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)


def report(results: Sequence[Result], unfinished: Sequence[str] = (), profile: Mapping[str, Any] | None = None) -> str:
    """The page. It loads nothing, runs no script, and follows the reader's light or dark.

    ``profile``: a document of ``fxfuse.profile/1``, whose kernels and regions are shown as well.
    """
    template = resources.files("fxfuse.bench").joinpath("report.html.j2").read_text(encoding="utf-8")
    return (
        environment()
        .from_string(template)
        .render(
            style=page_style(),
            facts=render.facts(),
            targets=[_target(result) for result in results],
            unfinished=unfinished,
            profile=profile and _profile(profile, [result.label for result in results]),
            legend=render.LEGEND,
        )
    )


def _target(result: Result) -> dict[str, Any]:
    return {
        "name": result.label,
        "on": f"{result.device}, {result.dtype}",
        "headline": headline(result),
        "bars": as_html(charts.speedups(result)),
        "head": render.head(result),
        "rows": render.rows(result),
        "remarks": render.remarks(result),
        "did": done(result.report) if result.report else [],
        "legend": as_html(formats.legend(result.view)) if result.view else "",
        "parts": [_part(part) for part in result.view.parts] if result.view else [],
    }


def _part(part: Part) -> dict[str, Any]:
    fused = any(mark == "fused" for _, mark in part.after.nodes(data="mark"))
    return {"heading": heading(part), "drawing": as_html(formats.section(part)), "open": fused}


def headline(result: Result) -> str:
    """What it brought, in a sentence."""
    ours = result.timings.get("fxfuse")
    if ours is None:
        return "fxfuse gave no answer that could be timed; what is left out below says why."
    ratio = speedup(ours, result.timings["eager"])
    if not rankable(ratio):
        return f"The rounds do not agree whether fxfuse or eager is faster (median: {ratio.median:.2f} times as fast)."
    if ratio.median < 1:
        return f"fxfuse is slower than eager here: {ratio.median:.2f} times as fast."
    others = [(name, speedup(ours, timing)) for name, timing in result.timings.items() if name not in _NO_RIVALS]
    against = "".join(f", {gain.median:.2f} times as fast as {name}" for name, gain in others if rankable(gain))
    return f"{ratio.median:.2f} times as fast as eager ({ratio.p20:.2f}–{ratio.p80:.2f} in most rounds){against}."


_NO_RIVALS = {"eager", "fxfuse", *FLOORS}


def _profile(document: Mapping[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    setups = document["setups"]
    drawings = {"timeline": charts.timeline(setups), "roofline": roofline(setups, document.get("rates"))}
    lines = [{"setup": setup["name"], **line} for setup in setups for line in setup["lines"]]
    target = document.get("target", "")
    return {
        "target": target,
        "on": ", ".join(filter(None, (document.get("device"), document.get("dtype")))),
        # A result at one of several sizes has the size after its name.
        "of_another": not any(label == target or label.startswith(f"{target} ") for label in labels),
        **{name: "" if drawing is None else as_html(drawing) for name, drawing in drawings.items()},
        "ran": [(setup["name"], one) for setup in setups for one in charts.ran(setup)],
        "lines": [["" if line.get(key) is None else str(line[key]) for key in LINE] for line in lines],
        "verdicts": Counter(str(line.get("verdict")) for line in lines),
        "head": LINE,
    }


#: Of a line of a profile.
LINE = ("setup", "region", "what", "predicted", "observed", "verdict", "why")
