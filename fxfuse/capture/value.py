"""Proxies that refuse, instead of answering wrongly, what a trace cannot know."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx


class Untraceable(Exception):
    """Why a forward has no graph."""


class _Writable(fx.Proxy):
    """Records ``x += y`` as what it is: fx's own proxies make ``x = x + y`` of it, and the tensor is never written."""

    tracer: Any

    def __getattr__(self, name: str) -> Any:
        return Attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Python would keep the attribute on the proxy, and the graph know nothing of it.
        if name not in ("attr", "node", "root", "tracer", "_node"):
            raise Untraceable(f"sets {name} of a value")
        object.__setattr__(self, name, value)


def _in_place(operation: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: _Writable, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operation, (self, other), {})

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    setattr(_Writable, f"__i{_name}__", _in_place(getattr(operator, f"__i{_name}__")))


class Attribute(_Writable, fx.proxy.Attribute):
    """``x.shape`` and the like, or a method about to be called."""


class Value(_Writable):
    """A value of the graph. An argument is a tensor, which its region makes sure of; most others may be anything."""

    def __getitem__(self, key: Any) -> Any:
        # With an example the region's check would find that an element is no tensor; without one nobody would.
        if self.node.op == "call_module" and self.tracer.guesses(self.node):
            raise Untraceable(f"takes apart what {self.node.target} returns, which only example inputs would tell")
        return self.tracer.create_proxy("call_function", operator.getitem, (self, key), {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Untraceable("calls a value of the graph")


class Handed(Value):
    """An argument that is no tensor and no constant: nothing is known of it but its class."""

    def refuse(self, *_: Any) -> Any:
        expression, kind = self.tracer.handed[self.node.target]
        raise Untraceable(f"its argument {expression} is a {kind.__name__}")

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __call__ = refuse


def is_instance(value: Any, classes: Any) -> bool:
    """``isinstance`` as a forward is to see it: a proxy is no tensor by its type, but stands for one.

    ``__class__`` cannot tell it, since PyTorch's own C++ would believe that and take the proxy for a tensor.
    """
    if not isinstance(value, fx.Proxy) or isinstance(value, classes):
        return isinstance(value, classes)
    if isinstance(value, Handed):
        value.refuse()
    if isinstance(value, Value) and value.tracer.gives_tensor(value.node):
        return issubclass(torch.Tensor, classes)
    raise Untraceable("decides by the type of a value that is not known before the call")


def is_tensor(value: Any) -> bool:
    """``torch.is_tensor`` in the same way."""
    return is_instance(value, torch.Tensor)
