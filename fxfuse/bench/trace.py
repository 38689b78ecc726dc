"""What happened in a call, read off the trace that torch.profiler writes: operators, kernels, launches, gaps.

The trace is the one that Perfetto shows, so whatever is said here can be seen there.
"""

from __future__ import annotations

import functools
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from fxfuse.bench.kernel_names import COPY, Described, describe

_CALL, _PART = "fxfuse: call", "fxfuse: part "
WARM_UP, ACTIVE = 2, 3
_SAME = {"aten::_reshape_alias": "aten::view"}
"""A reshape without a copy ends in either, by whether its tensor has data."""


@dataclass(frozen=True)
class Operator:
    """One operator that the dispatcher was handed."""

    name: str
    """With its namespace, without the overload."""
    start_us: float
    """From the start of the call."""
    us: float
    part: str | None
    """The innermost marked part that it ran in."""
    called: bool
    """Whether no other operator called it."""
    composite: bool
    """Whether it only calls others. What an operator with a kernel of its own calls inside is not listed."""


@dataclass(frozen=True)
class Kernel:
    """One kernel, or copy, on the GPU."""

    name: str
    start_us: float
    """From the start of the first one."""
    us: float
    part: str | None
    """The part that launched it; None also where the trace does not say who did."""
    says: Described


@dataclass
class Call:
    """One traced call."""

    us: float
    """Of the host, until everything is done; the profiler adds to it."""
    operators: list[Operator] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    """In the order of their starts; copies are among them, fills with a constant are not."""
    memsets: int = 0
    launches: Counter[str] = field(default_factory=Counter)
    """Function of the CUDA runtime or driver -> how often it launched a kernel."""
    occupancy_queries: int = 0
    part_us: dict[str, float] = field(default_factory=dict)
    """Part -> host time in it."""

    def host_ops(self, part: str | None) -> Counter[str]:
        """Operators by name: those called by nobody, and those with a kernel of their own."""
        return Counter(
            _SAME.get(op.name, op.name) for op in self.operators if op.part == part and (op.called or not op.composite)
        )

    def gpu_us(self, part: str | None) -> float:
        """Time in the kernels of a part."""
        return sum(kernel.us for kernel in self.kernels if kernel.part == part)

    @property
    def gaps_us(self) -> list[float]:
        """Between the end of each kernel and the start of the next."""
        return [
            max(0.0, after.start_us - before.start_us - before.us)
            for before, after in zip(self.kernels, self.kernels[1:], strict=False)
        ]


def part(name: str) -> record_function:
    """A context: what runs in it belongs to the part ``name``."""
    return record_function(_PART + name)


@contextmanager
def marked(parts: Mapping[str, nn.Module]) -> Iterator[None]:
    """While it lasts, the forward of each module is the part of that name."""
    before = {name: module.__dict__.get("forward") for name, module in parts.items()}
    for name, module in parts.items():
        module.__dict__["forward"] = _in_part(name, module.forward)
    try:
        yield
    finally:
        for name, module in parts.items():
            module.__dict__.pop("forward", None)
            if before[name] is not None:
                module.__dict__["forward"] = before[name]


def _in_part(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    def marked_forward(*args: Any, **kwargs: Any) -> Any:
        with part(name):
            return forward(*args, **kwargs)

    return marked_forward


def trace(
    call: Callable[[], object], device: torch.device, *, warm_up: int = WARM_UP, active: int = ACTIVE, keep: Path | None
) -> list[Call]:
    """Trace ``active`` calls after one that is not traced and ``warm_up`` that are but do not count.

    ``warm_up`` 0: one call is made and traced. ``keep``: where the Chrome trace is left. OSError where it cannot be.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would log its start and stop on stderr
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    steps = schedule(wait=1, warmup=warm_up, active=active, repeat=1) if warm_up else None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        with profile(
            activities=activities,
            schedule=steps,
            on_trace_ready=lambda done: done.export_chrome_trace(str(file)),
            acc_events=True,  # there is one cycle, and torch 2.11 warns of what becomes of others
            experimental_config=_ExperimentalConfig(capture_overload_names=True),
        ) as profiler:
            for _ in range(1 + warm_up + active if warm_up else 1):
                with record_function(_CALL):
                    call()
                    if on_gpu:
                        torch.cuda.synchronize(device)
                if warm_up:
                    profiler.step()
        document = json.loads(file.read_text())
    document.pop("host_name", None)
    if keep is not None:
        keep.write_text(json.dumps(document))
    return _read(document["traceEvents"])


def _read(events: list[dict[str, Any]]) -> list[Call]:
    """The calls in a Chrome trace. GPU work belongs to the call that launched it."""
    timed = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: (e["ts"], -e["dur"]))
    calls = []
    for whole in timed:
        if whole.get("cat") == "user_annotation" and whole["name"] == _CALL:
            inside = [e for e in timed if whole["ts"] <= e["ts"] < whole["ts"] + whole["dur"] and e is not whole]
            calls.append(Call(whole["dur"]))
            parts = _host(calls[-1], whole, inside)
            _gpu(calls[-1], inside, timed, parts)
    return calls


@dataclass
class _Open:
    """An event that has not ended yet."""

    end: float
    part: str | None
    in_operator: bool = False
    in_kernel: bool = False
    """Whether an operator with a kernel of its own encloses it."""


def _host(call: Call, whole: dict[str, Any], inside: list[dict[str, Any]]) -> list[tuple[float, float, str]]:
    """Note the operators of the calling thread; returns start, end and name of each part."""
    parts: list[tuple[float, float, str]] = []
    stack = [_Open(whole["ts"] + whole["dur"], None)]
    for event in inside:
        name, start, kind = event["name"], event["ts"], event.get("cat")
        if event["tid"] != whole["tid"] or kind not in ("cpu_op", "user_annotation"):
            continue
        while len(stack) > 1 and stack[-1].end <= start:
            stack.pop()
        around = stack[-1]
        new = _Open(start + event["dur"], around.part, around.in_operator, around.in_kernel)
        if kind == "user_annotation" and name.startswith(_PART):
            new.part = name.removeprefix(_PART)
            call.part_us[new.part] = call.part_us.get(new.part, 0.0) + event["dur"]
            parts.append((start, new.end, new.part))
        elif kind == "cpu_op" and "::" in name and not name.startswith("prim::"):
            composite = _is_composite(name)
            if not around.in_kernel:
                short, at = name.partition(".")[0], start - whole["ts"]
                called = not around.in_operator
                call.operators.append(Operator(short, at, event["dur"], around.part, called, composite))
            new.in_operator, new.in_kernel = True, around.in_kernel or not composite
        stack.append(new)
    return parts


@functools.cache
def _is_composite(name: str) -> bool:
    """Whether an operator (with its overload) is nothing but calls of other operators on every device."""
    has_kernel = torch._C._dispatch_has_kernel(name)
    return has_kernel and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


_LAUNCH = re.compile(r"Launch\w*Kernel")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def _gpu(
    call: Call, inside: list[dict[str, Any]], timed: list[dict[str, Any]], parts: list[tuple[float, float, str]]
) -> None:
    asked = {}
    for event in inside:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            asked[event["args"].get("correlation")] = event
    call.launches = Counter(e["name"] for e in asked.values() if _LAUNCH.search(e["name"]))
    call.occupancy_queries = sum("Occupancy" in e["name"] for e in asked.values())
    done = [e for e in timed if e.get("cat") in _ON_GPU and e["args"].get("correlation") in asked]
    call.memsets = sum(e["cat"] == "gpu_memset" for e in done)
    done = [e for e in done if e["cat"] != "gpu_memset"]
    for event in done:
        at = asked[event["args"]["correlation"]]["ts"]
        # Parts nest, and the innermost began last.
        where = max(((start, name) for start, end, name in parts if start <= at < end), default=(0.0, None))[1]
        says = describe(event["name"]) if event["cat"] == "kernel" else Described(COPY)
        call.kernels.append(Kernel(event["name"], event["ts"] - done[0]["ts"], event["dur"], where, says))
