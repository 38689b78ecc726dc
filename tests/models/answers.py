"""Whether an optimized model answers as the model does: each region by fxfuse.numerics, the whole by its norm."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import fxfuse
from fxfuse import numerics


def assert_right(model: nn.Module, optimized: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert type(optimized) is type(model)
    with torch.no_grad():
        assert right(optimized(*args, **kwargs), model, *args, **kwargs)
        for path, call in _calls(model, fxfuse.graphs(optimized), args, kwargs).items():
            _assert_region(model.get_submodule(path), optimized, path, *call)


def right(got: Any, model: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether ``got`` is an answer of ``model`` to these arguments, against a float64 copy of it.

    Rounding adds up over layers, element by element at random: so of a whole model the norm of the error is judged. A
    function has no float64 copy (it may hold tensors of its own): there ``got`` is to be equal to the last bit.
    """
    expected = model(*args, **kwargs)
    if type(got) is not type(expected):
        return False
    ours, theirs = tensors_of(got), tensors_of(expected)
    if not isinstance(model, nn.Module):
        return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
    wide_args, wide_kwargs = tree_map(_wide, (args, kwargs))
    exact = tensors_of(copy.deepcopy(model).double()(*wide_args, **wide_kwargs))
    return bool(ours) and all(_in_norm(y, e, r) for y, e, r in zip(ours, theirs, exact, strict=True))


def _in_norm(y: torch.Tensor, e: torch.Tensor, r: torch.Tensor) -> bool:
    y, e, r = y.detach(), e.detach(), r.detach()
    scale = torch.maximum(r.abs(), r.nan_to_num(0, 0, 0).square().mean(-1, keepdim=True).sqrt())
    return numerics.excess(y, e, r, scale).norm_used <= 1


def _assert_region(module: nn.Module, optimized: nn.Module, path: str, args: Any, kwargs: Any) -> None:
    got, expected = optimized.get_submodule(path)(*args, **kwargs), module(*args, **kwargs)
    bound = inspect.signature(module.forward, follow_wrapped=False).bind(*args, **kwargs)
    bound.apply_defaults()
    values: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            values |= {f"{name}_{key}": v for key, v in value.items()}
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            values |= {f"{name}_{i}": v for i, v in enumerate(value)}
        else:
            values[name] = value
    values |= {f"{name}_{i}": v for name, t in values.items() if type(t) is tuple for i, v in enumerate(t)}
    graph = fxfuse.graphs(optimized, original=True)[path]
    # The graph tells the scale of rounding; what is right, a float64 copy of the module itself.
    _, magnitude = numerics.reference(graph, (), values)
    wide_args, wide_kwargs = tree_map(_wide, (args, kwargs))
    exact = copy.deepcopy(module).double()(*wide_args, **wide_kwargs)
    verdict = numerics.judge(got, expected, exact, magnitude)
    assert verdict, f"{path}: {verdict.reason}"


def _calls(model: nn.Module, paths: Any, args: Any, kwargs: Any) -> dict[str, tuple[Any, Any]]:
    """Path -> the arguments of that module's first call."""
    calls: dict[str, tuple[Any, Any]] = {}
    handles = []
    for path in paths:

        def note(module: nn.Module, given: Any, named: Any, path: str = path) -> None:
            calls.setdefault(path, tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, (given, named)))

        handles.append(model.get_submodule(path).register_forward_pre_hook(note, with_kwargs=True))
    model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return calls


def tensors_of(output: Any) -> list[torch.Tensor]:
    items = dict(output) if isinstance(output, dict) else output
    return [t for t in tree_leaves(items) if isinstance(t, torch.Tensor)]


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
