"""The report of ``fxfuse bench`` as one HTML file: what was done to each model, and what it brought."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from fxfuse.bench import charts, render
from fxfuse.bench.done import TITLES, done
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


def report(
    results: Sequence[Result], unfinished: Sequence[str] = (), profiles: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The page. It loads nothing, runs no script, and follows the reader's light or dark.

    ``profiles``: documents of ``fxfuse.profile/1``, whose kernels and regions are shown with the target that they are
    of, and at the end where that is not among the results.
    """
    shown = [(profile, _of(profile, results)) for profile in profiles]
    template = resources.files("fxfuse.bench").joinpath("report.html.j2").read_text(encoding="utf-8")
    return (
        environment()
        .from_string(template)
        .render(
            style=page_style(),
            facts=render.facts(),
            targets=[_target(r, [_profile(p) for p, of in shown if of is r]) for r in results],
            others=[_profile(profile) for profile, of in shown if of is None],
            unfinished=unfinished,
            terms=render.TERMS,
        )
    )


def _of(profile: Mapping[str, Any], results: Sequence[Result]) -> Result | None:
    """The result of the same target; at one of several sizes it has the size after its name."""
    name, on = profile.get("target", ""), (profile.get("device"), profile.get("dtype"))
    named = [r for r in results if r.label == name or r.label.startswith(f"{name} ")]
    return next((r for r in named if on in ((r.device, r.dtype), (None, None))), None)


def _target(result: Result, profiles: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "name": result.label,
        "on": f"{result.device}, {result.dtype}",
        "headline": headline(result),
        "gain": _gain(result),
        "in_short": in_short(result),
        "bars": as_html(charts.speedups(result)),
        "profiles": profiles,
        "head": render.head(result),
        "rows": render.rows(result),
        "remarks": render.caveats(result),
        "fewer": render.fewer(result),
        "did": done(result.report) if result.report else [],
        "legend": as_html(formats.legend(result.view)) if result.view else "",
        "parts": [_part(part) for part in result.view.parts] if result.view else [],
    }


def _part(part: Part) -> dict[str, Any]:
    fused = any(mark == "fused" for _, mark in part.after.nodes(data="mark"))
    return {"heading": heading(part), "drawing": as_html(formats.section(part)), "open": fused}


def in_short(result: Result) -> list[tuple[str, str]]:
    """What was done and what was not, most often first of each kind: a word and a text each."""
    if result.view is None or result.report is None:
        return []
    became = {"lowered": ", by a faster implementation"}
    said = [
        (c.kind, f"{_times(c.count)}: {c.before or 'a view'}{became.get(c.kind, f' → one {c.after}')}")
        for c in result.view.changes
    ]
    said.sort(key=lambda line: list(TITLES).index(line[0]))
    kept = Counter(event.reason for event in result.report.kept).most_common()
    said += [("kept", f"{_times(count)}: {reason}") for reason, count in kept[:_REASONS]]
    more = sum(count for _, count in kept[_REASONS:])
    said += [("kept", f"{more} more, with their reasons below")] if more else []
    outside = result.view.uncaptured
    said += [("not captured", f"{outside} module{'s' * (outside != 1)}, with the reason below")] if outside else []
    return said


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


_REASONS = 3
"""That are worth a line at the top."""


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
    eager = result.timings["eager"].spread.median
    before, after = (render.time(seconds, like=eager) for seconds in (eager, ours.spread.median))
    others = [(name, speedup(ours, timing)) for name, timing in result.timings.items() if name not in _NO_RIVALS]
    against = "".join(
        f", {gain.median:.2f} times as fast as {_RIVALS.get(name, name)}" for name, gain in others if rankable(gain)
    )
    return (
        f"{before} → {after} a call: {ratio.median:.2f} times as fast as eager "
        f"({ratio.p20:.2f}–{ratio.p80:.2f} in most rounds){against}."
    )


def _gain(result: Result) -> str:
    ours = result.timings.get("fxfuse")
    if ours is None:
        return "no answer"
    ratio = speedup(ours, result.timings["eager"])
    return f"{'' if rankable(ratio) else '≈ '}{ratio.median:.2f} × eager"


_RIVALS = {
    "compile": "torch.compile",
    "compile-max": "torch.compile with max-autotune",
    "compile-freezing": "torch.compile with freezing",
    "liger": "Liger",
    "onednn": "oneDNN by hand",
}
_NO_RIVALS = {"eager", "fxfuse", *FLOORS}


def _profile(document: Mapping[str, Any]) -> dict[str, Any]:
    setups = document["setups"]
    drawings = {"timeline": charts.timeline(setups), "roofline": roofline(setups, document.get("rates"))}
    lines = [{"setup": setup["name"], **line} for setup in setups for line in setup["lines"]]
    return {
        "target": document.get("target", ""),
        "on": ", ".join(filter(None, (document.get("device"), document.get("dtype")))),
        "notes": document.get("notes", []),
        **{name: "" if drawing is None else as_html(drawing) for name, drawing in drawings.items()},
        "ran": [(setup["name"], one) for setup in setups for one in charts.ran(setup)],
        "lines": [["" if line.get(key) is None else str(line[key]) for key in LINE] for line in lines],
        "verdicts": Counter(str(line.get("verdict")) for line in lines),
        "head": LINE,
    }


#: Of a line of a profile.
LINE = ("setup", "region", "what", "predicted", "observed", "verdict", "why")
