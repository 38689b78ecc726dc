"""A profile as tables for people and as JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tabulate import tabulate

from fxfuse.bench import render
from fxfuse.bench.gate import Admitted
from fxfuse.bench.kernel_names import short
from fxfuse.bench.machine_rates import Rates
from fxfuse.bench.peers import one_line
from fxfuse.bench.profile import Cost, Line, Profile, SetUp, Verdict, profile
from fxfuse.bench.roofline import si
from fxfuse.bench.schema import PROFILE
from fxfuse.bench.targets import Target
from fxfuse.bench.trace import Kernel
from fxfuse.bench.work import Work

_HOST_OP = "host op "
_WIDTH = 100

LEGEND = (
    "predicted: from the graph, before anything ran; observed: in one traced call.\n"
    "≥: only a part is predicted, and why stands last. region: the path of a module; . is the model itself.\n"
    "host ops: operators that are called, and those inside them that have a kernel of their own.\n"
    "products: operations of matrix products; moved: bytes to and from memory; floor: the least time for these at the\n"
    "device's measured rates, kernel by kernel, as if none found in a cache what another left there.\n"
    "Times are taken under the profiler, which adds to the host's."
)


def table(profile: Profile, *, nodes: bool = False) -> str:
    """Every set-up: what was predicted and seen, what it costs, and which kernels ran; with ``nodes`` by node, too."""
    parts = [f"{profile.target}  ({profile.device}, {profile.dtype}): {_verdicts(profile)}", _rates(profile)]
    for set_up in profile.set_ups:
        parts += _set_up(set_up, profile.device)
        if nodes and set_up.works:
            rows = [_node(region, work, profile.rates) for region, works in set_up.works.items() for work in works]
            parts.append(_simple(rows, ["region", "node", "op", "kernels", "products", "moved", "floor"], "llllrrr"))
    remarks = [f"not finished: {', '.join(profile.unfinished)}"] if profile.unfinished else []
    remarks += [f"left out: {gone.name}: {gone.reason}" for gone in profile.left_out] + profile.notes
    return "\n\n".join(filter(None, [*parts, "\n".join(remarks), LEGEND]))


def _verdicts(profile: Profile) -> str:
    found = Counter(line.verdict for set_up in profile.set_ups for line in set_up.lines)
    return f"{found['confirmed']} lines confirmed, {found['broken']} broken, {found['not predicted']} not predicted"


def _rates(profile: Profile) -> str:
    products = "".join(f", {si(flops, 'FLOP')}/s {dtype}" for dtype, flops in profile.rates.flops.items())
    return f"measured rates: {si(profile.rates.bandwidth, 'B')}/s{products} (kept: {profile.rates.kept})"


def _set_up(set_up: SetUp, device: str) -> Iterator[str]:
    yield f"{set_up.name}: {_headline(set_up, device)}"
    head = ["region", "what", "predicted", "observed", "verdict", "seen, or why not"]
    yield _simple([_row(line) for line in _folded(set_up.lines)], head, "llrrll")
    if set_up.costs:
        yield _simple(map(_cost, set_up.costs), ["region", "products", "moved", "floor", "observed"], "lrrrr")
    if set_up.call.kernels:
        yield _simple(map(_kernel, set_up.call.kernels), ["at µs", "µs", "kind", "tile", "layout", "kernel"], "rrllll")
    if set_up.primitives:
        counted = Counter((p.primitive, p.implementation, p.problem, p.post_ops) for p in set_up.primitives)
        rows = [(*what, count) for what, count in counted.items()]
        yield _simple(rows, ["oneDNN primitive", "implementation", "problem", "epilogue", "times"], "llllr")
    if set_up.trace_file:
        yield f"trace: {set_up.trace_file}"


def _headline(set_up: SetUp, device: str) -> str:
    call = set_up.call
    called = sum(op.called for op in call.operators)
    host = f"{called} operators called, {_time(set_up.us)} a call under the profiler"
    if device != "cuda":
        return host
    return (
        f"{len(call.kernels)} kernels in {sum(k.us for k in call.kernels):.1f} µs, {sum(call.gaps_us):.1f} µs between "
        f"them; {call.launches.total()} launches, {call.memsets} memsets, {call.occupancy_queries} occupancy queries; "
        + host
    )


def _folded(lines: Iterable[Line]) -> Iterator[Line]:
    """The operators of a region as one line, but for those that break a prediction; other lines as they are."""
    operators: dict[tuple[str, Verdict, str], list[Line]] = {}
    for line in lines:
        if line.what.startswith(_HOST_OP) and line.verdict != "broken":
            operators.setdefault((line.region, line.verdict, line.why), []).append(line)
        else:
            yield line
    for (region, verdict, why), folded in operators.items():
        names = ", ".join(f"{line.what.removeprefix(_HOST_OP)} {line.observed}" for line in folded)
        predicted = sum(line.predicted or 0 for line in folded)
        observed = sum(line.observed for line in folded)
        yield Line(region, "host ops", predicted or None, observed, verdict, "; ".join(filter(None, (why, names))))


def _row(line: Line) -> tuple[object, ...]:
    at_least = "≥ " if line.verdict == "not predicted" else ""
    predicted = "—" if line.predicted is None else f"{at_least}{line.predicted}"
    return _path(line.region), line.what, predicted, line.observed, line.verdict, _cut(line.why)


def _cost(cost: Cost) -> tuple[object, ...]:
    costs = si(cost.flops, "FLOP"), si(cost.moved, "B"), _time(cost.floor_us), _time(cost.observed_us)
    return _path(cost.region), *costs


def _node(region: str, work: Work, rates: Rates) -> tuple[object, ...]:
    kernels = ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in work.kernels.items())
    costs = si(work.flops, "FLOP"), si(work.moved, "B"), render.time(work.floor_s(rates))
    return _path(region), work.node, work.op, _cut(work.unknown or work.unknown_kernels or kernels), *costs


def _kernel(kernel: Kernel) -> tuple[object, ...]:
    says = kernel.says
    name = _cut(short(kernel.name))
    return f"{kernel.start_us:.1f}", f"{kernel.us:.1f}", says.kind, says.tile, f"{says.layout} {says.dtype}", name


def _time(us: float) -> str:
    return render.time(us * 1e-6)


def _path(region: str) -> str:
    return region or "."


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


def _simple(rows: Iterable[tuple[object, ...]], head: list[str], align: str) -> str:
    sides = tuple("right" if letter == "r" else "left" for letter in align)
    return tabulate(list(rows), head, colalign=sides, disable_numparse=True)


def as_json(profile: Profile) -> str:
    """``document`` as text."""
    return json.dumps(document(profile), indent=1, ensure_ascii=False, allow_nan=False)


def document(profile: Profile) -> dict[str, Any]:
    """``fxfuse.profile/1``. Times in microseconds, bytes and operations as they are."""
    return {
        "schema": PROFILE,
        "machine": render.machine(),
        "versions": render.versions(),
        "target": profile.target,
        "device": profile.device,
        "dtype": profile.dtype,
        "rates": {"bandwidth": profile.rates.bandwidth, "flops": profile.rates.flops},
        "setups": [_set_up_document(set_up, profile.rates) for set_up in profile.set_ups],
        "left_out": [{"name": gone.name, "reason": gone.reason} for gone in profile.left_out],
        "notes": profile.notes,
        "unfinished": profile.unfinished,
    }


def to_show(target: Target, admitted: Admitted, progress: Callable[[str], object]) -> dict[str, Any]:
    """``document`` of variants that were timed, to be shown beside their times; where that fails, one that says so."""
    try:
        return document(profile(target, admitted=admitted, progress=progress))
    except Exception as error:
        on = {"device": target.device.type, "dtype": str(target.dtype).removeprefix("torch.")}
        note = f"what ran is not shown: profiling raised {one_line(error)}"
        return {"schema": PROFILE, "target": target.name, **on, "setups": [], "notes": [note]}


def _set_up_document(set_up: SetUp, rates: Rates) -> dict[str, Any]:
    call = set_up.call
    return {
        "name": set_up.name,
        "us": set_up.us,
        "kernels": [_kernel_document(kernel) for kernel in call.kernels],
        "ops": [
            {"name": op.name, "start_us": op.start_us, "us": op.us, "region": op.part, "called": op.called}
            for op in call.operators
        ],
        "onednn": [vars(primitive) for primitive in set_up.primitives],
        "launches": dict(call.launches),
        "memsets": call.memsets,
        "occupancy_queries": call.occupancy_queries,
        "gaps_us": call.gaps_us,
        "lines": [vars(line) for line in set_up.lines],
        "regions": [
            {
                "region": cost.region,
                "flops": cost.flops,
                "bytes": cost.moved,
                "floor_us": cost.floor_us,
                "observed_us": cost.observed_us,
            }
            for cost in set_up.costs
        ],
        "nodes": [
            {
                "region": region,
                "node": work.node,
                "op": work.op,
                "kernels": dict(work.kernels),
                "host_ops": dict(work.host),
                "flops": work.flops,
                "bytes": work.moved,
                "floor_us": work.floor_s(rates) * 1e6,
                "not_predicted": work.unknown or work.unknown_kernels,
            }
            for region, works in set_up.works.items()
            for work in works
        ],
    }


def _kernel_document(kernel: Kernel) -> dict[str, Any]:
    says = vars(kernel.says)
    return {"name": kernel.name, "start_us": kernel.start_us, "us": kernel.us, "region": kernel.part, **says}
