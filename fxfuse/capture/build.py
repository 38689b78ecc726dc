"""A model's traces made into installed regions."""

from __future__ import annotations

import copy
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from fxfuse import engine, errors
from fxfuse.capture import region as regions
from fxfuse.capture.arguments import Recorded, plan
from fxfuse.capture.copies import protect
from fxfuse.capture.record import own, record
from fxfuse.capture.region import Region
from fxfuse.capture.tracer import trace_function
from fxfuse.capture.tree import ROOT, copy_tree, hooked
from fxfuse.capture.value import Untraceable
from fxfuse.capture.verify import differing, function_differs
from fxfuse.capture.walk import Trace, Walk
from fxfuse.normalise import normalise
from fxfuse.options import Options
from fxfuse.passes import DEFAULT
from fxfuse.report import RegionInfo, Report, Uncaptured

Example = tuple[tuple[Any, ...], dict[str, Any]] | None


class Installed:
    """What an optimized model (or function) carries at its root."""

    def __init__(self, report: Report, regions: list[Region]):
        self.report, self.regions = report, regions

    def __deepcopy__(self, memo: dict[int, Any]) -> Installed:
        new = Installed(copy.deepcopy(self.report, memo), copy.deepcopy(self.regions, memo))
        for region in new.regions:
            region.note = new.report.notes.append
        return new


def optimize_module(model: nn.Module, example: Example, options: Options) -> tuple[nn.Module, Report]:
    """A copy of the module tree (or the tree itself) with the regions that brought something installed on it."""
    errors.refuse_unsupported(model)
    report = Report(type(model).__name__)
    target = model if options.inplace else copy_tree(model)
    with _timed(report, "example"):
        recorded = _record(model, example, report)
    wrong: dict[str, str] = {}
    while True:
        with _timed(report, "trace"):
            walk = Walk(target, options, recorded, wrong)
        report.uncaptured, report.events, report.regions = walk.uncaptured, [], []
        with _timed(report, "rewrite"):
            built = [_build(trace, options, report) for trace in walk.traces]
        useful = [region for region in built if region is not None]
        if recorded is None or example is None or not options.check:
            break
        with _timed(report, "check"):
            found = differing(target, useful, *example)
        if not found:
            break
        # What lies inside a wrong region may be right by itself, so it gets its own trace.
        wrong |= found
    for region in useful:
        regions.install(region)
        report.calls[region.path] = region.calls
        region.note = report.notes.append
    _count_linears(target, walk.traces, report)
    target.__dict__[ROOT] = Installed(report, useful)
    protect(target)
    return target, report


def _record(model: nn.Module, example: Example, report: Report) -> dict[str, Recorded] | None:
    if example is None:
        return None
    try:
        return record(model, *example)
    except Exception as error:  # the forward's own refusal, or a forward that would change the model
        _without_example(model, error, report)
        return None


def _without_example(model: Any, error: Exception, report: Report) -> None:
    reason = errors.example_failed(model, error)
    report.notes.append(reason)
    warnings.warn(reason, errors.ExampleWarning, stacklevel=5)


def _build(trace: Trace, options: Options, report: Report) -> Region | None:
    """Rewrite a trace's graph; None where that brought nothing, so that the module stays as it is."""
    inlined = {path: trace.module.get_submodule(path) for path in trace.tracer.inlined}
    gm = regions.graph_module(trace.graph, trace.module, trace.tracer.constants)
    original = copied(gm.graph)
    inlined |= normalised(gm, training=False)
    rewriting = engine.run(gm, DEFAULT, options, trace.path, trace.arguments.facts)
    report.events += rewriting.events
    info = RegionInfo(trace.path, type(trace.module).__name__, len(original.nodes), len(gm.graph.nodes), installed=True)
    report.regions.append(info)
    if not _gains(rewriting, info):
        return None
    return Region(
        trace.path,
        trace.module,
        trace.arguments,
        gm.graph,
        original,
        trace.tracer.constants,
        inlined,
        trace.tracer.attributes,
        rewriting,
        trace.tracer.dtypes.assumed,
        trace.tracer.code,
    )


def optimize_function(function: Callable[..., Any], example: Example, options: Options) -> tuple[Any, Report]:
    """A function of the same signature that runs the rewritten graph, or the function itself where that is no gain."""
    report = Report(getattr(function, "__name__", "function"))
    if example is not None:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                function(*own(example[0]), **own(example[1]))
        except Exception as error:
            _without_example(function, error, report)
            example = None
    region = _function_region(function, example, options, report)
    if region is None:

        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)
    else:
        forward = region.forward
        forward.__dict__["__wrapped__"] = function
        report.calls[""] = region.calls
    forward.__dict__[ROOT] = Installed(report, [region] if region else [])
    return forward, report


def _function_region(function: Callable[..., Any], example: Example, options: Options, report: Report) -> Region | None:
    try:
        arguments = plan(function, Recorded.of(*example) if example is not None else None)
        tracer = trace_function(function, arguments.call)
    except Untraceable as refusal:
        report.uncaptured.append(Uncaptured("", "function", str(refusal)))
        return None
    gm = regions.graph_module(tracer.graph, nn.Module(), tracer.constants)
    original = copied(gm.graph)
    rewriting = engine.run(gm, DEFAULT, options, "", arguments.facts)
    info = RegionInfo("", "function", len(original.nodes), len(gm.graph.nodes), installed=True)
    report.events, report.regions = rewriting.events, [info]
    if not _gains(rewriting, info):
        return None
    region = Region("", function, arguments, gm.graph, original, tracer.constants, {}, (), rewriting, {}, tracer.code)
    if example is not None and options.check:
        reason = function_differs(region, *example)
        if reason:
            report.events, report.regions = [], []
            report.uncaptured.append(Uncaptured("", "function", reason))
            return None
    return region


def _gains(rewriting: engine.Rewriting, info: RegionInfo) -> bool:
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


def copied(graph: fx.Graph) -> fx.Graph:
    """A graph of its own with the same nodes."""
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    return new


def _count_linears(model: nn.Module, traces: list[Trace], report: Report) -> None:
    names = {name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    inside = {
        name
        for t in traces
        for name in names
        if (name == t.path or not t.path or name.startswith(t.path + ".")) and not _below_leaf(name, t)
    }
    report.coverage.seen, report.coverage.captured = len(names), len(inside)


def _below_leaf(name: str, trace: Trace) -> bool:
    """Whether a module lies inside a child that the trace only calls."""
    relative = name[len(trace.path) :].lstrip(".")
    called = {str(n.target) for n in trace.graph.nodes if n.op == "call_module"}
    return any(relative.startswith(leaf + ".") for leaf in called)


@contextmanager
def _timed(report: Report, stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    report.seconds[stage] = report.seconds.get(stage, 0.0) + time.perf_counter() - start
