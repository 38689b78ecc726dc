"""Each region once on its real inputs: what it calls, and its answer against the module's own, by numerics.py."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from fxfuse import numerics
from fxfuse.capture.body import Watch, read_targets
from fxfuse.capture.record import own, trial_copy, trial_run, undisturbed
from fxfuse.capture.region import Region
from fxfuse.facts import Fact
from fxfuse.ops.door import PLAIN_TYPES

Example = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call."""

Watching = Callable[[str], Watch]
"""Gives what is told of the fused operators that the region at a path calls."""


def differing(
    model: nn.Module, regions: Sequence[Region], example: Example, watching: Watching, check: bool
) -> dict[str, str]:
    """Region path -> how its graph differs from its original forward; without ``check``, only that it cannot run.

    Runs a copy of the model once, and holds the values of one region at a time.
    """
    trial = trial_copy(model)
    wrong: dict[str, str] = {}
    for region in regions:
        module = trial.get_submodule(region.path)
        judge = functools.partial(_judged, region, module, module.forward, watching(region.path), check)
        module.__dict__["forward"] = types.MethodType(_checking(region, module.forward, judge, wrong), module)
    with trial_run(model):
        trial(*own(example[0]), **own(example[1]))
    return wrong


def _checking(region: Region, forward: Callable[..., Any], judge: Callable[..., Any], wrong: dict[str, str]) -> Any:
    done = False

    def checked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        if done:
            # Another call of the same example may not be one that the graph is right for.
            return forward(*args, **kwargs)
        done = True
        expected, reason = judge(args, kwargs)
        if reason:
            wrong[region.path] = reason
        return expected

    return checked


def function_differs(region: Region, example: Example, watching: Watching, check: bool) -> str:
    """How a function's graph differs from the function on its example; "" where it does not."""
    with undisturbed():
        return _judged(region, None, region.owner, watching(region.path), check, *example)[1]


def _judged(
    region: Region, owner: Any, forward: Callable[..., Any], watch: Watch, check: bool, args: Any, kwargs: Any
) -> tuple[Any, str]:
    """What ``forward`` returns, and how the region's graph differs from it."""
    ours, reference = own((args, kwargs)), own((args, kwargs))
    state = torch.random.get_rng_state()
    expected = forward(*args, **kwargs)
    after = torch.random.get_rng_state()
    torch.random.set_rng_state(state)
    try:
        got = _as_called(region, owner, placeholders(region, ours), watch)
        torch.random.set_rng_state(state)
        reason = _compare(region, owner, got, reference, own(expected)) if check else ""
    except Exception as error:  # a graph that cannot run where the forward could is wrong, too
        reason = f"its graph raised {_named(error)}"
    torch.random.set_rng_state(after)
    return expected, reason and f"was wrong on the example: {reason}"


def _compare(region: Region, owner: Any, got: Any, reference: Any, expected: Any) -> str:
    if any(isinstance(t, torch.Tensor) and t.is_meta for t in tree_leaves(expected)):
        # There are no values to compare.
        return "" if _facts(got) == _facts(expected) else f"it is {_facts(got)[0]}, not {_facts(expected)[0]}"
    original = region.graph_module(original=True, owner=owner)
    with _Draws() as draws:
        traced = original(*placeholders(region, own(reference)))
    if draws.seen:
        return (
            "" if _equal(got, expected) else "it is not equal, and with random numbers it cannot be judged in float64"
        )
    if _identical(traced, expected) and _identical(got, expected):
        return ""  # the float64 run would cost more than all else here, and allow it
    try:
        exact, magnitude = numerics.reference(original, placeholders(region, reference))
    except Exception as error:  # an operator that has no float64 kernel: only an equal answer is surely right
        return "" if _equal(got, expected) else f"it is not equal, and cannot be judged in float64 ({_named(error)})"
    # The float64 answer is that of the graph as traced. Were the trace wrong, it would be wrong as well, and eager's
    # distance from it excuse any error: so eager's answer is judged first, as if it were to replace the trace's.
    faithful = numerics.judge(expected, traced, exact, magnitude)
    if not faithful:
        return f"the trace is not what the forward computes: {faithful.reason}"
    return numerics.judge(got, expected, exact, magnitude).reason


class _Draws(TorchDispatchMode):
    """Whether an operator drew random numbers.

    Their state over the whole run would not tell, since other threads draw from it as well. Nor does an operator's tag
    alone: attention has it for its dropout, which is 0.
    """

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        state = torch.random.get_rng_state()
        result = func(*args, **(kwargs or {}))
        self.seen |= not torch.equal(torch.random.get_rng_state(), state)
        return result


def _as_called(region: Region, owner: Any, values: list[Any], watch: Watch) -> Any:
    """What a call of the region computes, by the implementations that it will run: the door is shut here.

    Where a call would not take the region (subclasses, tensors without memory), its operators say what they compute.
    """
    reads = [region.resolve(target, owner) for target in read_targets(region.graph)]
    tensors = [value for value in (*values, *reads) if isinstance(value, torch.Tensor)]
    if not all(type(tensor) in PLAIN_TYPES and not tensor.is_meta for tensor in tensors):
        return region.graph_module(owner=owner)(*values)
    # A body of its own: the region's is to find out for itself what is best, once that has been measured.
    return region.new_body(watch)(*([owner] if region.on_module else []), *values, *reads)


def _equal(got: Any, expected: Any) -> bool:
    (ours, structure), (theirs, other) = tree_flatten(got), tree_flatten(expected)
    return structure == other and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        for a, b in zip(ours, theirs, strict=True)
    )


def _identical(a: Any, b: Any) -> bool:
    """Whether two answers are one to the last bit. What is neither a tensor nor a constant is never known to be."""
    (ours, structure), (theirs, other) = tree_flatten(a), tree_flatten(b)
    return structure == other and all(map(_same, ours, theirs))


def _same(a: Any, b: Any) -> bool:
    if type(a) is torch.Tensor and type(b) is torch.Tensor and a.layout is b.layout is torch.strided:
        return Fact.of(a) == Fact.of(b) and torch.equal(a, b)
    return isinstance(a, (type(None), bool, int, float, str)) and type(a) is type(b) and a == b


def _facts(output: Any) -> tuple[list[Any], Any]:
    leaves, structure = tree_flatten(output)
    return [Fact.of(v) if isinstance(v, torch.Tensor) else v for v in leaves], structure


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def placeholders(region: Region, call: Any) -> list[Any]:
    """The values of the region's placeholders in a call."""
    return list(region.arguments.values(*call).values())
