"""Predicts what a call of a target does, traces one, and sets the two against each other line by line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import fx, nn

import fxfuse
from fxfuse.bench import machine_rates, onednn_verbose, trace
from fxfuse.bench.gate import Admitted, admit
from fxfuse.bench.kernel_names import COPY, OTHER, short
from fxfuse.bench.machine_rates import Rates
from fxfuse.bench.onednn_verbose import Primitive
from fxfuse.bench.parts import Part, parts
from fxfuse.bench.peers import LeftOut, Variant
from fxfuse.bench.predict import predict
from fxfuse.bench.predict_compiled import NotPredicted, compiled
from fxfuse.bench.progress import bar
from fxfuse.bench.targets import Target
from fxfuse.bench.timer import percentile
from fxfuse.bench.work import FOLLOWS, Pass, Work
from fxfuse.report import Report

ALWAYS = ("eager", "fxfuse")
SET_UPS = {"cpu": ALWAYS, "cuda": (*ALWAYS, "compile", "liger")}
"""What is profiled on each kind of device unless others are asked for."""
COMPILED = frozenset({"compile", "compile-max", "liger"})
"""Columns whose calls do not go by the regions, and whose kernels are predicted for the model as a whole."""
WHOLE, OUTSIDE = "(whole call)", "(outside)"
"""What stands for a region: the call with everything in it; what lies in none."""

Verdict = Literal["confirmed", "broken", "not predicted"]


@dataclass(frozen=True)
class Line:
    """One prediction and what was seen."""

    region: str
    """Module path, "" for the model itself, or WHOLE or OUTSIDE."""
    what: str
    """``kernels``, ``kernels: gemm``, ``host op aten::addmm``, ``launches``, ``oneDNN products``."""
    predicted: int | None
    """At least so many, where the verdict is "not predicted"; None: nothing can be said."""
    observed: int
    verdict: Verdict
    why: str
    """Names of the kernels, or the reason why there is no prediction."""


@dataclass(frozen=True)
class Cost:
    """What a region costs in one set-up."""

    region: str
    flops: int
    """Of products."""
    moved: int
    """Bytes to and from memory, as if nothing stayed in a cache from one kernel to the next."""
    floor_us: float
    """The least time for these, at the measured rates, kernel by kernel."""
    observed_us: float
    """As ``SetUp.region_us``."""


@dataclass
class SetUp:
    """One way of running the model, predicted and traced."""

    name: str
    call: trace.Call
    """The last of the traced calls."""
    us: float
    """Host time of a call under the profiler, until everything is done; the median of the traced calls."""
    works: dict[str, list[Work]]
    """Region -> what each of its nodes is predicted to do."""
    primitives: list[Primitive]
    """On the CPU, what oneDNN ran."""
    region_us: dict[str, float]
    """Region -> on a GPU the time in its kernels, else in its forward; the median of the traced calls."""
    lines: list[Line] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    trace_file: str = ""


@dataclass
class Profile:
    """Of one target."""

    target: str
    device: str
    dtype: str
    rates: Rates
    set_ups: list[SetUp]
    left_out: list[LeftOut]
    notes: list[str]
    unfinished: list[str] = field(default_factory=list)
    """Columns that are not traced yet."""

    @property
    def broken(self) -> list[Line]:
        return [line for set_up in self.set_ups for line in set_up.lines if line.verdict == "broken"]


def profile(
    target: Target,
    names: Sequence[str] | None = None,
    *,
    traces: Path | None = None,
    progress: Callable[[str], object] = lambda _text: None,
    admitted: Admitted | None = None,
    after_each: Callable[[Profile], object] = lambda _so_far: None,
) -> Profile:
    """Profile ``names`` (keys of ``peers.PEERS``) on ``target``, with eager and fxfuse in any case. None: SET_UPS.

    ``traces``: where Chrome traces are left; ``t.json`` becomes ``t-eager.json`` and so on. What does not apply,
    raises, or answers wrongly is never traced; it is named in ``left_out``. ``admitted``: variants that were built and
    compared before. ``after_each``: is given the profile as far as it got after each trace. Raises BadTarget without
    example inputs, TargetRaised where the model itself raises, OSError where a trace cannot be written.
    """
    device = target.device
    names = (*ALWAYS, *(SET_UPS.get(device.type, ALWAYS) if names is None else names))
    admitted = admitted or admit(names, target, progress)
    built = {name: variant for name, variant in admitted.variants.items() if name in names}
    left_out = [gone for gone in admitted.left_out if gone.name in names]
    optimized = built["fxfuse"].run if "fxfuse" in built else None
    progress("predicting")
    regions, notes = _parts(target, optimized)
    predicted = {name: _predicted(name, regions) for name in built}
    progress("measuring the rates of the device")
    works = [work for by_region, _ in predicted.values() for done in by_region.values() for work in done]
    dtypes = {done.dtype for work in works for done in work.passes if done.flops}
    rates = machine_rates.rates(device, [getattr(torch, name) for name in sorted(dtypes)])
    dtype = str(target.dtype).removeprefix("torch.")
    found = Profile(target.name, device.type, dtype, rates, [], left_out, notes, list(built))
    for done, (name, variant) in enumerate(built.items()):
        progress(f"{bar(done, len(built))} tracing {name}")
        set_up = _traced(name, variant, target, regions, predicted[name], traces)
        set_up.costs = [_cost(set_up, region, done, rates) for region, done in set_up.works.items()]
        found.set_ups.append(set_up)
        found.unfinished.remove(name)
        if name == "fxfuse" and regions:
            found.notes += fallen_back(fxfuse.report(variant.run))
        after_each(found)
    return found


def _parts(target: Target, optimized: Callable[..., object] | None) -> tuple[list[Part], list[str]]:
    """The parts that predictions are made for, and what is in none of them and why."""
    if not isinstance(optimized, nn.Module):
        return [], ["nothing is predicted: predictions are of what fxfuse traces, and it gave no right answer"]
    if isinstance(optimized, fx.GraphModule):
        return [], ["nothing is predicted: a torch.fx.GraphModule has no regions"]
    report = fxfuse.report(optimized)
    notes = [f"in no region: {u.path or 'the model'} ({u.kind}): {u.reason}" for u in report.uncaptured]
    notes += [f"not installed: {r.path or 'the model'}: {r.note}" for r in report.regions if not r.installed]
    return parts(target.model, optimized, *target.example()), notes


def fallen_back(report: Report) -> Iterator[str]:
    """Calls that did not run as the region was rewritten, and as it is predicted."""
    for path, calls in report.calls.items():
        for reason, count in calls.reasons.items():
            yield f"{count} call{'s' * (count != 1)} of {path or 'the model'} did not run fused: {reason}"


Predicted = tuple[dict[str, list[Work]], str]
"""Region -> its work, or why there is none."""


def _traced(
    name: str, variant: Variant, target: Target, regions: list[Part], predicted: Predicted, traces: Path | None
) -> SetUp:
    device, run = target.device, variant.run
    args, kwargs = target.example()
    marks = {}
    if name in ALWAYS and isinstance(run, nn.Module):
        marks = {region.path: run.get_submodule(region.path) for region in regions}
    file = None if traces is None else traces.with_stem(f"{traces.stem}-{name}")
    works, why = predicted
    with torch.inference_mode(), trace.marked(marks):
        calls = trace.trace(lambda: run(*args, **kwargs), device, keep=file)
        last = calls[-1]
        primitives = onednn_verbose.primitives(lambda: run(*args, **kwargs)) if device.type == "cpu" else []
    us = percentile([call.us for call in calls], 50)
    # What is compiled goes by no region: all that it does is no part's.
    marked: dict[str, str | None] = {region: region if region in marks else None for region in works}
    region_us = {r: percentile([_us(call, part, device) for call in calls], 50) for r, part in marked.items()}
    set_up = SetUp(name, last, us, works, primitives, region_us, trace_file=str(file or ""))
    for region, done in works.items():
        set_up.lines += _lines(region, done, last, marked[region], device, host=region in marks)
    reason = why or ("it lies in no region" if name in ALWAYS else "it calls operators of its own")
    set_up.lines += _unpredicted(last, OUTSIDE if name in ALWAYS else WHOLE, reason, kernels=not works or bool(marks))
    set_up.lines += _whole(set_up, device, why)
    return set_up


def _us(call: trace.Call, part: str | None, device: torch.device) -> float:
    if device.type == "cuda":
        return call.gpu_us(part)
    return call.us if part is None else call.part_us.get(part, 0.0)


def _predicted(name: str, regions: list[Part]) -> Predicted:
    if name in ALWAYS:
        works = {}
        for r in regions:
            works[r.path] = predict(r.before if name == "eager" else r.after, r.facts, r.leaves)
            # What the forward computes once, a region computes for its checks as well.
            once = {work.node for work in works[r.path]} if name == "eager" else set()
            works[r.path] += [work for work in _asked(r) if work.node not in once]
        return works, ""
    if name not in COMPILED:
        return {}, f"what {name} does is not predicted"
    if [region.path for region in regions] != [""]:
        return {}, "predicted for models only that are one region"
    eager = regions[0].before
    try:
        return {"": compiled(eager.graph, predict(eager, regions[0].facts, regions[0].leaves))}, ""
    except NotPredicted as reason:
        return {}, str(reason)


def _asked(region: Part) -> Iterator[Work]:
    """What asking about a call's values does."""
    for question in region.questions:
        names = (str(node.target) for node in question.module.graph.find_nodes(op="placeholder"))
        yield from predict(question.module, dict(zip(names, question.example, strict=True)))
        host = Counter({"aten::is_nonzero": 1, "aten::_local_scalar_dense": 1})
        yield Work("asked", "bool", host, [Pass(COPY, 0, 1, "bool")])


def _lines(
    region: str, works: list[Work], call: trace.Call, part: str | None, device: torch.device, *, host: bool
) -> Iterator[Line]:
    """Kernels on a GPU, and where ``host`` operators, of one region."""
    if device.type == "cuda":
        why = _reasons(work.unknown or work.unknown_kernels for work in works)
        seen = [kernel for kernel in call.kernels if kernel.part == part]
        kinds = Counter(kernel.says.kind for kernel in seen)
        predicted = sum((work.kernels for work in works), Counter[str]())
        if why:
            predicted.pop(OTHER, None)
        names = ", ".join(short(kernel.name) for kernel in seen)
        yield _line(region, "kernels", predicted.total(), len(seen), why, names)
        for kind in sorted({*predicted, *kinds}):
            names = ", ".join(short(kernel.name) for kernel in seen if kernel.says.kind == kind)
            yield _line(region, f"kernels: {kind}", predicted[kind], kinds[kind], why, names)
    if host:
        why = _reasons(work.unknown for work in works)
        operators = sum((work.host for work in works), Counter[str]())
        observed = call.host_ops(part)
        for name in sorted({*operators, *observed}):
            yield _line(region, f"host op {name}", operators[name], observed[name], why, "")


def _unpredicted(call: trace.Call, where: str, why: str, *, kernels: bool) -> Iterator[Line]:
    """What belongs to no region."""
    seen = [short(kernel.name) for kernel in call.kernels if kernels and kernel.part is None]
    if seen:
        yield Line(where, "kernels", None, len(seen), "not predicted", f"{why}; {', '.join(seen)}")
    operators = call.host_ops(None)
    if operators:
        names = ", ".join(f"{name} {count}" for name, count in operators.items())
        yield Line(where, "host ops", None, operators.total(), "not predicted", f"{why}; {names}")


def _whole(set_up: SetUp, device: torch.device, why: str) -> Iterator[Line]:
    works = [work for done in set_up.works.values() for work in done]
    outside = any(line.region == OUTSIDE for line in set_up.lines)
    why = why or ("not all of the call lies in a region" if outside else "")
    if device.type == "cuda":
        why = why or _reasons(work.unknown or work.unknown_kernels for work in works)
        copies = any(COPY in work.kernels for work in works)
        why = why or ("a copy may be no kernel" if copies else "")
        names = ", ".join(f"{name} {count}" for name, count in sorted(set_up.call.launches.items()))
        predicted = sum(work.kernels.total() - work.kernels[COPY] - work.kernels[OTHER] for work in works)
        yield _line(WHOLE, "launches", predicted, set_up.call.launches.total(), why, names)
    elif device.type == "cpu":
        seen = [p for p in set_up.primitives if p.primitive in onednn_verbose.PRODUCTS]
        names = ", ".join(f"{name} {count}" for name, count in Counter(p.implementation for p in seen).items())
        if any(work.products is None for work in works):
            why = why or "which products oneDNN computes is not predicted for all of it"
        yield _line(WHOLE, "oneDNN products", sum(work.products or 0 for work in works), len(seen), why, names)


def _line(region: str, what: str, predicted: int, observed: int, why: str, seen: str) -> Line:
    """``why``: why ``predicted`` is only a part; "" where it is all."""
    said = "; ".join(filter(None, (why, seen)))
    if observed < predicted or (not why and observed != predicted):
        return Line(region, what, predicted, observed, "broken", said)
    if why:
        return Line(region, what, predicted or None, observed, "not predicted", said)
    return Line(region, what, predicted, observed, "confirmed", said)


def _reasons(found: Iterable[str]) -> str:
    counted = Counter(filter(None, found))
    if len(counted) > 1:
        del counted[FOLLOWS]
    return "; ".join(reason if count == 1 else f"{reason} ({count} times)" for reason, count in counted.items())


def _cost(set_up: SetUp, region: str, works: Sequence[Work], rates: Rates) -> Cost:
    floor = sum(work.floor_s(rates) for work in works) * 1e6
    flops, moved = sum(work.flops for work in works), sum(work.moved for work in works)
    return Cost(region, flops, moved, floor, set_up.region_us[region])
