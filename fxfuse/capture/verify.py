"""Each region once on its real inputs: the rewritten graph against the module's own forward, by numerics.py."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fxfuse import numerics
from fxfuse.capture.record import own, trial_copy, trial_run
from fxfuse.capture.region import Region


def differing(
    model: nn.Module, regions: Sequence[Region], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, str]:
    """Region path -> how its graph differs from its original forward.

    Runs a copy of the model once, and holds the values of one region at a time.
    """
    trial = trial_copy(model)
    wrong: dict[str, str] = {}
    for region in regions:
        module = trial.get_submodule(region.path)
        module.__dict__["forward"] = types.MethodType(_checking(region, module, wrong), module)
    with trial_run(trial):
        trial(*own(args), **own(kwargs))
    return wrong


def _checking(region: Region, module: nn.Module, wrong: dict[str, str]) -> Any:
    forward = module.forward
    done = False

    def checked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        if done:
            return forward(*args, **kwargs)
        done = True
        ours, reference = own((args, kwargs)), own((args, kwargs))
        state = torch.random.get_rng_state()
        expected = forward(*args, **kwargs)
        after = torch.random.get_rng_state()
        torch.random.set_rng_state(state)
        try:
            reason = _compare(region, module, ours, reference, own(expected))
        except Exception as error:  # a graph that cannot run where the forward could is wrong, too
            reason = f"its graph raised {type(error).__name__}: {error}"
        torch.random.set_rng_state(after)
        if reason:
            wrong[region.path] = reason
        return expected

    return checked


def _compare(region: Region, module: nn.Module, ours: Any, reference: Any, expected: Any) -> str:
    given = _placeholders(region, ours)
    if given is None:
        return ""
    got = region.graph_module(owner=module)(*given)
    exact, magnitude = numerics.reference(
        region.graph_module(original=True, owner=module), _placeholders(region, reference) or ()
    )
    return numerics.judge(got, expected, exact, magnitude).reason


def _placeholders(region: Region, call: Any) -> list[Any] | None:
    """The values of the region's placeholders in a call; None where the trace was for another kind of call."""
    bound = region.arguments.signature.bind(*call[0], **call[1])
    bound.apply_defaults()
    return [eval(expression, {}, dict(bound.arguments)) for expression in region.arguments.free.values()]
