"""Stand-ins for the objects that modules hold (a configuration, say), which note what a forward reads of them.

They are copies, since the objects are shared with the model and other threads may be reading them.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxfuse.capture.assumed import ABSENT, Assumed
from fxfuse.capture.value import Untraceable

_STATELESS = (
    nn.Module,
    torch.Tensor,
    torch.fx.Proxy,
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    functools.partial,
    enum.Enum,
)
_COMPUTED = (types.FunctionType, property, classmethod, staticmethod, functools.cached_property)
"""What a class gives by running code, whose own reads are noted."""


def has_state(value: Any) -> bool:
    """Whether a value is an object whose attributes may change, and no module or tensor."""
    if isinstance(value, _STATELESS) or type(value).__module__.partition(".")[0] in ("builtins", "torch", "logging"):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) or bool(_slots(type(value)))


def _slots(cls: type) -> list[str]:
    names: list[str] = copyreg._slotnames(cls)  # type: ignore[attr-defined]
    return names


class StandIns:
    """The stand-ins of one trace. While ``running`` says so, ``assumed`` gets what is read of them."""

    def __init__(self, assumed: Assumed, running: Callable[[], bool]):
        self.assumed, self.running = assumed, running
        self.made: dict[int, tuple[Any, Any]] = {}
        """id of an object or container -> it, and what is seen in its place."""
        self.classes: dict[type, type] = {}
        self.originals: dict[int, Any] = {}
        """id of a stand-in -> what it stands in for."""

    def of(self, value: Any) -> Any:
        """What a forward sees in the place of ``value``: itself, unless it is such an object or holds one."""
        container = type(value) in (list, tuple, dict)
        if not container and (not has_state(value) or id(value) in self.originals):
            return value
        if id(value) not in self.made:
            self.made[id(value)] = value, value  # a container that holds itself stays as it is
            self.made[id(value)] = value, self._container(value) if container else self._copy(value)
        return self.made[id(value)][1]

    def _container(self, value: Any) -> Any:
        elements = list(value.values()) if isinstance(value, dict) else list(value)
        seen = [self.of(v) for v in elements]
        if all(a is b for a, b in zip(elements, seen, strict=True)):
            return value
        return dict(zip(value, seen, strict=True)) if isinstance(value, dict) else type(value)(seen)

    def _copy(self, value: Any) -> Any:
        cls = type(value)
        try:
            if cls not in self.classes:
                self.classes[cls] = self._class(cls)
            new: Any = cls.__new__ if cls is types.SimpleNamespace else object.__new__
            made = new(self.classes[cls])
        except TypeError:  # built on a class of C, whose instances hold more than attributes
            return value
        for name in _slots(cls):
            if hasattr(value, name):
                object.__setattr__(made, name, getattr(value, name))
        object.__getattribute__(made, "__dict__").update(getattr(value, "__dict__", {}))
        self.originals[id(made)] = value
        self.made[id(made)] = made, made  # held, so that its id stays its own
        return made

    def _class(self, cls: type) -> type:
        of_class: Any = cls.__getattribute__

        def __getattribute__(stand_in: Any, name: str) -> Any:
            try:
                value = of_class(stand_in, name)
            except AttributeError:
                fallback = getattr(cls, "__getattr__", None)
                try:
                    if fallback is None:
                        raise
                    value = fallback(stand_in, name)
                except AttributeError:
                    self._note(stand_in, name, ABSENT)
                    raise
            return self._note(stand_in, name, value)

        def refuse(stand_in: Any, *_: Any) -> None:
            raise Untraceable(f"changes {cls.__name__} when it is called")

        names = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__class__": property(lambda stand_in: cls),
            "__getattribute__": __getattribute__,
            "__setattr__": refuse,
            "__delattr__": refuse,
        }
        return types.new_class(cls.__name__, (cls,), exec_body=lambda body: body.update(names))

    def _note(self, stand_in: Any, name: str, value: Any) -> Any:
        if not self.running() or (name.startswith("__") and name.endswith("__")):
            return value
        given = next((vars(base)[name] for base in type(stand_in).__mro__ if name in vars(base)), None)
        if isinstance(given, _COMPUTED):
            return value
        original = self.originals.get(id(stand_in))
        if original is None:
            raise Untraceable(f"copies a {type(stand_in).__name__}, which may change")
        self.assumed.foreign[id(original), name] = original, name, value
        return self.of(value)
