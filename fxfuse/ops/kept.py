"""Views of parameters, made once: each costs a trip through the dispatcher, 1 us and much more on cold caches."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

View = TypeVar("View")


class Kept(Generic[View]):
    """``view(parameter)``, made again only where the parameter's memory, shape, strides or dtype are other ones.

    A view reads the parameter's own memory, so it sees every change of values. It holds that memory: where a parameter
    has moved (``.to()``, ``.data =``), the old one is given back at the next call.
    """

    __slots__ = ("kept", "view")

    def __init__(self, view: Callable[[Tensor], View]):
        self.view = view
        self.kept: tuple[Tensor, torch.dtype, View] | None = None

    def __call__(self, parameter: Tensor) -> View:
        kept = self.kept
        if kept is None or parameter.dtype is not kept[1] or not parameter.is_set_to(kept[0]):
            with torch.no_grad():
                alias = parameter.detach()
                kept = self.kept = alias, alias.dtype, self.view(alias)
        return kept[2]
