"""Puts calls without a proxy among their arguments into a trace's graph: random numbers, factories, constants."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fxfuse.capture.value import Untraceable, disown

# What a tensor is, not what it holds. A region compares tensors that it was traced with by identity.
_DESCRIBING = {
    "shape", "dtype", "device", "ndim", "layout", "itemsize", "nbytes", "names",
    "is_cpu", "is_cuda", "is_meta", "is_mkldnn", "is_mps", "is_nested", "is_quantized", "is_sparse", "is_xpu",
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device", "is_contiguous",
    "is_floating_point", "is_complex", "is_same_size", "result_type", "__len__", "__hash__",
}  # fmt: skip


class Recording(TorchFunctionMode):
    """The function mode that a forward is traced under."""

    def __init__(self, tracer: Any):
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        disown(sys._getframe(1), args, kwargs)
        if any(issubclass(t, torch.fx.Proxy) for t in types):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if (
            (name.endswith("_") and not name.endswith("__"))
            or name in ("__setitem__", "__set__")
            or kwargs.get("out") is not None
        ):
            raise Untraceable(f"writes a tensor that is no value of the graph, by {name}")
        if any(isinstance(v, torch.fx.Proxy) for v in tree_leaves((args, kwargs))):
            return self.tracer.create_proxy("call_function", func, args, kwargs)
        value = _undone(func, args, kwargs)
        read = func.__self__.__name__ if name == "__get__" else name
        if not any(isinstance(v, torch.Tensor) for v in tree_leaves(value)):
            if read not in _DESCRIBING and any(isinstance(v, torch.Tensor) for v in tree_leaves((args, kwargs))):
                raise Untraceable(f"reads by {read} what a tensor holds, which may change")
            return value
        if name == "__get__":  # x.T and the like: an attribute of a tensor that the model keeps
            return self.tracer.create_proxy("call_function", getattr, (args[0], read), {})
        return self.tracer.create_proxy("call_function", func, args, kwargs)


def _undone(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What ``func`` gives; numbers that it draws are drawn again by whoever draws next."""
    generator = kwargs.get("generator") or torch.default_generator
    state = generator.get_state()
    try:
        return func(*args, **kwargs)
    finally:
        generator.set_state(state)
