"""Symbolic tracing of one module, called with a given mixture of free tensors and constants.

torch.fx's own ``Tracer.trace`` patches ``nn.Module`` for the whole process while it runs, bakes random numbers and
other tensors made inside a forward as constants, and lets a forward leave proxies behind on the model. Here the modules
to be traced are copies whose class records calls and reads, a function mode records what has no proxy among its
arguments, and whatever the forward did to its own attributes is looked for afterwards.
"""

from __future__ import annotations

import dataclasses
import functools
import linecache
import math
import os
import sys
import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx, nn
from torch.fx._symbolic_trace import _autowrap_check, _new_patcher, _patch_wrapped_functions
from torch.overrides import TorchFunctionMode

from fxfuse.capture.tree import changed, hooked, is_opaque, snapshot

LOCK = threading.RLock()
"""Functions marked with ``torch.fx.wrap`` are patched while a trace runs, so one trace runs at a time."""

_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_OWN_FOLDER = os.path.dirname(__file__) + os.sep
_TRACER = "_fxfuse_tracer"
_WATCHED = frozenset({bool, int, float, str, type(None)})


class Untraceable(Exception):
    """Why a forward has no graph."""


class Tracer(fx.Tracer):
    """Traces copies of modules made by ``copy_tree(isolate=True)``; see ``trace_module``."""

    def __init__(self, root: nn.Module, leaves: Collection[str]):
        super().__init__(autowrap_modules=(math,))
        self.root = root
        self.leaves = set(leaves)
        self.graph = fx.Graph(tracer_cls=fx.Tracer)
        self.paths = {id(m): path for path, m in root.named_modules()}
        self.tensors = {id(t): name for name, t in _tensors(root)}
        self.reads: dict[str, fx.Proxy] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.inlined: dict[str, nn.Module] = {}
        """Paths of modules whose forward was traced through."""
        self.attributes: dict[tuple[str, str], Any] = {}
        """(module path, name) -> value, of the plain attributes that the forward read, ``training`` among them."""
        self.running = False
        self.patcher: Any = None

    # modules

    def call(self, module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        path = self.paths.get(id(module))
        if path is None:
            return forward(*args, **kwargs)
        if self.is_leaf(module, path):
            return self.create_proxy("call_module", path, args, kwargs)
        self.inlined[path] = module
        _wrap_functions(self, module)
        return forward(*args, **kwargs)

    def is_leaf(self, module: nn.Module, path: str) -> bool:
        if path in self.leaves or is_opaque(module) or "forward" in module.__dict__ or hooked(module):
            return True
        own = type(module).__mro__[1]  # the class that the tracing class stands in for
        return own.__module__.startswith("torch.nn") and own is not nn.Sequential

    # values

    def read(self, path: str) -> fx.Proxy:
        if path not in self.reads:
            self.reads[path] = self.create_proxy("get_attr", path, (), {})
        return self.reads[path]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            path = self.tensors.get(id(a))
            if path is None:
                path = f"_tensor_constant{len(self.constants)}"
                while hasattr(self.root, path):
                    path += "_"
                self.constants[path] = a
                self.tensors[id(a)] = path
            return self.read(path).node
        if isinstance(a, nn.Module):
            raise Untraceable(f"passes the module {type(a).__name__} to a function")
        if type(a).__module__ == "numpy" and hasattr(a, "item"):
            return a.item()
        return super().create_arg(a)

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: Any = None
    ) -> fx.Node:
        if _autocast():
            raise Untraceable("enters autocast")
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        node.meta["source"] = _source()
        return node

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val


class _Record(TorchFunctionMode):
    """Puts calls without a proxy among their arguments into the graph: random numbers, factories, constants."""

    def __init__(self, tracer: Tracer):
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, fx.Proxy) for t in types):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if (
            (name.endswith("_") and not name.endswith("__"))
            or name in ("__setitem__", "__set__")
            or kwargs.get("out") is not None
        ):
            raise Untraceable(f"writes a tensor that is no value of the graph, by {name}")
        value = func(*args, **kwargs)
        if not isinstance(value, torch.Tensor):
            return value
        if name == "__get__":  # x.T and the like: an attribute of a tensor that the model keeps
            return self.tracer.create_proxy("call_function", getattr, (args[0], func.__self__.__name__), {})
        return self.tracer.create_proxy("call_function", func, args, kwargs)


@functools.cache
def _traced(cls: Any) -> type[nn.Module]:
    """A stand-in for ``cls`` whose calls and reads the tracer sees. Same name; ``super()`` works as before."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_TRACER].call(self, functools.partial(cls.__call__, self), args, kwargs)

    def __getattr__(self: Any, name: str) -> Any:
        value = cls.__getattr__(self, name)
        if isinstance(value, torch.Tensor) and (name in self._parameters or name in self._buffers):
            tracer = self.__dict__[_TRACER]
            return tracer.read(".".join(filter(None, (tracer.paths[id(self)], name))))
        return value

    def __getattribute__(self: Any, name: str) -> Any:
        value = cls.__getattribute__(self, name)
        # Names with an underscore are nn.Module's own tables; methods and class attributes are not in __dict__.
        if type(value) in _WATCHED and not name.startswith("_"):
            attributes = cls.__getattribute__(self, "__dict__")
            tracer = attributes.get(_TRACER)
            if tracer is not None and name in attributes and tracer.running:
                tracer.attributes[tracer.paths[id(self)], name] = value
        return value

    names = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__call__": __call__,
        "__getattr__": __getattr__,
        "__getattribute__": __getattribute__,
    }
    return type(cls.__name__, (cls,), names)


def trace_module(
    root: nn.Module, call: Callable[[Any], tuple[tuple, dict[str, Any]]], leaves: Collection[str]
) -> Tracer:
    """Trace ``root.forward``. ``call(placeholder)`` gives its arguments, making free ones with ``placeholder(name)``.

    ``root`` is an isolated copy and is used up. Raises Untraceable with the reason where there is no faithful graph.
    """
    tracer = Tracer(root, leaves)
    for module in root.modules():
        if not is_opaque(module):
            module.__dict__[_TRACER] = tracer
            # Fused operators serve inference: where the forward asks for the flag, this is the answer assumed.
            module.__dict__["training"] = False
            cls: Any = type(module)
            module.__class__ = _traced(cls)
    before = snapshot(root)
    tracer.inlined[""] = root
    run = functools.partial(_call_with_placeholders, tracer, root.forward, call)
    return _run(tracer, run, root.forward, lambda: changed(root, before))


def trace_function(function: Callable[..., Any], call: Callable[[Any], tuple[tuple, dict[str, Any]]]) -> Tracer:
    """Trace a plain function; tensors and modules that it closes over are constants of the graph."""
    tracer = Tracer(nn.Module(), ())
    return _run(tracer, functools.partial(_call_with_placeholders, tracer, function, call), function, lambda: None)


def _call_with_placeholders(tracer: Tracer, forward: Callable[..., Any], call: Callable[[Any], Any]) -> Any:
    args, kwargs = call(lambda name: tracer.create_proxy("placeholder", name, (), {}))
    return forward(*args, **kwargs)


def _run(tracer: Tracer, run: Callable[[], Any], code: Callable[..., Any], altered: Callable[[], str | None]) -> Tracer:
    with LOCK, ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        tracer.patcher = stack.enter_context(_new_patcher())
        _patch_wrapped_functions(tracer.patcher)
        _autowrap_check(tracer.patcher, vars(math), tracer._autowrap_function_ids)
        _wrap_functions(tracer, code)
        try:
            tracer.running = True
            with _Record(tracer):
                result = run()
            tracer.running = False
            _check_result(result)
            tracer.create_node("output", "output", (tracer.create_arg(result),), {})
        except Untraceable:
            raise
        except Exception as error:  # whatever a forward may raise when its tensors have no values
            raise Untraceable(_explain(error)) from error
        name = altered()
        if name is not None:
            raise Untraceable(f"changes {name} when it is called")
    return tracer


def _wrap_functions(tracer: Any, code: Any) -> None:
    """Let calls of math.sqrt and the like on sizes become nodes, where ``code``'s forward was written."""
    forward = getattr(code, "forward", code)
    scope = getattr(getattr(forward, "__func__", forward), "__globals__", {})
    _autowrap_check(tracer.patcher, scope, tracer._autowrap_function_ids)


def _check_result(result: Any) -> None:
    """Refuse results that a graph would bring back as something else."""
    if isinstance(result, (tuple, list)) and (type(result) in (tuple, list, torch.Size) or hasattr(result, "_fields")):
        for value in result:
            _check_result(value)
    elif type(result) is dict:
        for value in result.values():
            _check_result(value)
    elif dataclasses.is_dataclass(result) and not isinstance(result, (dict, type)):
        if not all(f.init for f in dataclasses.fields(result)):
            raise Untraceable(f"returns a {type(result).__name__}")
        for f in dataclasses.fields(result):
            _check_result(getattr(result, f.name))
    elif not isinstance(
        result, (fx.Proxy, torch.Tensor, int, float, complex, str, bool, torch.dtype, torch.device, type(None))
    ):
        raise Untraceable(f"returns a {type(result).__name__}")


def _explain(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, fx.proxy.TraceError):
        text = "decides by a value or size that is not known before the call" if "control flow" in text else text
    return f"{text[:160]} ({type(error).__name__})" if text else type(error).__name__


def _autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _source() -> str:
    """``file:line: code`` of the innermost statement that is neither PyTorch's nor fxfuse's."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code is not _call_with_placeholders.__code__:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH_FOLDER, _OWN_FOLDER, "<")):
            return f"{name}:{frame.f_lineno}: {linecache.getline(name, frame.f_lineno).strip()}"
        frame = frame.f_back
    return ""


def _tensors(root: nn.Module) -> Any:
    for path, module in root.named_modules():
        for table in (module._parameters, module._buffers, module.__dict__):
            for name, value in table.items():
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{name}" if path else name, value
