"""A trace made into a region: normalise, rewrite, and leave it where that brought nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import fx, nn

from fxfuse import engine
from fxfuse.capture import linears
from fxfuse.capture.body import copied
from fxfuse.capture.region import Region, graph_module
from fxfuse.capture.tree import hooked
from fxfuse.capture.walk import Trace
from fxfuse.normalise import normalise
from fxfuse.options import Options
from fxfuse.passes import DEFAULT
from fxfuse.report import RegionInfo, Report


@dataclass
class _Rewritten:
    """What a trace's graph became; paths and names are relative to the module that was traced."""

    original: fx.Graph
    graph: fx.Graph
    normalised: Collection[str]
    """Paths of the modules that normalising put operators in the place of."""
    rewriting: engine.Rewriting
    linears: dict[str, str]


def build_regions(traces: Sequence[Trace], options: Options, report: Report) -> list[Region]:
    """Rewrite each trace's graph, that of equal layers once; a module stays as it is where that brought nothing."""
    known: dict[int, _Rewritten] = {}
    built = []
    for trace in traces:
        if id(trace.tracer) not in known:
            known[id(trace.tracer)] = _rewrite(trace, options)
        region = _region(trace, known[id(trace.tracer)], report)
        built += [region] if region is not None else []
    return built


def _rewrite(trace: Trace, options: Options) -> _Rewritten:
    gm = graph_module(trace.graph, trace.module, trace.tracer.constants)
    original = copied(gm.graph)
    kept = {trace.module.get_submodule(path) for path in trace.calls}
    inlined = normalised(gm, training=False, kept=kept)
    rewriting = engine.run(gm, DEFAULT, options, trace.path, trace.arguments.facts)
    unfused = linears.of_graph(gm, trace.module, rewriting.events)
    return _Rewritten(original, copied(gm.graph), inlined.keys(), rewriting, unfused)


def _region(trace: Trace, rewritten: _Rewritten, report: Report) -> Region | None:
    rewriting, original, graph = rewritten.rewriting, rewritten.original, rewritten.graph
    report.events += [replace(event, region=trace.path) for event in rewriting.events]
    linears.add(report, trace.path, rewritten.linears)
    info = RegionInfo(trace.path, type(trace.module).__name__, len(original.nodes), len(graph.nodes), installed=True)
    report.regions.append(info)
    if not gains(rewriting, info):
        return None
    inlined = {path: trace.module.get_submodule(path) for path in (*trace.tracer.inlined, *rewritten.normalised)}
    constants, assumed = trace.tracer.constants, trace.tracer.assumed
    return Region(trace.path, trace.module, trace.arguments, graph, original, constants, inlined, assumed, rewriting)


def gains(rewriting: engine.Rewriting, info: RegionInfo) -> bool:
    """Whether anything was fused or lowered; where not, the region is not installed, and says so."""
    if any(e.kind in ("fused", "lowered") or e.kernels_saved > 0 for e in rewriting.events):
        return True
    info.installed, info.note = False, "nothing in it is made faster"
    return False


def normalised(gm: fx.GraphModule, *, training: bool, kept: Collection[nn.Module]) -> dict[str, nn.Module]:
    """``normalise``, keeping the names that nodes had in the trace: events speak of these. ``kept`` stay calls."""
    for node in gm.graph.nodes:
        node.meta["traced_as"] = node.name
    inlined = normalise(gm, lambda module: untouched(module) and module not in kept, training=training)
    for node in gm.graph.nodes:
        name = node.meta.pop("traced_as", node.name)
        if node.op != "get_attr":
            node.name = name
    return inlined


def untouched(module: nn.Module) -> bool:
    """Whether calling the module is calling its class's forward and nothing else."""
    return not hooked(module) and "forward" not in module.__dict__
