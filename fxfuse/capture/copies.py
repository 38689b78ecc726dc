"""What becomes of a region when its module is copied.

An instance's own ``forward`` is bound to that instance, so a copy that takes it along answers with the original's
parameters. deepcopy binds it anew and stays optimized. ``copy.copy``, pickle and DataParallel's replicas do not, so
they get the module as it was before: their forward is the class's.
"""

from __future__ import annotations

import copy
import types
from typing import Any

from torch import nn

from fxfuse.capture.tree import COPYING, REGION, plain_attributes, without_region


def protect(module: nn.Module) -> None:
    """Give the instance its own answers to copying."""
    reduce, replicate = COPYING
    module.__dict__[reduce] = types.MethodType(_reduce, module)
    module.__dict__[replicate] = types.MethodType(_replicate, module)


def release(module: nn.Module) -> None:
    for name in COPYING:
        module.__dict__.pop(name, None)


class _State(dict[str, Any]):
    """The attributes of the plain module, which copy.copy and pickle take; deepcopy takes all of them."""

    def __init__(self, everything: dict[str, Any]):
        super().__init__(without_region(everything))
        self.everything = everything

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        copied = copy.deepcopy(self.everything, memo)
        forward = getattr(self.everything.get(REGION), "forward", None)
        for name, value in copied.items():
            # Each region has a forward of its own; methods are copied with the function that they had.
            if isinstance(value, types.MethodType) and value.__func__ is forward:
                copied[name] = types.MethodType(copied[REGION].forward, value.__self__)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _reduce(module: nn.Module, protocol: Any) -> Any:
    reduced = type(module).__reduce_ex__(module, protocol)
    if isinstance(reduced, str) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    return (*reduced[:2], _State(reduced[2]), *reduced[3:])


def _replicate(module: nn.Module) -> nn.Module:
    replica = type(module)._replicate_for_data_parallel(module)
    replica.__dict__ = plain_attributes(replica)
    return replica
