"""A model's traces made into installed regions."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxfuse import engine, errors, tuning
from fxfuse.capture import linears
from fxfuse.capture import region as regions
from fxfuse.capture.arguments import Recorded, plan
from fxfuse.capture.body import copied
from fxfuse.capture.copies import protect
from fxfuse.capture.installed import Installed
from fxfuse.capture.record import own, record, undisturbed
from fxfuse.capture.region import Region
from fxfuse.capture.rewritten import build_regions, gains
from fxfuse.capture.tracer import trace_function
from fxfuse.capture.tree import ROOT, copy_tree
from fxfuse.capture.value import Untraceable
from fxfuse.capture.verify import differing, function_differs
from fxfuse.capture.walk import Trace, Walk
from fxfuse.ops.prepack import DEFAULT_BYTES, Store
from fxfuse.options import Options
from fxfuse.passes import DEFAULT
from fxfuse.report import RegionInfo, Report, Uncaptured

Example = tuple[tuple[Any, ...], dict[str, Any]] | None


def optimize_module(model: nn.Module, example: Example, options: Options) -> tuple[nn.Module, Report]:
    """A copy of the module tree (or the tree itself) with the regions that brought something installed on it."""
    errors.refuse_unsupported(model)
    report = Report(type(model).__name__)
    with report.timed("copy"):
        target = model if options.inplace else copy_tree(model)
    recorded = _record(model, example, report)
    wrong: dict[str, str] = {}
    while True:
        with report.timed("trace"):
            walk = Walk("", target, options, recorded, wrong)
        report.uncaptured, report.events, report.regions, report.linears = walk.uncaptured, [], [], {}
        with report.timed("rewrite"):
            useful = build_regions(walk.traces, options, report)
        found = tuning.Found()
        if recorded is None or example is None or not (options.check or options.tune == "example"):
            break
        with report.timed("check"):
            differ = differing(target, useful, example, found.watch, options.check)
        if not differ:
            break
        # What lies inside a wrong region may be right by itself, so it gets its own trace.
        wrong |= differ
    _measure(found, options, report)
    with report.timed("install"):
        report.packed = _store(options)
        installed = Installed(report, [], options=options, recorded=recorded)
        for region in useful:
            if not _left_to_eager(region.path, found, options, report):
                installed.add(region)
        _count_linears(target, walk.traces, report)
        _list_quantised(target, useful, report)
        linears.complete(target, report)
        target.__dict__[ROOT] = installed
        protect(target)
    return target, report


def _measure(found: tuning.Found, options: Options, report: Report) -> None:
    if found and options.tune == "example":
        with report.timed("tune"):
            tuning.measure(found, report, pack=bool(options.pack))


def _left_to_eager(path: str, found: tuning.Found, options: Options, report: Report) -> bool:
    """Whether a region is not worth its checks: no kernel fewer, and eager's measured to be best at the example."""
    lowered = [e for e in report.events if e.region == path and e.kind == "lowered"]
    others = [e for e in report.events if e.region == path and e.kind in ("fused", "tidied") and e.kernels_saved]
    if not lowered or others or options.tune != "example" or not found.all_plain(path, pack=bool(options.pack)):
        return False
    reason = "measured: eager is as fast at the example's size"
    report.events = [replace(e, kind="kept", reason=reason) if e in lowered else e for e in report.events]
    for info in report.regions:
        if info.path == path:
            info.installed, info.note = False, reason
    return True


def _store(options: Options) -> Store | None:
    """Where packed weights are to go, if there may be any."""
    return Store(DEFAULT_BYTES if options.pack is True else options.pack) if options.pack else None


def _record(model: nn.Module, example: Example, report: Report) -> dict[str, Recorded] | None:
    if example is None:
        return None
    try:
        with report.timed("example"):
            return record(model, *example)
    except Exception as error:  # the forward's own refusal, or a forward that would change the model
        _without_example(model, error, report)
        return None


def _without_example(model: Any, error: Exception, report: Report) -> None:
    reason = errors.example_failed(model, error)
    report.notes.append(reason)
    warnings.warn(reason, errors.ExampleWarning, stacklevel=5)


def optimize_function(function: Callable[..., Any], example: Example, options: Options) -> tuple[Any, Report]:
    """A function of the same signature that runs the rewritten graph, or the function itself where that is no gain."""
    report = Report(getattr(function, "__name__", "function"))
    if example is not None:
        try:
            with report.timed("example"), undisturbed():
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
        report.packed = _store(options)
    with report.timed("install"):
        forward.__dict__[ROOT] = installed = Installed(report, [], options=options)
        if region is not None:
            installed.add(region)
    return forward, report


def _function_region(function: Callable[..., Any], example: Example, options: Options, report: Report) -> Region | None:
    try:
        with report.timed("trace"):
            recorded = Recorded.of(*example) if example is not None else None
            arguments = plan(function, recorded)
            facts, told = (arguments.facts, arguments.values(*recorded.told)) if recorded is not None else (None, None)
            tracer = trace_function(function, arguments, facts, told)
    except Untraceable as refusal:
        report.uncaptured.append(Uncaptured("", "function", str(refusal)))
        return None
    with report.timed("rewrite"):
        gm = regions.graph_module(tracer.graph, nn.Module(), tracer.constants)
        original = copied(gm.graph)
        rewriting = engine.run(gm, DEFAULT, options, "", arguments.facts)
    info = RegionInfo("", "function", len(original.nodes), len(gm.graph.nodes), installed=True)
    report.events, report.regions = rewriting.events, [info]
    if not gains(rewriting, info):
        return None
    region = Region(
        "", function, arguments, copied(gm.graph), original, tracer.constants, {}, tracer.assumed, rewriting
    )
    if example is not None and (options.check or options.tune == "example"):
        found = tuning.Found()
        with report.timed("check"):
            reason = function_differs(region, example, found.watch, options.check)
        if reason:
            report.events, report.regions = [], []
            report.uncaptured.append(Uncaptured("", "function", reason))
            return None
        _measure(found, options, report)
        if _left_to_eager("", found, options, report):
            return None
    return region


def _count_linears(model: nn.Module, traces: list[Trace], report: Report) -> None:
    names = {name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    inside = {
        name
        for t in traces
        for name in names
        if (name == t.path or not t.path or name.startswith(t.path + ".")) and not _below_leaf(name, t)
    }
    report.coverage.seen, report.coverage.captured = len(names), len(inside)


_PACKED_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32)


def _is_quantised(module: nn.Module) -> bool:
    """Whether a module keeps its weight in fewer bits, or in a form that is no tensor."""
    if type(module).__module__.startswith(("torch.ao.nn.quantized", "torch.nn.quantized")):
        return True
    # Index tables are int64 and masks bool, so a matrix of other integers is a weight.
    own = (*module._parameters.values(), *module._buffers.values())
    return any(t is not None and t.ndim >= 2 and t.dtype in _PACKED_DTYPES for t in own)


def _list_quantised(model: nn.Module, regions: list[Region], report: Report) -> None:
    """Say of each quantised module that no region stands for: nothing else would speak of it."""
    inlined = {id(module) for region in regions for module in region.inlined.values()}
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        if not inside and id(module) not in inlined and _is_quantised(module):
            found[name] = module
    report.uncaptured = [u for u in report.uncaptured if u.path not in found]
    report.uncaptured += [
        Uncaptured(name, type(m).__name__, "is quantised, and left as it is") for name, m in found.items()
    ]


def _below_leaf(name: str, trace: Trace) -> bool:
    """Whether a module lies inside a child that the trace only calls."""
    relative = name[len(trace.path) :].lstrip(".")
    called = {str(n.target) for n in trace.graph.nodes if n.op == "call_module"}
    return any(relative.startswith(leaf + ".") for leaf in called)
