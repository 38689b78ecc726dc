"""A trace made into a region: normalise, rewrite, and leave it where that brought nothing."""

from __future__ import annotations

from torch import fx, nn

from fxfuse import engine
from fxfuse.capture.body import copied
from fxfuse.capture.region import Region, graph_module
from fxfuse.capture.tree import hooked
from fxfuse.capture.walk import Trace
from fxfuse.normalise import normalise
from fxfuse.options import Options
from fxfuse.passes import DEFAULT
from fxfuse.report import RegionInfo, Report


def build_region(trace: Trace, options: Options, report: Report) -> Region | None:
    """Rewrite a trace's graph; None where that brought nothing, so that the module stays as it is."""
    inlined = {path: trace.module.get_submodule(path) for path in trace.tracer.inlined}
    gm = graph_module(trace.graph, trace.module, trace.tracer.constants)
    original = copied(gm.graph)
    inlined |= normalised(gm, training=False)
    rewriting = engine.run(gm, DEFAULT, options, trace.path, trace.arguments.facts)
    report.events += rewriting.events
    info = RegionInfo(trace.path, type(trace.module).__name__, len(original.nodes), len(gm.graph.nodes), installed=True)
    report.regions.append(info)
    if not gains(rewriting, info):
        return None
    return Region(
        trace.path,
        trace.module,
        trace.arguments,
        copied(gm.graph),
        original,
        trace.tracer.constants,
        inlined,
        trace.tracer.assumed,
        rewriting,
    )


def gains(rewriting: engine.Rewriting, info: RegionInfo) -> bool:
    """Whether anything was fused or lowered; where not, the region is not installed, and says so."""
    if any(e.kind in ("fused", "lowered") or e.kernels_saved > 0 for e in rewriting.events):
        return True
    info.installed, info.note = False, "nothing in it is made faster"
    return False


def normalised(gm: fx.GraphModule, *, training: bool) -> dict[str, nn.Module]:
    """``normalise``, keeping the names that nodes had in the trace: events speak of these."""
    for node in gm.graph.nodes:
        node.meta["traced_as"] = node.name
    inlined = normalise(gm, untouched, training=training)
    for node in gm.graph.nodes:
        name = node.meta.pop("traced_as", node.name)
        if node.op != "get_attr":
            node.name = name
    return inlined


def untouched(module: nn.Module) -> bool:
    """Whether calling the module is calling its class's forward and nothing else."""
    return not hooked(module) and "forward" not in module.__dict__
