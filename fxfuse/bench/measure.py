"""One target measured: build every variant, compare its answer, and only then time it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

import fxfuse
from fxfuse.bench import peers
from fxfuse.bench.gate import Admitted, admit, admit_again
from fxfuse.bench.peers import LeftOut, Variant
from fxfuse.bench.targets import Target
from fxfuse.bench.timer import QUICK, Effort, SubmitClock, Timing, WallClock, clock_for, interleaved
from fxfuse.bench.train import steps
from fxfuse.drawing.view import View, view
from fxfuse.report import Report

#: Measured in every run: the baseline, and what is compared with it.
ALWAYS = ("eager", "fxfuse")

Progress = Callable[[str], object]


@dataclass(frozen=True)
class Result:
    """What was found out about one target."""

    label: str
    device: str
    dtype: str
    timings: dict[str, Timing]
    had_core: float
    prepare_s: dict[str, float]
    first_call_s: dict[str, float]
    left_out: tuple[LeftOut, ...]
    weaker_gate: str
    """Why the answers were compared by the norm of their error only; empty if element by element too."""
    ops: dict[str, int]
    """Operators dispatched a call, of eager and fxfuse."""
    submit: dict[str, Timing]
    """On a GPU, how long the host is busy with a call; there ``timings`` are times on the GPU."""
    kernels: dict[str, int]
    """On a GPU, kernels a call."""
    end_to_end: dict[str, Timing]
    """On a GPU, how long a caller who waits for each answer waits."""
    held_bytes: int
    """Of the model's parameters and buffers and the example's tensors, each storage once."""
    extra_bytes: dict[str, int]
    """The memory that a call takes beside what was taken before, at its peak, by the allocator of torch."""
    fused: int
    """Fusions that the report lists."""
    lowered: int
    """Single operators that it lists as given to a faster implementation."""
    kernels_saved: int
    """Kernels a call that the report predicts to have saved."""
    report: Report | None
    """What was done to the model; None where fxfuse failed."""
    view: View | None
    """The same for drawings."""

    @property
    def fxfuse_failed(self) -> bool:
        """Whether fxfuse itself raised or gave a wrong answer, so that there is nothing to compare."""
        return "fxfuse" not in self.timings


def measure(
    target: Target,
    names: Sequence[str] | None = None,
    *,
    label: str | None = None,
    train: bool = False,
    effort: Effort | None = None,
    progress: Progress = lambda _text: None,
    admitted: Admitted | None = None,
) -> Result:
    """Measure ``names`` (keys of ``peers.PEERS``) on ``target``, with eager and fxfuse in any case. None: all of its
    device. ``train``: forward and backward, for the gradients of all parameters that learn. ``admitted``: what
    ``admissible`` gave for these names.

    A variant that does not apply, raises, or answers wrongly is never timed; it is named in ``left_out``. Raises
    BadTarget without example inputs, and TargetRaised where the model itself raises.
    """
    admitted = admitted or admissible(target, names, progress)
    return _timed(target, admitted, label or target.name, train, effort, progress)


def admissible(target: Target, names: Sequence[str] | None = None, progress: Progress = lambda _text: None) -> Admitted:
    """The variants that ``measure`` may time, built and compared."""
    columns = peers.columns(target.device.type) if names is None else names
    return admit((*ALWAYS, *columns), target, progress)


def measure_shapes(
    target: Target,
    rows: Sequence[int],
    names: Sequence[str] | None = None,
    *,
    train: bool = False,
    effort: Effort | None = None,
    progress: Progress = lambda _text: None,
) -> Iterator[Result]:
    """The same for calls of so many ``rows`` each, of variants that are built once, for the first.

    ``first_call_s`` of the others is of the first call at that size: of torch.compile, with the code that it makes for
    it. Raises BadTarget for a model of other arguments than one floating-point tensor.
    """
    sizes = [target.with_rows(count, "--shapes") for count in rows]
    built: dict[str, Variant] = {}
    for count, size in zip(rows, sizes, strict=True):
        admitted = admit_again(built, size, progress) if built else admissible(size, names, progress)
        built = built or admitted.variants
        yield _timed(size, admitted, f"{target.name} M={count}", train, effort, progress)


def _timed(
    target: Target, admitted: Admitted, label: str, train: bool, effort: Effort | None, progress: Progress
) -> Result:
    device, built, left_out = target.device, admitted.variants, list(admitted.left_out)
    args, kwargs = target.example()
    calls: dict[str, Callable[[], object]] = {name: _bound(v.run, args, kwargs) for name, v in built.items()}
    if train:
        stepped, wrong = steps(target, built)
        calls, label, left_out = {**stepped}, f"{label}, forward and backward", [*left_out, *wrong]
    ops = {name: dispatched_ops(calls[name]) for name in ALWAYS if name in calls}
    race = interleaved(calls, clock=clock_for(device), effort=effort, progress=progress)
    submit: dict[str, Timing] = {}
    end_to_end: dict[str, Timing] = {}
    kernels: dict[str, int] = {}
    counted = device.type in ("cpu", "cuda")
    extra = {name: extra_bytes(call, device) for name, call in calls.items() if counted}
    if device.type == "cuda":
        submit = interleaved(calls, clock=SubmitClock(), effort=QUICK, progress=progress).timings
        waiting = {name: _waiting(call) for name, call in calls.items()}
        end_to_end = interleaved(waiting, clock=WallClock(), effort=QUICK, progress=progress).timings
        kernels = {name: launched_kernels(call) for name, call in calls.items()}
    report = fxfuse.report(built["fxfuse"].run) if "fxfuse" in calls else None
    return Result(
        label=label,
        device=device.type,
        dtype=str(target.dtype).removeprefix("torch."),
        timings=race.timings,
        had_core=race.had_core,
        prepare_s={name: built[name].prepare_s for name in calls},
        first_call_s={name: built[name].first_call_s for name in calls},
        left_out=tuple(left_out),
        weaker_gate=admitted.weaker,
        ops=ops,
        submit=submit,
        kernels=kernels,
        end_to_end=end_to_end,
        held_bytes=_held_bytes(target),
        extra_bytes=extra,
        fused=len(report.fused) if report else 0,
        lowered=sum(event.kind == "lowered" for event in report.events) if report else 0,
        kernels_saved=report.kernels_saved if report else 0,
        report=report,
        view=view(built["fxfuse"].run) if report else None,
    )


def dispatched_ops(call: Callable[[], object]) -> int:
    """Operators that one call of ``call`` hands to the dispatcher itself; what these call in turn is not counted.

    Taken from the profiler: a TorchDispatchMode would close the fast door of fused operators and count another run.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would log its start and stop on stderr
    with torch.inference_mode(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(event.cpu_parent is None and "::" in event.name for event in profile.events())


def launched_kernels(call: Callable[[], object]) -> int:
    """Kernels that one call of ``call`` runs on the GPU, and copies; cuBLAS's memsets of a few bytes are none."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.inference_mode(), torch.profiler.profile(activities=kinds) as profile:
        call()
        torch.cuda.synchronize()
    on_gpu = (event for event in profile.events() if event.device_type.name == "CUDA")
    return sum(not event.name.startswith("Memset") for event in on_gpu)


def extra_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that one call of ``call`` takes on ``device`` at its peak, beside what was taken before.

    By the allocator of torch, which gives oneDNN its scratch memory, too. What MKL takes for itself is not seen.
    """
    if device.type == "cpu":
        return _extra_on_cpu(call)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.inference_mode():
        call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _extra_on_cpu(call: Callable[[], object]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.inference_mode(), torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    taken = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(taken, default=0)


def _held_bytes(target: Target) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in [*target.tensors, *target.model.buffers()]}
    return sum(storage.nbytes() for storage in storages.values())


def _waiting(call: Callable[[], object]) -> Callable[[], object]:
    def waiting() -> None:
        call()
        torch.cuda.synchronize()

    return waiting


def _bound(run: peers.Run, args: tuple[object, ...], kwargs: dict[str, object]) -> Callable[[], object]:
    return lambda: run(*args, **kwargs)
