"""Measuring the implementations of a model's fused operators, at the sizes with which it calls them."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxfuse import choose, errors, ops
from fxfuse.bench.timer import Call, Effort, GpuClock, interleaved, speedup
from fxfuse.capture.body import Watch
from fxfuse.capture.record import own, trial_copy, trial_run
from fxfuse.capture.region import Region
from fxfuse.choose import PLAIN, Choice, Key
from fxfuse.ops.gpu.driver import CudaError
from fxfuse.report import Measured, Report

FASTER = 1.03
"""In four rounds of five an implementation must be this many times as fast as the one that is expected to be fastest.
Times that are measured in turns, in one process, are good to about 3 %; so ties and doubts change nothing."""
EFFORT = Effort(rounds=25, warmup_s=0.001, block_s=0.0003, budget_s=0.04)
"""For one operator at one size."""
GPU_EFFORT = Effort(rounds=15, warmup_s=0.0001, block_s=0.0, budget_s=None)
"""The same on a GPU, where each call has the GPU wait for a millisecond first."""
BUDGET_S = 3.0
"""For all operators of a model in ``optimize``. Sizes that it does not reach keep the heuristic choice."""
HAD_CORE = 0.9
"""The part of the time in which the measuring thread must have run. Where other programs have the cores, whoever waits
more often for the other threads loses, by as much as 10 ms each time; nothing is concluded from that."""
_PLACES, _TURN_S = 8, 0.003
"""The places of a model that call an operator at one size take turns, as many as 3 ms allow: one weight alone would
stay in the caches, where in a model of many layers it does not."""


@dataclass
class Places:
    """The calls of one operator at one size."""

    target: Callable[..., Tensor]
    rest: tuple[Any, ...]
    """Its arguments after the tensors."""
    tensors: list[tuple[Tensor | None, ...]] = field(default_factory=list)
    """Those of the first places. All have the activations of the first."""
    regions: dict[str, None] = field(default_factory=dict)
    """Module paths, each once."""

    @property
    def device(self) -> torch.device:
        x = self.tensors[0][0]
        return torch.device("cpu") if x is None else x.device

    def implementations(self, pack: bool) -> tuple[str, ...]:
        """The names of those that the operator may choose from."""
        return ops.implementations(self.target, self.tensors[0], self.rest, pack=pack)


class Found(dict[Key, Places]):
    """The fused operators that were called, by what their choice depends on."""

    def watch(self, path: str) -> Watch:
        """What notes the calls of the region at ``path``."""
        return functools.partial(self._note, path)

    def all_plain(self, path: str, *, pack: bool) -> bool:
        """Whether eager was measured to be best at every operator that the region at ``path`` calls."""
        here = [(key, places) for key, places in self.items() if path in places.regions]
        choices = [(choose.CHOICES.get(key), places.implementations(pack)) for key, places in here]
        return bool(here) and all(c is not None and c.among(names) == PLAIN for c, names in choices)

    def _note(self, path: str, target: Callable[..., Tensor], tensors: tuple[Any, ...], rest: tuple[Any, ...]) -> None:
        key = ops.key(target, tensors, rest)
        if key is None:
            return
        places = self.setdefault(key, Places(target, rest))
        places.regions[path] = None
        if len(places.tensors) < _PLACES:
            operands = tuple(None if t is None else t.detach() for t in tensors)
            first = places.tensors[0] if places.tensors else operands
            places.tensors.append((first[0], *operands[1:]))


class _Noting(fx.Interpreter):
    """Runs a graph by itself, whose operators have no sites that could be watched."""

    def __init__(self, gm: nn.Module, watch: Watch):
        super().__init__(gm)
        self.watch = watch

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in ops.SITES:
            count = ops.SITES[target].tensors
            self.watch(target, args[:count], args[count:])
        return super().call_function(target, args, kwargs)


def of_graph(gm: fx.GraphModule, args: tuple[Any, ...]) -> Found:
    """The operators that a rewritten graph calls on the example. Runs a copy of it once."""
    found = Found()
    noting = _Noting(trial_copy(gm), found.watch(""))
    with trial_run(gm):
        noting.run(*own(args))
    return found


def positional(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call of ``gm`` in the order of its placeholders. TypeError where they do not fit."""
    bound = inspect.signature(type(gm).forward).bind(gm, *args, **kwargs)
    bound.apply_defaults()
    return bound.args[1:]


@contextmanager
def recording(model: Any, regions: Sequence[Region]) -> Iterator[Found]:
    """Notes the operators that calls of an optimized model run; then its regions find out anew what is best."""
    found = Found()
    # A GraphModule is optimized without regions: its operators ask for their choice at each call.
    graph = model if isinstance(model, fx.GraphModule) else None
    if graph is not None:
        noting = _Noting(graph, found.watch(""))
        graph.__dict__["forward"] = lambda *args, **kwargs: noting.run(*positional(graph, args, kwargs))
    for region in regions:
        region.body = region.new_body(found.watch(region.path))
    try:
        yield found
    finally:
        if graph is not None:
            del graph.__dict__["forward"]
        for region in regions:
            region.forget()


def elements(shapes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """The elements of ``fxfuse.tune``'s shapes; TypeError for what has others."""
    several = isinstance(shapes, Iterable) and not isinstance(shapes, (str, Tensor))
    found: list[Any] = [*shapes] if several else [shapes]
    for element in found:
        if not isinstance(element, tuple):
            raise TypeError(
                f"tune() takes an iterable of tuples, not {type(element).__name__}: for each call the shape of one "
                "tensor, (16, 768), or the positional arguments, (x,). One call is a list of one: [(16, 768)]."
            )
    return found


def arguments(model: Any, element: tuple[Any, ...]) -> tuple[Any, ...]:
    """The positional arguments that an element of ``fxfuse.tune``'s shapes stands for."""
    if not element or not all(type(size) is int for size in element):
        return element
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    return (random(element, like=next((p for p in parameters if p.is_floating_point()), torch.empty(0))),)


def random(shape: Sequence[int], *, like: Tensor) -> Tensor:
    """A tensor of ``shape`` with ``like``'s dtype and device; the user's random numbers go on as they would have."""
    own = torch.Generator(like.device).manual_seed(0)
    return torch.randn(tuple(shape), dtype=like.dtype, device=like.device, generator=own)


def measure(found: Found, report: Report, *, pack: bool, again: bool = False) -> list[Measured]:
    """Measure what was found, keep the choices, and tell them to the report.

    Args:
        pack: whether packed copies of weights are among the implementations.
        again: measure what was measured before as well, however long that takes, and twice where it is disturbed.
    """
    choices: dict[Key, Choice] = {}
    new: dict[Key, Choice] = {}
    disturbed = 0
    start = time.perf_counter()
    for key, places in found.items():
        names = places.implementations(pack)
        known = choose.CHOICES.get(key)
        if known is not None and known.seconds.keys() >= set(names) and not again:
            choices[key] = known
        elif again or time.perf_counter() - start < BUDGET_S:
            choice = _choice(places, names) or (_choice(places, names) if again else None)
            if choice is None:
                disturbed += 1
            else:
                new[key] = choices[key] = choice
    choose.CHOICES.put(new)
    told = [_told(key, found[key], choice, pack, key in new) for key, choice in choices.items()]
    report.measured = [m for m in report.measured if m.size not in {t.size for t in told}] + told
    left = len(found) - len(choices) - disturbed
    for count, why in ((disturbed, "other programs had the processor meanwhile"), (left, f"{BUDGET_S:.0f} s were up")):
        if count:
            report.notes.append(f"nothing was measured for {count} of {len(found)} operators and sizes: {why}")
    return told


def _choice(places: Places, names: Sequence[str]) -> Choice | None:
    """What the times say; None where the machine was too busy for them to say anything."""
    with torch.inference_mode():
        count = _turns(places)
        calls: dict[str, Call] = {}
        for name in names:
            call = _turn(places, name, count)
            try:
                call()
            except CudaError as error:
                errors.warn_of_kernel(name, error)
            else:
                calls[name] = call
    if places.device.type == "cuda":
        race = interleaved(calls, clock=GpuClock(places.device), effort=GPU_EFFORT, collect=False)
    else:
        race = interleaved(calls, clock=_Clock(), effort=EFFORT, collect=False)
        if race.had_core < HAD_CORE:
            return None
    timings = race.timings
    expected = ops.expected(places.target, places.tensors[0], places.rest)
    order = [expected if expected in calls else PLAIN]
    for name in calls:
        if name not in order and speedup(timings[name], timings[order[0]]).p20 >= FASTER:
            order.insert(0, name)
    if PLAIN not in order:
        order.append(PLAIN)
    return Choice(tuple(order), {name: timing.spread.median / count for name, timing in timings.items()})


def _turns(places: Places) -> int:
    """How many places take turns."""
    call = _turn(places, PLAIN, 1)
    call()
    start = time.perf_counter()
    call()
    return max(1, min(len(places.tensors), int(_TURN_S / (time.perf_counter() - start))))


def _turn(places: Places, name: str, count: int) -> Call:
    """One call at each of ``count`` places, by the implementation ``name``."""
    sites = [(ops.fixed(places.target, of, places.rest, name), of) for of in places.tensors[:count]]

    def turn() -> None:
        for run, tensors in sites:
            run(*tensors)

    return turn


class _Clock:
    """Wall time of calls that find the caches as others left them, as they do in a model."""

    def block(self, call: Call, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls


def _told(key: Key, places: Places, choice: Choice, pack: bool, new: bool) -> Measured:
    weight = f"{key.n}x{key.k}" + ", transposed" * key.transposed + ", no bias" * (not key.bias)
    return Measured(
        key.op,
        str(key.dtype).removeprefix("torch."),
        weight,
        key.rows,
        choice.among(places.implementations(pack)),
        dict(choice.seconds),
        tuple(places.regions),
        "now" if new else "before",
    )
