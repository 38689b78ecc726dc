"""Factories of torch that are given sizes or numbers, ``torch.zeros(batch, 1)``, while a forward is traced.

Where one is a value of the graph, torch's parser of arguments refuses it, or asks for the number, before any function
mode sees the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

_FACTORIES = ("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros")


def _in(values: tuple[Any, ...]) -> Iterator[Any]:
    """The values, and what the tuples and lists among them hold: sizes one by one, or as one argument."""
    for value in values:
        yield value
        if isinstance(value, (tuple, list)):
            yield from value


def patches() -> dict[int, Callable[..., Any]]:
    """id of each such function -> what to put in its place. Only a thread that traces has values of a graph."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            given = next((v for v in _in((*args, *kwargs.values())) if isinstance(v, fx.Proxy)), None)
            if given is None:
                return function(*args, **kwargs)
            return given.tracer.create_proxy("call_function", function, args, kwargs)

        return make

    return {id(vars(torch)[name]): wrap(vars(torch)[name]) for name in _FACTORIES}
