"""Results as tables and Markdown for people and as JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import re
import textwrap
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from fxfuse.bench.done import done
from fxfuse.bench.measure import Result
from fxfuse.bench.profile import fallen_back
from fxfuse.bench.schema import BENCH
from fxfuse.bench.timer import Spread, Timing, rankable, speedup
from fxfuse.report import Report, short_source
from fxfuse.tuning import HAD_CORE

TERMS = {
    "median, 20–80 %": "time a call, and from the 20th to the 80th percentile of the rounds; in inference mode, but "
    "for --train; on a GPU the time of the GPU.",
    "vs eager": "how many times as fast as eager.",
    "fxfuse vs it": "how many times as fast as this row fxfuse is.",
    "≈": "the rounds of this run do not agree on which of the two is faster, so it ranks nothing.",
    "prepare s": "optimizing.",
    "first call s": "with what is compiled then; with --shapes the first call at that size. What fxfuse measured and "
    "torch compiled is kept on disk, and the next run takes less.",
    "ops": "operators that eager and fxfuse dispatch a call.",
    "extra MiB": "memory that a call takes at its peak, by the allocator of torch.",
    "peak MiB": "the same with weights and inputs, without copies of weights that a variant keeps.",
    "host, waiting": "on a GPU, until a call is enqueued, and until its answer is there.",
    "compile": "torch.compile; compile-freezing: with freezing; compile-max: with max-autotune.",
    "liger, onednn": "Liger's kernels; oneDNN called by hand.",
    "gemms": "the bare products, a floor.",
    "core": "how much of the time the timing thread had one; where not all of it, other programs ran: measure again.",
}
"""What the words in the tables mean."""

LEGEND = "\n".join(
    textwrap.fill(f"{term}: {meaning}", 118, subsequent_indent="    ") for term, meaning in TERMS.items()
)


def table(result: Result) -> str:
    """One target: a row for each variant, then what was fused and what was left out."""
    return "\n".join([_title(result), _variants(result, "simple"), *remarks(result)])


def _title(result: Result) -> str:
    return f"{result.label}  ({result.device}, {result.dtype})"


def _variants(result: Result, style: str) -> str:
    align = ("left", *["right"] * (len(head(result)) - 1))
    return tabulate(rows(result), head(result), tablefmt=style, colalign=align, disable_numparse=True)


def head(result: Result) -> list[str]:
    """The columns of ``rows``."""
    unit = _unit(result)
    columns = ["", f"median {unit}", "20–80 %", "vs eager", "fxfuse vs it", "prepare s", "first call s", "ops"]
    columns += ["peak MiB", "extra MiB"] if result.extra_bytes else []
    return columns + (["host µs", f"waiting {unit}", "kernels"] if result.submit else [])


def rows(result: Result) -> list[tuple[object, ...]]:
    """One for each variant."""
    eager, ours, unit = result.timings["eager"], result.timings.get("fxfuse"), _unit(result)
    found: list[tuple[object, ...]] = []
    for name, timing in result.timings.items():
        spread = timing.spread
        found.append(
            (
                name,
                _in(unit, spread.median),
                f"{_in(unit, spread.p20)}–{_in(unit, spread.p80)}",
                "" if name == "eager" else _times(speedup(timing, eager)),
                "" if name == "fxfuse" or ours is None else _times(speedup(ours, timing)),
                "" if name == "eager" else f"{result.prepare_s[name]:.2f}",
                f"{result.first_call_s[name]:.2f}",
                result.ops.get(name, ""),
                *(_memory(result, name) if result.extra_bytes else []),
                *(_on_gpu(result, name, unit) if result.submit else []),
            )
        )
    return found


def _memory(result: Result, name: str) -> list[object]:
    extra = result.extra_bytes[name]
    return [f"{size / 2**20:.1f}" for size in (result.held_bytes + extra, extra)]


def _on_gpu(result: Result, name: str, unit: str) -> list[object]:
    host, waiting = result.submit[name].spread.median, result.end_to_end[name].spread.median
    return [_in("µs", host), _in(unit, waiting), result.kernels[name]]


def remarks(result: Result) -> list[str]:
    """What was fused, how far the figures can be trusted, and what was left out and why."""
    return [*([] if result.fxfuse_failed else [f"{_counted(result)}; {fewer(result)}"]), *caveats(result)]


def _counted(result: Result) -> str:
    done = [f"{result.fused} fused"] if result.fused else []
    done += [f"{result.lowered} lowered (one operator, a faster implementation)"] if result.lowered else []
    return ", ".join(done) or "nothing was fused"


def fewer(result: Result) -> str:
    """What a call of fxfuse is made of, where a call of eager was so much; "" where there is no fxfuse."""
    if result.fxfuse_failed:
        return ""
    if result.kernels:
        eager, ours = (result.kernels[name] for name in ("eager", "fxfuse"))
        return f"GPU kernels a call: {eager} → {ours} ({result.kernels_saved} fewer were predicted)"
    eager, ours = (result.ops[name] for name in ("eager", "fxfuse"))
    return f"operators dispatched a call: {eager} → {ours}"


def caveats(result: Result) -> list[str]:
    """How far the figures can be trusted, and what was left out and why."""
    lines = []
    if result.device == "cpu":
        busy = ": other programs ran, so measure again" if result.had_core < HAD_CORE else ""
        lines.append(f"the timing thread had a core {result.had_core:.0%} of the time{busy}")
    lines += fallen_back(result.report) if result.report else []
    if result.weaker_gate:
        lines.append(f"answers compared by the norm of their error only: {result.weaker_gate}")
    return [*lines, *(f"left out: {gone.name}: {gone.reason}" for gone in result.left_out)]


def summary(results: Sequence[Result], style: str = "simple") -> str:
    """All targets: one row each, with what fxfuse gains over every other variant."""
    others = list(dict.fromkeys(name for result in results for name in result.timings if name != "fxfuse"))
    rows = []
    for result in results:
        ours = result.timings.get("fxfuse")
        gains = [
            _times(speedup(ours, result.timings[name])) if ours and name in result.timings else "—" for name in others
        ]
        last = f"{result.had_core:.0%}" if result.device == "cpu" else _host(result)
        rows.append((result.label, result.dtype, _median(result, "eager"), _median(result, "fxfuse"), *gains, last))
    on_gpu = any(result.device == "cuda" for result in results)
    last = "host, kernels" if on_gpu else "core"
    header = ("", "dtype", "eager", "fxfuse", *(f"vs {name}" for name in others), last)
    align = ("left", "left", *["right"] * (len(header) - 2))
    return tabulate(rows, header, tablefmt=style, colalign=align, disable_numparse=True)


def as_markdown(results: Sequence[Result], unfinished: Sequence[str] = ()) -> str:
    """The tables, and what was done to each model and what was not, as a page in GitHub's Markdown."""
    parts = ["# fxfuse bench", ", ".join(facts())]
    parts += [f"**Not finished:** {', '.join(unfinished)}"] if unfinished else []
    parts += [summary(results, "github")] if results else []
    for result in results:
        parts += [f"## {_title(result)}", _variants(result, "github"), "\n".join(f"- {r}" for r in remarks(result))]
        for title, rows in done(result.report) if result.report else ():
            cells = [(times, what, outcome, _code(where)) for times, what, outcome, where in rows]
            escaped = [[text.replace("|", "\\|") for text in row] for row in cells]
            columns = ["", "what", "outcome", "where"]
            parts.append(f"**{title}**\n\n" + tabulate(escaped, columns, tablefmt="github", disable_numparse=True))
    legend = "\n".join(f"- **{term}**: {meaning}" for term, meaning in TERMS.items())
    return "\n\n".join([*parts, "## How to read this", legend]) + "\n"


def _code(text: str) -> str:
    """In Markdown a backtick ends code that one backtick began, but not what two began."""
    return f"`` {text} ``" if "`" in text else text and f"`{text}`"


def facts() -> list[str]:
    """Machine and versions in a few words each."""
    on = machine()
    cores = f"{on['cpu']}, {on['threads']} thread{'s' * (on['threads'] != 1)}"
    return [*([on["gpu"]] if on["gpu"] else []), cores, *(f"{name} {version}" for name, version in versions().items())]


def as_json(results: Sequence[Result], settings: dict[str, Any], unfinished: Sequence[str] = ()) -> str:
    """``fxfuse.bench/1``: machine, versions, settings, and for each target its variants with seconds a call.

    ``unfinished``: targets that were asked for and have no result. ``fxfuse.bench.schema`` holds the shape.
    """
    document = {
        "schema": BENCH,
        "machine": machine(),
        "versions": versions(),
        "settings": settings,
        "results": [_as_dict(result) for result in results],
        "unfinished": list(unfinished),
    }
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)


def machine() -> dict[str, Any]:
    """What the figures depend on, and nothing that names the machine itself."""
    return {
        "system": platform.system(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "fxfuse": metadata.version("fxfuse")}
    driver = _driver()
    return {**found, "driver": driver} if driver else found


def _driver() -> str:
    """The version of NVIDIA's kernel driver, or ""."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    return next(iter(re.findall(r"\b\d+\.\d+(?:\.\d+)?\b", text)), "")


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _as_dict(result: Result) -> dict[str, Any]:
    eager, ours = result.timings["eager"], result.timings.get("fxfuse")
    return {
        "target": result.label,
        "device": result.device,
        "dtype": result.dtype,
        "had_core": result.had_core,
        "fused": result.fused,
        "lowered": result.lowered,
        "kernels_saved": result.kernels_saved,
        "ops": result.ops,
        "held_bytes": result.held_bytes,
        "variants": [
            {
                "name": name,
                "median_s": timing.spread.median,
                "p20_s": timing.spread.p20,
                "p80_s": timing.spread.p80,
                "rounds": len(timing.samples),
                "calls": timing.calls,
                "setup_s": result.prepare_s[name] + result.first_call_s[name],
                "first_call_s": result.first_call_s[name],
                "speedup_over_eager": _ratio(timing, eager),
                "fxfuse_speedup": _ratio(ours, timing) if ours else None,
                "submit_s": result.submit[name].spread.median if result.submit else None,
                "kernels": result.kernels.get(name),
                "end_to_end_s": result.end_to_end[name].spread.median if result.end_to_end else None,
                "extra_bytes": result.extra_bytes.get(name),
            }
            for name, timing in result.timings.items()
        ],
        "weaker_gate": result.weaker_gate,
        "left_out": [{"name": gone.name, "reason": gone.reason} for gone in result.left_out],
        "report": result.report and _did(result.report),
    }


def _did(report: Report) -> dict[str, Any]:
    """The report as it goes into a file that others read: with the names of source files and not their folders."""
    whole = report.to_dict()
    events = [{**event, "source": short_source(event["source"])} for event in whole["events"]]
    return {"events": events, **{key: whole[key] for key in ("model", "regions", "uncaptured", "coverage", "notes")}}


def _ratio(ours: Timing, theirs: Timing) -> dict[str, Any]:
    ratio = speedup(ours, theirs)
    return {"median": ratio.median, "p20": ratio.p20, "p80": ratio.p80, "rankable": rankable(ratio)}


def _median(result: Result, name: str) -> str:
    eager = result.timings["eager"].spread.median
    return time(result.timings[name].spread.median, like=eager) if name in result.timings else "—"


def _host(result: Result) -> str:
    """Of eager and of fxfuse, as "45 µs → 18 µs, 5 → 2"."""
    names = [name for name in ("eager", "fxfuse") if name in result.submit]
    host = " → ".join(time(result.submit[name].spread.median) for name in names)
    return f"{host}, {' → '.join(str(result.kernels[name]) for name in names)}"


_PER_SECOND = {"µs": 1e6, "ms": 1e3}


def _unit(result: Result) -> str:
    """Of one target's times."""
    return _unit_of(result.timings["eager"].spread.median)


def _unit_of(seconds: float) -> str:
    return "µs" if seconds < 10e-3 else "ms"


def _in(unit: str, seconds: float) -> str:
    value = seconds * _PER_SECOND[unit]
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


def time(seconds: float, like: float | None = None) -> str:
    """With its unit, or that of the time ``like``, which stands beside."""
    unit = _unit_of(seconds if like is None else like)
    return f"{_in(unit, seconds)} {unit}"


def _times(ratio: Spread) -> str:
    return f"{ratio.median:.2f}" if rankable(ratio) else f"≈ {ratio.median:.2f}"
