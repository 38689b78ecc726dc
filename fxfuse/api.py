"""The road through the code, told once: capture, rewrite, install, report."""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import fx, nn

from fxfuse import engine, errors, tuning
from fxfuse.capture import build, copies, linears
from fxfuse.capture import region as regions
from fxfuse.capture.body import copied
from fxfuse.capture.installed import Installed
from fxfuse.capture.rewritten import normalised
from fxfuse.capture.tracer import LOCK
from fxfuse.capture.tree import REGION, ROOT, intact
from fxfuse.facts import Fact
from fxfuse.options import Options
from fxfuse.passes import DEFAULT
from fxfuse.report import Measured, RegionInfo, Report

M = TypeVar("M", bound=Callable[..., Any])


def optimize(
    model: M,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    options: Options | None = None,
    **changes: Any,
) -> M:
    """Fuse what can be fused in ``model`` and return it as what it was: same class, state_dict and parameters.

    Args:
        model: an ``nn.Module`` (a copy of its module tree comes back, sharing parameters and buffers, unless
            ``inplace=True``), a ``torch.fx.GraphModule`` (one with the rewritten graph comes back) or a function.
        example_inputs: positional arguments of one call, a tuple; a single tensor stands for a tuple of it. With them
            shapes and optional arguments are known, more is captured, each region is checked against its forward
            (a GraphModule is not), and the implementations of its operators are measured.
        example_kwargs: keyword arguments of that call.
        options: an ``Options``; ``changes`` are fields of it that differ, as in ``optimize(model, inplace=True)``.

    Raises:
        TypeError: ``model`` is nothing of these. ``errors.UnsupportedModel``: it is scripted.
        ``errors.NothingFused``: under ``strict={"fuse"}``. The model is then as it was.

    Where the forward raises on the example, an ``errors.ExampleWarning`` says so and the model is captured without it.
    """
    chosen = Options(**{**(vars(options) if options else {}), **changes})
    args, kwargs = _example(example_inputs), dict(example_kwargs or {})
    with_example = example_inputs is not None or bool(example_kwargs)
    if _installed(model) is not None:
        return model
    result: Any
    if isinstance(model, fx.GraphModule):
        result, report = _optimize_graph(model, (args, kwargs) if with_example else None, chosen)
        original = model.graph if chosen.inplace else copied(model.graph)
        if chosen.inplace:
            model.graph, result = result.graph, model
        result.__dict__[ROOT] = Installed(report, [], original, chosen)
    elif isinstance(model, nn.Module):
        result, report = build.optimize_module(model, (args, kwargs) if with_example else None, chosen)
    elif isinstance(model, (types.FunctionType, types.MethodType)):
        result, report = build.optimize_function(model, (args, kwargs) if with_example else None, chosen)
    else:
        raise errors.not_optimizable(model)
    if "fuse" in chosen.strict and not report.fused:
        restore(result)
        raise errors.nothing_fused(report)
    return result


def _optimize_graph(gm: fx.GraphModule, example: build.Example, options: Options) -> tuple[fx.GraphModule, Report]:
    """``rewrite``, and the choice of implementations at the example's sizes."""
    values, failed = None, ""
    if example is not None:
        try:
            values = tuning.positional(gm, *example)
        except TypeError as error:
            failed = errors.example_failed(gm, error)
            warnings.warn(failed, errors.ExampleWarning, stacklevel=3)
    new, report = rewrite(gm, values, options=options)
    report.notes += [failed] if failed else []
    if options.pack:
        report.notes.append("no weights are packed: the graph of a GraphModule has no place to keep copies of them")
    if options.cuda_graphs:
        report.notes.append("no CUDA graphs are captured: nothing stands round a GraphModule that could replay them")
    if values is not None and options.tune == "example":
        try:
            found = tuning.of_graph(new, values)
        except Exception as error:  # choices are never needed
            report.notes.append(f"nothing was measured: the run for it raised {type(error).__name__}: {error}")
        else:
            with report.timed("tune"):
                tuning.measure(found, report, pack=False)
    return new, report


def rewrite(
    gm: fx.GraphModule, example_inputs: Any = None, *, options: Options | None = None
) -> tuple[fx.GraphModule, Report]:
    """Rewrite a torch.fx graph: a new GraphModule with the same parameters and submodules, and the report.

    ``gm`` may come from any tracer: torch-level calls, methods, module calls or ATen overloads. It stays as it is.
    With ``example_inputs`` (those of a call of ``gm``) the report knows sizes; nothing is run, and nothing measured.
    The new graph is a graph and nothing else: hooks that its modules get later, and autocast, act on what it was
    rewritten to.
    """
    if not isinstance(gm, fx.GraphModule):
        raise errors.not_optimizable(gm)
    options = options or Options()
    report = Report(type(gm).__name__)
    new = fx.GraphModule(gm, copied(gm.graph))
    for table in ("_parameters", "_buffers", "_modules"):
        new.__dict__[table] = type(getattr(gm, table))(getattr(gm, table))
    new.__dict__["training"] = gm.training
    placeholders = [str(n.target) for n in new.graph.nodes if n.op == "placeholder"]
    values = new.graph.process_inputs(*_example(example_inputs)) if example_inputs is not None else ()
    facts = {
        name: Fact.of(v) if isinstance(v, torch.Tensor) else v for name, v in zip(placeholders, values, strict=False)
    }
    before = len(new.graph.nodes)
    with report.timed("rewrite"):
        kept = {m for path, m in gm.named_modules() if options.exclude.intersection((path, type(m).__name__))}
        # Nothing stands round a graph that would notice a module in training mode, or arguments of other shapes.
        normalised(new, training=True, kept=kept)
        rewriting = engine.run(new, DEFAULT, options, "", facts, checked=False)
    report.events = rewriting.events
    report.regions.append(RegionInfo("", type(gm).__name__, before, len(new.graph.nodes), installed=True))
    report.coverage.seen = report.coverage.captured = sum(type(m) is nn.Linear for m in gm.modules())
    report.linears = linears.of_graph(new, gm, rewriting.events)
    linears.complete(gm, report)
    return new, report


def report(model: Any) -> Report:
    """The report of an optimized model or function. ValueError for anything else."""
    return _require(model).report


def graphs(model: Any, original: bool = False) -> dict[str, fx.GraphModule]:
    """Module path -> GraphModule of each installed region, rewritten or, with ``original``, as traced."""
    if isinstance(model, fx.GraphModule):
        before = _require(model).graph if original else None
        return {"": model if before is None else fx.GraphModule(model, copied(before))}
    return {region.path: region.graph_module(original) for region in _require(model).regions}


def tune(model: Any, shapes: Iterable[Any]) -> list[Measured]:
    """Measure the operators of an optimized model at other sizes, and keep which implementation is best at each.

    Choices hold for all models on this device, for these versions (``fxfuse cache`` says where they are kept); a model
    optimized before asks for them when it meets a size that it has not met yet, and this one at its next call.

    Args:
        model: what ``optimize`` returned. It is called in inference mode, and its report counts these calls.
        shapes: one element a call. A tuple of ints stands for one random tensor of that shape, of the dtype and on the
            device of the model's first floating-point parameter; any other tuple is the positional arguments.

    Returns:
        What was measured, as it stands in ``report.measured``: nothing where no call ran fused, and
        ``report.calls`` then says why.

    Raises:
        ``errors.NotOptimized``: ``model`` is nothing of the kind. TypeError: ``shapes`` is no such iterable. Whatever
        the model raises on these arguments.
    """
    _require(model)
    return tune_calls(model, [(tuning.arguments(model, element), {}) for element in tuning.elements(shapes)])


def tune_calls(model: Any, calls: Iterable[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> list[Measured]:
    """``tune`` for calls with keyword arguments, too: (positional, keyword) each."""
    installed = _require(model)
    with tuning.recording(model, installed.regions) as found, torch.inference_mode():
        for args, kwargs in calls:
            model(*args, **kwargs)
    return tuning.measure(found, installed.report, pack=installed.report.packed is not None, again=True)


def refresh(model: M) -> M:
    """Drop what an optimized model keeps of its weights: packed copies, and what was found out about each.

    For weights that were changed in single elements through ``.data`` or numpy, which packing cannot notice.
    Returns the model; ``errors.NotOptimized`` for anything else.
    """
    for region in _require(model).regions:
        region.forget()
    return model


def restore(model: M) -> M:
    """Undo ``optimize``: put back exactly what each module had. Returns the model (of a function, the original)."""
    installed = _require(model)
    if isinstance(model, fx.GraphModule):
        model.graph = model.__dict__.pop(ROOT).graph
        return model
    if not isinstance(model, nn.Module):
        return inspect.unwrap(model, stop=lambda f: ROOT not in vars(f))
    with LOCK:  # another thread may be tracing a region again
        # A part of the model may have been optimized by itself before; that stays.
        own = [r for r in installed.regions if r.owner.__dict__.get(REGION) is r]
        for region in own:
            if not intact(region.owner):
                raise errors.restore_refused(region.path)
        model.__dict__.pop(ROOT)
        copies.release(model)
        for region in own:
            regions.uninstall(region.owner)
        installed.regions.clear()
    return model


def _installed(model: Any) -> Installed | None:
    return getattr(model, "__dict__", {}).get(ROOT)


def _require(model: Any) -> Installed:
    found = _installed(model)
    if found is None:
        raise errors.not_optimized(model)
    return found


def _example(inputs: Any) -> tuple[Any, ...]:
    if inputs is None:
        return ()
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
