"""Classes that stand in for those of modules during a trace: the tracer sees what is called and read of an instance."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import nn

from fxfuse.capture.value import Untraceable
from fxfuse.capture.written_out import WRITTEN_OUT

TRACER = "_fxfuse_tracer"
_NOT_WATCHED = frozenset(nn.Module().__dict__) - {"training"} | {TRACER}
"""Attributes that are nn.Module's own tables."""
_ITERATING = frozenset({"children", "named_children", "modules", "named_modules", "apply"})
_LARGEST_ARRAY = 1024
"""Elements of a NumPy array that a region may compare at each call."""


@functools.cache
def watched(cls: Any) -> type[nn.Module]:
    """A stand-in for ``cls`` whose calls and reads the tracer sees. Same name; ``super()`` works as before."""

    # An instance without a tracer is no part of the model: a slice of a list of modules is a list of their class.
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        call, tracer = functools.partial(cls.__call__, self), self.__dict__.get(TRACER)
        return call(*args, **kwargs) if tracer is None else tracer.call(self, call, args, kwargs)

    def __getattr__(self: Any, name: str) -> Any:
        tracer = self.__dict__.get(TRACER)
        return cls.__getattr__(self, name) if tracer is None else _looked_up(tracer, cls, self, name)

    def __getattribute__(self: Any, name: str) -> Any:
        value = cls.__getattribute__(self, name)
        if name in _NOT_WATCHED:
            return value
        attributes = cls.__getattribute__(self, "__dict__")
        tracer = attributes.get(TRACER)
        if tracer is None or not tracer.running:
            return value
        return _noted(tracer, tracer.paths[id(self)], name, value, None if name in attributes else _given(cls, name))

    names = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__call__": __call__,
        "__getattr__": __getattr__,
        "__getattribute__": __getattribute__,
    }
    if cls in WRITTEN_OUT:
        names["forward"] = WRITTEN_OUT[cls]
    return type(cls.__name__, (cls,), names)


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that a watched class stands in for."""
    return type(module).__mro__[1]


_NOT_THERE = object()


def _given(cls: type[nn.Module], name: str) -> Any:
    """What a module's class has under a name, as the class keeps it; nn.Module's own names do not count."""
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    return next((vars(base)[name] for base in bases if name in vars(base)), _NOT_THERE)


def _looked_up(tracer: Any, cls: Any, module: nn.Module, name: str) -> Any:
    """What ``nn.Module.__getattr__`` finds, tensors as values of the graph; that there is nothing is noted."""
    try:
        value = cls.__getattr__(module, name)
    except AttributeError:
        if tracer.running:
            tracer.assumed.absent.add((tracer.paths[id(module)], name))
        raise
    if isinstance(value, torch.Tensor) and (name in module._parameters or name in module._buffers):
        return tracer.read(_join(tracer.paths[id(module)], name))
    if value is None and tracer.running:
        tracer.assumed.absent.add((tracer.paths[id(module)], name))
    return value


def _noted(tracer: Any, path: str, name: str, value: Any, given: Any) -> Any:
    """Note that ``value`` was read; return what the forward is to see. ``given``: by the class; None: the instance."""
    if given is _NOT_THERE:
        if name in _ITERATING:
            tracer.assumed.iterated.add(path)
        return value
    if given is not None and given is not value:
        if isinstance(given, (types.FunctionType, property, classmethod, staticmethod)) and name != "forward":
            tracer.assumed.methods.add((path, name))
        return value
    if given is not None and isinstance(value, type):
        return value
    if isinstance(value, torch.Tensor):
        return tracer.read(_join(path, name))
    if type(value).__module__ == "numpy" and getattr(value, "size", 0) > _LARGEST_ARRAY:
        raise Untraceable(f"reads the array {name}, too large to be compared at each call")
    tracer.assumed.attributes.add((path, name))
    return tracer.stand_ins.of(value)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
