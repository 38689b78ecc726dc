"""Proxies that refuse, instead of answering wrongly, what a trace cannot know."""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves


class Untraceable(Exception):
    """Why a forward has no graph."""


class _Writable(fx.Proxy):
    """Records ``x += y`` as what it is: fx's own proxies make ``x = x + y`` of it, and the tensor is never written."""

    tracer: Any

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_interface__"):  # NumPy and PyTorch ask whatever they are given whether it is an array
            raise AttributeError(name)
        return Attribute(self, name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        disown(sys._getframe(1), args, kwargs)
        result: Any = fx.Proxy.__torch_function__.__func__(fx.Proxy, function, types, args, kwargs)  # type: ignore
        return result

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


def disown(frame: types.FrameType, *arguments: Any) -> None:
    """PyTorch asks for the number that a proxy is before it finds that the call is not its own: nothing is taken so."""
    for value in tree_leaves(arguments):
        if isinstance(value, Number):
            value.tracer.sizes.withdraw(frame)


class Value(_Writable):
    """A value of the graph. An argument is a tensor, which its region makes sure of; most others may be anything."""

    def __getattr__(self, name: str) -> Any:
        known = self.tracer.attribute(self, name)
        return super().__getattr__(name) if known is None else known

    def size(self, dim: Any = None) -> Any:
        shape = self.tracer.shape(self) if dim is None else None
        given = () if dim is None else (dim,)
        return self.tracer.create_proxy("call_method", "size", (self, *given), {}) if shape is None else shape

    def dim(self) -> Any:
        rank = self.tracer.rank(self)
        return self.tracer.create_proxy("call_method", "dim", (self,), {}) if rank is None else rank

    def __len__(self) -> int:
        count = self.tracer.count(self)
        return super().__len__() if count is None else count

    def __contains__(self, element: Any) -> bool:
        if self.tracer.kind(self) is torch.Tensor:  # which is asked as a whole, and not item by item
            return bool((self == element).any())
        return any(element is value or element == value for value in self)

    def __getitem__(self, key: Any) -> Any:
        # With an example the region's check would find that an element is no tensor; without one nobody would.
        if self.node.op == "call_module" and self.tracer.guesses(self.node):
            raise Untraceable(f"takes apart what {self.node.target} returns, which only example inputs would tell")
        return self.tracer.create_proxy("call_function", operator.getitem, (self, key), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        # A tensor keeps a copy, as every in-place operator does. What else has items would keep the value itself.
        if not (self.tracer.kind(self) is torch.Tensor or self.tracer.gives_tensor(self.node)):
            raise Untraceable("assigns to items of a value that is not known to be a tensor")
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Untraceable("calls a value of the graph")


class Number(Value):
    """A number that the example tells. It stays a value of the graph; where Python asks which, it is what it was.

    Then its region checks that it still is, or there is no graph.
    """

    def taken(self) -> Any:
        value = self.tracer.sizes.take(self.node)
        if value is None:
            raise Untraceable("takes a number that the arguments' sizes do not tell")
        return value

    def __int__(self) -> int:
        return int(self.taken())

    def __float__(self) -> float:
        return float(self.taken())

    def __index__(self) -> int:
        number = operator.index(self.taken())
        self.tracer.sizes.taken_at(sys._getframe(1))
        return number

    def __hash__(self) -> int:
        # What is found under it, or kept there, would be so for this trace alone.
        raise Untraceable("looks something up by a number that is a value of the graph")


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    # Numbers are not written in place.
    setattr(Number, f"__i{_name}__", getattr(fx.Proxy, f"__{_name}__"))


class Shape(tuple[Any, ...]):
    """``x.shape`` as a forward is to see it: so many numbers."""

    def numel(self) -> Any:
        return functools.reduce(operator.mul, self, 1)


class Handed(Value):
    """An argument that is no tensor and no constant: nothing is known of it but its class."""

    def refuse(self, *_: Any) -> Any:
        expression, kind = self.tracer.handed[self.node.target]
        raise Untraceable(f"its argument {expression} is a {kind.__name__}")

    __getattr__ = __getitem__ = __setitem__ = __iter__ = __len__ = __bool__ = __contains__ = __call__ = refuse


def is_instance(value: Any, classes: Any) -> bool:
    """``isinstance`` as a forward is to see it: a proxy is no tensor by its type, but stands for one.

    ``__class__`` cannot tell it, since PyTorch's own C++ would believe that and take the proxy for a tensor.
    """
    if not isinstance(value, _Writable):  # a proxy of another tracer's, in another thread, is none of ours
        return isinstance(value, classes)
    if classes is fx.Proxy:  # whoever asks whether he is traced is answered as without a trace
        return False
    if isinstance(value, Handed):
        value.refuse()
    tracer: Any = value.tracer
    known = tracer.kind(value)
    if known is not None:
        return issubclass(known, classes)
    if isinstance(value, Value) and value.tracer.gives_tensor(value.node):
        return issubclass(torch.Tensor, classes)
    raise Untraceable("decides by the type of a value that is not known before the call")


def is_tensor(value: Any) -> bool:
    """``torch.is_tensor`` in the same way."""
    return is_instance(value, torch.Tensor)


_FINFO = torch.finfo


class _Limits(type):
    def __call__(cls, dtype: Any = None) -> torch.finfo:
        if isinstance(dtype, fx.Proxy):
            tracer: Any = dtype.tracer
            known = tracer.dtypes.named(dtype.node)
            if known is None:
                raise Untraceable("asks for the limits of a dtype that is not known before the call")
            dtype = known
        return _FINFO() if dtype is None else _FINFO(dtype)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _FINFO)


class finfo(metaclass=_Limits):
    """``torch.finfo`` in the same way: the dtype of a proxy is assumed. Other threads see it too and notice nothing."""
