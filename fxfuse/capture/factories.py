"""Factories of torch that are given sizes one by one, ``torch.zeros(batch, 1)``, while a forward is traced.

Where such a size is a value of the graph, torch's parser of arguments refuses it before any function mode sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_OF_SIZES = ("empty", "ones", "rand", "randn", "zeros")


def patches() -> dict[int, Callable[..., Any]]:
    """id of each such function -> what to put in its place. Only a thread that traces has values of a graph."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def of_sizes(*args: Any, **kwargs: Any) -> Any:
            size = next((arg for arg in args if isinstance(arg, fx.Proxy)), None)
            if size is None:
                return function(*args, **kwargs)
            return size.tracer.create_proxy("call_function", function, args, kwargs)

        return of_sizes

    return {id(vars(torch)[name]): wrap(vars(torch)[name]) for name in _OF_SIZES}
