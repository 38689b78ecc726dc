"""One run of the model on the example inputs, to learn with which arguments each of its modules is called."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fxfuse.capture.arguments import Recorded
from fxfuse.capture.asked import RandomStates
from fxfuse.capture.tracer import LOCK
from fxfuse.capture.tree import copy_tree, is_opaque, preserved


class WritesParameter(Exception):
    """A forward writes into the model's own tensors, so even one trial run would change the model."""


class _Protect(TorchDispatchMode):
    """Stops before an operator writes into memory that a trial run shares with the model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        kept = [v for m in model.modules() for v in m.__dict__.values() if isinstance(v, (list, tuple, dict))]
        shared = [*model.parameters(), *(v for v in tree_leaves(kept) if isinstance(v, torch.Tensor))]
        self.memory = {address for t in shared if (address := _address(t))}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for i, argument in enumerate(func._schema.arguments):
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                # A tensor, or a list of them, by position or, as out= is, by name.
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                if any(_address(t) in self.memory for t in tree_leaves(value) if isinstance(t, torch.Tensor)):
                    raise WritesParameter(f"{func} writes into a tensor of the model when the model is called")
        return func(*args, **kwargs)


def _address(tensor: torch.Tensor) -> int:
    """Where the memory of a tensor begins; 0 where it has none of its own (meta, fake, sparse, wrapping subclasses)."""
    if isinstance(tensor, FakeTensor):  # torch would warn
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def trial_copy(model: nn.Module) -> nn.Module:
    """A copy whose forward can run without a trace on the model: it shares the memory of parameters alone.

    It is in evaluation mode, as that is what regions serve.
    """
    trial = copy_tree(model, isolate=True)
    cloned: dict[int, torch.Tensor] = {}
    for module in trial.modules():
        if is_opaque(module):
            continue
        module.__dict__["training"] = False
        tables: list[dict[str, Any]] = [module._parameters, module._buffers, module.__dict__]
        for table in tables:
            for name, value in table.items():
                if type(value) is nn.Parameter:
                    # Another object, since ``p.data = ...`` in a forward would reach the model's own.
                    # The flag of one made in inference mode cannot be set outside of it.
                    alias = nn.Parameter(value.detach(), value.requires_grad and not value.is_inference())
                    table[name] = cloned.setdefault(id(value), alias)
                elif isinstance(value, torch.Tensor) and table is not module._parameters:
                    table[name] = cloned.setdefault(id(value), value.detach().clone())
    return trial


@contextmanager
def undisturbed(devices: Sequence[int] = ()) -> Iterator[None]:
    """No gradients, and torch's random numbers (those of the GPUs ``devices`` too) go on after it as before.

    One thread at a time: two that handle torch's random state, one of them under a mode, can wait for each other for
    ever.
    """
    with LOCK, torch.random.fork_rng(devices=devices), torch.no_grad():
        yield


@contextmanager
def trial_run(model: nn.Module) -> Iterator[None]:
    """No gradients, no lasting random state, no writes into parameters."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with LOCK:
        states = RandomStates()
        try:
            with undisturbed(devices), _Protect(model), preserved(model):
                yield
        finally:
            states.put_back()


def own(values: Any) -> Any:
    """The same structure with tensors (and caches and the like) of its own: a forward may write into its inputs."""
    memo: dict[int, Any] = {}

    def one(value: Any) -> Any:
        # One object given twice stays one: forwards ask whether the key is the query.
        if id(value) not in memo:
            memo[id(value)] = value.clone() if isinstance(value, torch.Tensor) else _copied(value)
        return memo[id(value)]

    return tree_map(one, values)


def _copied(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # what cannot be copied can only be passed on
        return value


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
