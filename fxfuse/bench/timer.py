"""Times variants of one computation against each other.

The variants are interleaved round by round (A B C, C A B, ...), so that a slow drift of the machine meets all of them
alike, and compared within the rounds. What depends on the device is a ``Clock``.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from fxfuse.bench.progress import bar

Call = Callable[[], object]


class Clock(Protocol):
    """Times a block of calls."""

    def block(self, call: Call, calls: int) -> float:
        """Seconds per call, over ``calls`` calls in a row."""
        ...


@dataclass(frozen=True)
class WallClock:
    """Wall time of calls that are done when they return."""

    now: Callable[[], float] = time.perf_counter

    def block(self, call: Call, calls: int) -> float:
        call()  # untimed: it finds the caches as the variant before left them
        start = self.now()
        for _ in range(calls):
            call()
        return (self.now() - start) / calls


class GpuClock:
    """Time on the GPU, by events, of calls that find the L2 cache without their data.

    Before each call the GPU is kept busy for about a millisecond, so that the host has enqueued the whole call before
    its first kernel starts: else what is timed is the host.
    """

    HEAD_START = 2_000_000
    """Cycles."""

    def __init__(self, device: torch.device):
        self.device = device
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self.flush = torch.zeros(size // 4, device=device)

    def block(self, call: Call, calls: int) -> float:
        spent = 0.0
        with torch.cuda.device(self.device):  # whose stream events and waits belong to
            for _ in range(calls):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                self.flush.sum()  # read, not written: what is written would have to leave the cache during the call
                torch.cuda._sleep(self.HEAD_START)
                start.record()
                call()
                end.record()
                end.synchronize()
                spent += start.elapsed_time(end) * 1e-3
        return spent / calls


class SubmitClock:
    """Time until the host has enqueued a call, which the GPU works off meanwhile."""

    def block(self, call: Call, calls: int) -> float:
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        spent = time.perf_counter() - start
        torch.cuda.synchronize()
        return spent / calls


def clock_for(device: torch.device) -> Clock:
    return GpuClock(device) if device.type == "cuda" else WallClock()


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int = 30
    warmup_s: float = 0.3
    """Each variant is warmed up at least this long before the first round."""
    block_s: float = 0.005
    """A sample is a block of calls that lasts about this long, so that the clock's own cost does not show, unless what
    the clock does between calls would make that ``MOST_WAITING`` times as long."""
    budget_s: float | None = 20.0
    """No round begins after the samples add up to this, but for ``LEAST_ROUNDS``. None: no such limit."""


QUICK = Effort(rounds=7, warmup_s=0.05, block_s=0.002)

LEAST_ROUNDS = 5
MOST_WAITING = 20


@dataclass(frozen=True)
class Spread:
    """Median and the 20th and 80th percentile."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(percentile(values, 50), percentile(values, 20), percentile(values, 80))

    @property
    def relative(self) -> float:
        """Half the distance of the percentiles, as a part of the median."""
        return (self.p80 - self.p20) / (2 * self.median)


@dataclass(frozen=True)
class Race:
    """What a run of ``interleaved`` measured."""

    timings: dict[str, Timing]
    had_core: float
    """The part of the time in which the timing thread really ran: well under 1, other programs had the cores."""


@dataclass(frozen=True)
class Timing:
    """One variant's seconds per call."""

    samples: tuple[float, ...]
    calls: int
    """Calls in each sample."""
    spread: Spread = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spread", Spread.of(self.samples))


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two neighbours in sorted order, as numpy does by default."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def speedup(ours: Timing, theirs: Timing) -> Spread:
    """How many times faster ``ours`` is, round by round: drift that both met in a round cancels."""
    return Spread.of([t / o for o, t in zip(ours.samples, theirs.samples, strict=True)])


def rankable(ratio: Spread) -> bool:
    """Whether the run can tell the two apart: the middle 60 % of the rounds agree on which is faster."""
    return ratio.p20 > 1 or ratio.p80 < 1


def interleaved(
    variants: Mapping[str, Call],
    *,
    clock: Clock,
    effort: Effort | None = None,
    progress: Callable[[str], object] = lambda _text: None,
    collect: bool = True,
) -> Race:
    """Time each variant once a round; in inference mode, without garbage collection.

    ``collect``: collect before, which takes as long as hundreds of small calls.

    Each round has an order of its own: a variant finds caches and thread pools as the one before it left them, which
    cost the one that always came after eager 3 % of 400 us. The orders are the same in every run.
    """
    effort = effort or Effort()
    samples: dict[str, list[float]] = {name: [] for name in variants}
    with torch.inference_mode(), _no_collection(collect):
        calls = {name: _warm_up(call, clock, effort) for name, call in variants.items()}
        wall, ran = time.perf_counter(), time.thread_time()
        spent, budget = 0.0, math.inf if effort.budget_s is None else effort.budget_s
        order, shuffle = list(calls), random.Random(0).shuffle
        for done in range(effort.rounds):
            if spent > budget and done >= LEAST_ROUNDS:
                break
            progress(f"{bar(done, effort.rounds)} round {done + 1} of {effort.rounds}")
            shuffle(order)
            for name in order:
                samples[name].append(clock.block(variants[name], calls[name]))
                spent += samples[name][-1] * calls[name]
        had_core = (time.thread_time() - ran) / (time.perf_counter() - wall)
    return Race({name: Timing(tuple(samples[name]), calls[name]) for name in variants}, had_core)


def _warm_up(call: Call, clock: Clock, effort: Effort) -> int:
    """Run for ``warmup_s`` and return how many calls make a block."""
    start, spent, blocks, fastest = time.perf_counter(), 0.0, 0, math.inf
    while max(spent, time.perf_counter() - start) < effort.warmup_s or math.isinf(fastest):
        seconds = clock.block(call, 1)
        spent, blocks, fastest = spent + seconds, blocks + 1, min(fastest, seconds)
    if fastest <= 0:
        return 1
    waited = (time.perf_counter() - start) / blocks
    return max(1, round(min(effort.block_s / fastest, MOST_WAITING * effort.block_s / waited)))


@contextmanager
def _no_collection(collect: bool) -> Iterator[None]:
    was_on = gc.isenabled()
    if collect:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
