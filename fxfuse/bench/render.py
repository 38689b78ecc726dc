"""Results as tables for people and as JSON for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from fxfuse.bench.measure import Result
from fxfuse.bench.timer import Spread, Timing, rankable, speedup

SCHEMA = 1

LEGEND = (
    "median, 20–80 %: microseconds a call, inference mode; x eager: how many times as fast as eager;\n"
    "fxfuse is, vs: how many times as fast as that variant fxfuse is; ops: operators dispatched a call.\n"
    "On a GPU times are of the GPU; host µs: until the host has enqueued a call; gemms: the bare products, a floor.\n"
    "≈: the rounds of this run do not agree on which of the two is faster, so it ranks nothing.\n"
    "core: how much of the time the timing thread had one; where not all of it, other programs ran: measure again."
)


def table(result: Result) -> str:
    """One target: a row for each variant, then what was fused and what was left out."""
    eager, ours = result.timings["eager"], result.timings.get("fxfuse")
    rows = []
    for name, timing in result.timings.items():
        spread = timing.spread
        rows.append(
            (
                name,
                _us(spread.median),
                f"{_us(spread.p20)}–{_us(spread.p80)}",
                "" if name == "eager" else _times(speedup(timing, eager)),
                "" if name == "fxfuse" or ours is None else _times(speedup(ours, timing)),
                "" if name == "eager" else f"{result.setup_s[name]:.2f}",
                result.ops.get(name, ""),
                *([_us(result.submit[name].spread.median), result.kernels[name]] if result.submit else []),
            )
        )
    header = ["", "median", "20–80 %", "x eager", "fxfuse is", "set-up s", "ops"]
    header += ["host µs", "kernels"] if result.submit else []
    align = ("left", *["right"] * (len(header) - 1))
    lines = [
        f"{result.label}  ({result.device}, {result.dtype})",
        tabulate(rows, header, colalign=align, disable_numparse=True),
    ]
    if ours is not None:
        lines.append(
            f"fused {result.fused}, lowered {result.lowered}; predicted kernels saved a call: {result.kernels_saved}"
        )
    if result.device == "cpu":
        lines.append(f"the timing thread had a core {result.had_core:.0%} of the time")
    if result.weaker_gate:
        lines.append(f"answers compared by the norm of their error only: {result.weaker_gate}")
    lines += [f"left out: {gone.name}: {gone.reason}" for gone in result.left_out]
    return "\n".join(lines)


def summary(results: Sequence[Result]) -> str:
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
    last = "host µs, kernels" if on_gpu else "core"
    header = ("", "dtype", "eager µs", "fxfuse µs", *(f"vs {name}" for name in others), last)
    return tabulate(rows, header, colalign=("left", "left", *["right"] * (len(header) - 2)), disable_numparse=True)


def as_json(results: Sequence[Result], settings: dict[str, Any]) -> str:
    """Schema 1: machine, versions, settings, and for each target its variants with seconds a call."""
    document = {
        "schema": SCHEMA,
        "machine": machine(),
        "versions": versions(),
        "settings": settings,
        "results": [_as_dict(result) for result in results],
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
    return {"python": platform.python_version(), "torch": torch.__version__, "fxfuse": metadata.version("fxfuse")}


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
        "variants": [
            {
                "name": name,
                "median_s": timing.spread.median,
                "p20_s": timing.spread.p20,
                "p80_s": timing.spread.p80,
                "rounds": len(timing.samples),
                "calls": timing.calls,
                "setup_s": result.setup_s[name],
                "speedup_over_eager": _ratio(timing, eager),
                "fxfuse_speedup": _ratio(ours, timing) if ours else None,
                "submit_s": result.submit[name].spread.median if result.submit else None,
                "kernels": result.kernels.get(name),
            }
            for name, timing in result.timings.items()
        ],
        "weaker_gate": result.weaker_gate,
        "left_out": [{"name": gone.name, "reason": gone.reason} for gone in result.left_out],
    }


def _ratio(ours: Timing, theirs: Timing) -> dict[str, Any]:
    ratio = speedup(ours, theirs)
    return {"median": ratio.median, "p20": ratio.p20, "p80": ratio.p80, "rankable": rankable(ratio)}


def _median(result: Result, name: str) -> str:
    return _us(result.timings[name].spread.median) if name in result.timings else "—"


def _host(result: Result) -> str:
    """Of eager and of fxfuse, as "45 → 18, 5 → 2"."""
    names = [name for name in ("eager", "fxfuse") if name in result.submit]
    host = " → ".join(_us(result.submit[name].spread.median) for name in names)
    return f"{host}, {' → '.join(str(result.kernels[name]) for name in names)}"


def _us(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}"


def _times(ratio: Spread) -> str:
    return f"{ratio.median:.2f}" if rankable(ratio) else f"≈ {ratio.median:.2f}"
