"""What a call is predicted to do, noted operator by operator while it runs on tensors without data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fxfuse.bench import trace
from fxfuse.bench.kernel_names import COPY, ELEMENTWISE, GATHER, GEMM, OTHER, REDUCE
from fxfuse.bench.machine_rates import Rates
from fxfuse.ops import onednn


@dataclass(frozen=True)
class Pass:
    """One pass over memory: on a GPU, one kernel."""

    kind: str
    """As ``fxfuse.bench.kernel_names`` has them."""
    flops: int
    """Of products; what is done to single elements is not counted."""
    moved: int
    """Bytes read and written, each tensor once."""
    dtype: str


FOLLOWS = "it takes the result of what is not predicted"
"""Why a node is not predicted that would be by itself."""


@dataclass
class Work:
    """What one node is predicted to do."""

    node: str
    op: str
    """What the node calls."""
    host: Counter[str] = field(default_factory=Counter)
    """Operators by name: those that the node calls, and those with a kernel of their own that these end in."""
    passes: list[Pass] = field(default_factory=list)
    out: int = 0
    """Bytes of its result."""
    products: int | None = 0
    """On the CPU, how many products oneDNN computes; None where that is not predicted."""
    unknown: str = ""
    """Why nothing of it is predicted."""
    unknown_kernels: str = ""
    """Why its kernels are not predicted, where its operators are."""

    @property
    def kernels(self) -> Counter[str]:
        """By kind."""
        return Counter(done.kind for done in self.passes)

    @property
    def flops(self) -> int:
        return sum(done.flops for done in self.passes)

    @property
    def moved(self) -> int:
        return sum(done.moved for done in self.passes)

    def floor_s(self, rates: Rates) -> float:
        """The least time that the passes take, one after the other."""
        return sum(rates.floor_s(done.flops, done.moved, done.dtype) for done in self.passes)


def moved(*values: Any) -> int:
    """Bytes of the tensors among ``values``, each once, and of broadcast ones what lies in memory."""
    tensors = {id(leaf): leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}
    return sum(
        t.element_size() * math.prod(size for size, stride in zip(t.shape, t.stride(), strict=True) if stride)
        for t in tensors.values()
    )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Noted(TorchDispatchMode):
    """Notes the passes of every operator with a kernel of its own in ``work``; None: not now."""

    def __init__(self, work: Work | None = None):
        super().__init__()
        self.work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.work is not None and func.namespace not in _ASIDE and not _is_free(func):
            _note(self.work, func, args, kwargs, out)
        return out


def work_of(call: Callable[[], object]) -> Work:
    """The work of one call on tensors of the meta device."""
    work = Work("", "")

    def noted() -> None:
        with torch.no_grad(), Noted(work):
            call()

    (traced,) = trace.trace(noted, torch.device("cpu"), warm_up=0, active=1, keep=None)
    work.host = traced.host_ops(None)
    return work


_ASIDE = ("prim", "profiler")


def _is_free(func: OpOverload) -> bool:
    """Whether an operator touches no element: views, and memory that nobody has written yet."""
    return func.is_view or func._opname in _FREE


_FREE = {
    "_unsafe_view",
    "_reshape_alias",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "is_set_to",
    "lift_fresh",
    "new_empty",
}

_KINDS = {
    **dict.fromkeys(("addmm", "mm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot"), GEMM),
    **dict.fromkeys(("arange", "elu", "glu", "hardsigmoid", "hardswish", "leaky_relu", "softplus"), ELEMENTWISE),
    **dict.fromkeys(("_softmax", "amax", "amin", "mean", "native_layer_norm", "sum"), REDUCE),
    **dict.fromkeys(("_to_copy", "cat", "clone", "copy_"), COPY),
    "embedding": GATHER,
}
"""Operators of one kernel, beside those that torch itself tags as pointwise."""


def _kind(func: OpOverload) -> str:
    name = func._opname
    if name in _KINDS or name.removesuffix("_") in _KINDS:
        return _KINDS.get(name) or _KINDS[name.removesuffix("_")]
    return ELEMENTWISE if torch.Tag.pointwise in func.tags else OTHER


def _note(work: Work, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    kind, name = _kind(func), func._opname
    counted = flop_registry.get(func.overloadpacket)
    flops = int(counted(*args, **kwargs, out_val=out)) if counted is not None else 0
    written = next((leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)), None)
    dtype = name_of(written.dtype) if written is not None else ""
    traffic = moved(args, kwargs, out)
    if name == "embedding":  # reads the rows that it is asked for, and not the table
        traffic = 2 * moved(out) + moved(args[1])
    elif func._schema.is_mutable:
        traffic += moved(args[0])
    work.passes.append(Pass(kind, flops, traffic, dtype))
    if name == "addmm" and not _has_bias_epilogue(*args[:3], **kwargs):
        work.passes.append(Pass(COPY, 0, moved(args[0], out), dtype))
    if kind == OTHER:
        work.unknown_kernels = f"{func.name()}: how many kernels it takes is not known"
    elif name == "native_layer_norm" and args[1][-1] % 4:
        work.unknown_kernels = "aten::native_layer_norm: rows that are no multiple of 4 take one kernel or two"
    if kind == GEMM and work.products is not None:
        found = _by_onednn(name, args)
        work.products = None if found is None else work.products + found


def _has_bias_epilogue(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> bool:
    """Whether cuBLAS adds the bias itself. Else eager copies it into the output first, where the product adds to it."""
    return beta == 1 and bias.dim() == 1 and bias.is_contiguous() and bias.shape[0] == b.shape[1] and min(b.shape) > 1


_LEAST_PRODUCT = 16**3


def _by_onednn(name: str, args: tuple[Any, ...]) -> int | None:
    """How many products oneDNN computes for eager's operator on the CPU; None where that is not known.

    In float32 MKL computes them. In 16 bits oneDNN does, of more than 16**3 multiplications.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    a, b = tensors[-2:]
    if name not in ("addmm", "mm") or not onednn.AVAILABLE:
        return None
    if a.dtype is torch.float32:
        return 0 if torch.backends.mkl.is_available() and onednn.is_on(a.dtype) else None
    if a.dtype in (torch.bfloat16, torch.float16) and onednn.has(a.dtype):
        return int(a.numel() * b.shape[1] > _LEAST_PRODUCT)
    return None
