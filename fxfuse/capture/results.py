"""What a forward may return, for a graph to bring it back as it was."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import fx

from fxfuse.capture.value import Untraceable


def check_result(result: Any) -> None:
    """Refuse results that a graph would bring back as something else."""
    if isinstance(result, fx.Proxy):
        return
    if isinstance(result, (tuple, list)) and (type(result) in (tuple, list, torch.Size) or hasattr(result, "_fields")):
        for value in result:
            check_result(value)
    elif type(result) is dict:
        for value in result.values():
            check_result(value)
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        if not all(f.init for f in dataclasses.fields(result)) or not _is_of_fields(result):
            raise Untraceable(f"returns a {type(result).__name__}")
        for f in dataclasses.fields(result):
            check_result(getattr(result, f.name))
    elif not isinstance(result, (torch.Tensor, int, float, complex, str, bool, torch.dtype, torch.device, type(None))):
        raise Untraceable(f"returns a {type(result).__name__}")


def _is_of_fields(result: Any) -> bool:
    """Whether a dataclass that is a dict as well holds what a call with its items would: its fields but for None."""
    if not isinstance(result, dict):
        return True
    held = {f.name: getattr(result, f.name) for f in dataclasses.fields(cast(Any, result))}
    return list(result) == [name for name, value in held.items() if value is not None] and all(
        result[name] is held[name] for name in result
    )
