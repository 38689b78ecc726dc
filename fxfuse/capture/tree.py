"""Copies of a module tree that share its parameters and buffers, and nothing that a forward could spoil."""

from __future__ import annotations

import copy
import functools
import operator
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _WrappedHook

REGION = "_fxfuse"
"""Instance attribute of a module whose forward is a region's."""
ROOT = "_fxfuse_root"
"""Instance attribute of an optimized model: its report and its regions."""
COPYING = ("__reduce_ex__", "_replicate_for_data_parallel")
"""Instance attributes of both, which make copies come out right; see copies.py."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = (list, tuple, dict, set, OrderedDict)


def is_opaque(module: nn.Module) -> bool:
    """A module that cannot be taken apart in Python: it is shared, not copied, and never looked into."""
    return isinstance(module, torch.jit.ScriptModule)


def copy_tree(root: nn.Module, *, isolate: bool = False) -> nn.Module:
    """The same modules anew: equal classes and attributes, the same Parameter and buffer objects.

    Attributes that refer to modules of the tree (lists of layers, bound methods, hooks) refer to the copies. With
    ``isolate`` containers are copied too, so that what a forward puts into them stays in the copy.
    A buffer replaced in one tree is replaced in the other, as ``.to()`` does it, unless ``isolate``.
    """
    copies = {id(m): m if is_opaque(m) else object.__new__(type(m)) for m in root.modules()}
    remap = _Remap(copies, isolate)
    for module in root.modules():
        if is_opaque(module):
            continue
        attributes: dict[str, Any] = {}
        for name, value in plain_attributes(module).items():
            if name in ("_buffers", "_non_persistent_buffers_set"):
                attributes[name] = type(value)(value) if isolate else value
            elif name == "_parameters" or name.endswith(("_hooks_with_kwargs", "_hooks_always_called")):
                attributes[name] = type(value)(value)
            elif name == "_modules":
                attributes[name] = type(value)((k, None if m is None else copies[id(m)]) for k, m in value.items())
            elif name.endswith("_hooks") and isinstance(value, dict):
                attributes[name] = type(value)((k, remap(hook)) for k, hook in value.items())
            else:
                attributes[name] = remap(value)
        copies[id(module)].__dict__.update(attributes)
        for slot, value in _slots(module):
            object.__setattr__(copies[id(module)], slot, remap(value))
    return copies[id(root)]


def _slots(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a module keeps outside its ``__dict__``."""
    for cls in type(module).__mro__[: type(module).__mro__.index(nn.Module)]:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType) and hasattr(module, name):
                yield name, getattr(module, name)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """A module's instance attributes as they were before fxfuse."""
    return without_region(module.__dict__)


def without_region(attributes: dict[str, Any]) -> dict[str, Any]:
    """The same instance attributes without what fxfuse installed."""
    attributes = {name: value for name, value in attributes.items() if name not in (ROOT, *COPYING)}
    region = attributes.pop(REGION, None)
    if region is not None:
        attributes.pop("forward", None)
        if region.previous is not None:
            attributes["forward"] = region.previous
    return attributes


class _Remap:
    """Replaces references to modules of one tree by references to their copies.

    Looks for them inside plain containers, and in what methods, partial functions and closures are bound to.
    """

    def __init__(self, copies: dict[int, nn.Module], isolate: bool):
        self.copies, self.isolate = copies, isolate
        self.done: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self.copies.get(id(value), value)
        if isinstance(value, types.MethodType):
            func, owner = self(value.__func__), self(value.__self__)
            same = func is value.__func__ and owner is value.__self__
            return value if same else types.MethodType(func, owner)
        if type(value) is functools.partial:
            func, args, keywords = self(value.func), self(value.args), self(value.keywords)
            if func is value.func and args is value.args and keywords is value.keywords:
                return value
            new = functools.partial(func, *args, **keywords)
            vars(new).update({k: self(v) for k, v in vars(value).items()})
            return new
        if isinstance(value, _WrappedHook):
            owner = value.module() if value.with_module else None
            return _WrappedHook(self(value.hook), self(owner))
        if isinstance(value, types.FunctionType):
            if id(value) not in self.done:
                self.done[id(value)] = value  # a function may find itself in its closure
                self.done[id(value)] = self.function(value)
            return self.done[id(value)]
        if type(value) not in _CONTAINERS:
            growing = isinstance(value, (dict, list, set, deque)) and self.isolate
            return self.done.setdefault(id(value), copy.copy(value)) if growing else value
        if id(value) not in self.done:
            self.done[id(value)] = value  # a container that holds itself stays as it is
            self.done[id(value)] = self.container(value)
        return self.done[id(value)]

    def function(self, value: types.FunctionType) -> types.FunctionType:
        cells, defaults = tuple(map(self.cell, value.__closure__ or ())), self(value.__defaults__)
        if all(map(operator.is_, cells, value.__closure__ or ())) and defaults is value.__defaults__:
            return value
        new = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells or None)
        new.__kwdefaults__ = value.__kwdefaults__
        vars(new).update({k: self(v) for k, v in vars(value).items()})
        for name in ("__module__", "__qualname__", "__doc__", "__annotations__"):
            setattr(new, name, getattr(value, name))
        return new

    def cell(self, cell: types.CellType) -> types.CellType:
        try:
            contents = self(cell.cell_contents)
        except ValueError:  # it is empty as yet
            return cell
        # The others stay shared: functions count and keep what they found in them.
        return cell if contents is cell.cell_contents else types.CellType(contents)

    def container(self, value: Any) -> Any:
        if isinstance(value, dict):
            items = {k: self(v) for k, v in value.items()}
            changed = any(items[k] is not v for k, v in value.items())
            return type(value)(items) if changed or self.isolate else value
        elements = [self(v) for v in value]
        changed = any(a is not b for a, b in zip(elements, value, strict=True))
        return type(value)(elements) if changed or (self.isolate and not isinstance(value, tuple)) else value


def snapshot(root: nn.Module) -> dict[tuple[int, str], Any]:
    """What every attribute in the tree refers to, containers by their elements, for ``changed`` to compare with."""
    return {(id(m), name): contents(value) for m in root.modules() for name, value in m.__dict__.items()}


def changed(root: nn.Module, before: dict[tuple[int, str], Any]) -> str | None:
    """The first attribute, as ``Class.name``, that no longer is what it was; None where all are."""
    for module in root.modules():
        for name, value in module.__dict__.items():
            if not same(before.get((id(module), name), _MISSING), contents(value)):
                return f"{type(module).__name__}.{name}"
    return None


_MISSING = object()


def contents(value: Any) -> Any:
    """``value`` for ``same`` to compare with later: containers by their elements, as they change in place."""
    if isinstance(value, dict):
        return (type(value), tuple((k, contents(v)) for k, v in value.items()))
    if isinstance(value, (list, set, deque)) or type(value) is tuple:
        return (type(value), tuple(map(contents, value)))
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return (type(value), value.dtype.str, value.shape, value.tobytes())
    return value


def same(a: Any, b: Any) -> bool:
    """Whether two ``contents`` are of the same objects and equal numbers."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a is b or (isinstance(a, (int, float, str, bytes)) and type(a) is type(b) and a == b)


@contextmanager
def preserved(root: nn.Module) -> Iterator[Callable[[], str | None]]:
    """Puts back the attributes of the objects that modules of the tree hold: a configuration, a counter, a cache.

    These are shared with the model, as copying what is not known would be worse. Yields a function that tells the class
    of the first object that was changed.
    """
    named = (item for m in root.modules() for item in m.__dict__.items())
    objects = {id(v): v for name, v in named if _has_state(v) and not name.startswith(REGION)}
    before = {key: dict(vars(v)) for key, v in objects.items()}
    known = {key: contents(b) for key, b in before.items()}

    def altered() -> list[int]:
        return [key for key, v in objects.items() if not same(known[key], contents(vars(v)))]

    try:
        yield lambda: next((type(objects[key]).__name__ for key in altered()), None)
    finally:
        for key in altered():
            vars(objects[key]).clear()
            vars(objects[key]).update(before[key])


def _has_state(value: Any) -> bool:
    stateless = (
        nn.Module,
        torch.Tensor,
        type,
        types.ModuleType,
        types.FunctionType,
        types.MethodType,
        functools.partial,
    )
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, stateless)


def intact(module: nn.Module) -> bool:
    """Whether the module's own forward is its region's, and nobody has put another in its place."""
    region = module.__dict__.get(REGION)
    forward = getattr(module.__dict__.get("forward"), "__func__", None)
    return region is not None and forward is region.forward


def hooked(module: nn.Module) -> str | None:
    """The kind of hook that a module has, or None."""
    return next(
        (name.strip("_").removesuffix("s").replace("_", " ") for name in HOOKS if module.__dict__.get(name)), None
    )
