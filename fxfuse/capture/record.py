"""One run of the model on the example inputs, to learn with which arguments each of its modules is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fxfuse.capture.arguments import Recorded
from fxfuse.capture.tree import copy_tree, is_opaque


class WritesParameter(Exception):
    """A forward writes into a parameter, so even one trial run would change the model."""


class _Protect(TorchDispatchMode):
    """Stops before an operator writes into memory of the model's parameters."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.memory = {p.untyped_storage().data_ptr() for p in model.parameters() if p.numel() and not p.is_meta}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func._schema.is_mutable:
            # Operators write their leading arguments; an ``out=`` among the keywords is never a parameter.
            for argument, value in zip(func._schema.arguments, args, strict=False):
                writes = argument.alias_info is not None and argument.alias_info.is_write
                if writes and isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self.memory:
                    raise WritesParameter(f"{func} writes into a parameter when the model is called")
        return func(*args, **(kwargs or {}))


def trial_copy(model: nn.Module) -> nn.Module:
    """A copy whose forward can run without a trace on the model: its buffers are its own, its parameters are shared."""
    trial = copy_tree(model, isolate=True)
    cloned: dict[int, torch.Tensor] = {}
    for module in trial.modules():
        if is_opaque(module):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = cloned.setdefault(id(buffer), buffer.clone())
    return trial


@contextmanager
def trial_run(model: nn.Module) -> Iterator[None]:
    """No gradients, no lasting random state, no writes into parameters."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), torch.no_grad(), _Protect(model):
        yield


def own(values: Any) -> Any:
    """The same structure with tensors of its own, since a forward may write into its inputs."""
    return tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, values)


def record(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Recorded]:
    """Module path -> its first call. Whatever the forward raises goes to the caller."""
    trial = trial_copy(model)
    calls: dict[str, Recorded] = {}
    for path, module in trial.named_modules(remove_duplicate=False):
        if is_opaque(module):
            continue

        def note(module: nn.Module, given: tuple, named: dict[str, Any], path: str = path) -> None:
            calls.setdefault(path, Recorded.of(given, named))

        module.register_forward_pre_hook(note, with_kwargs=True)
    with trial_run(model):
        trial(*own(args), **own(kwargs))
    return calls
