"""The sizes of what torch's operators return, as terms over those of what they are given.

Each rule has the name of its operator and takes its arguments: tensors as tuples of their sizes, numbers as terms. What
a rule does not tell, or tells otherwise than the example, is not known; a rule that raises tells nothing.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fxfuse.capture import windows
from fxfuse.capture.indexing import Sizes, broadcast_all, indexed
from fxfuse.capture.terms import Known, apply, broadcast, constant, product, quotient, term

_SAME = frozenset({
    "alpha_dropout", "argsort", "batch_norm", "bfloat16", "bool", "clone", "contiguous", "cpu", "cuda", "cumprod",
    "cumsum", "detach", "double", "dropout", "dropout1d", "dropout2d", "dropout3d", "empty_like", "fill_", "flip",
    "float", "full_like", "group_norm", "half", "int", "layer_norm", "local_response_norm", "log_softmax", "long",
    "normalize", "ones_like", "rand_like", "randn_like", "requires_grad_", "rms_norm", "roll", "softmax", "softmin",
    "to", "tril", "triu", "type", "type_as", "zero_", "zeros_like",
})  # fmt: skip
_POINTWISE = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "invert": "bitwise_not"}
_POINTWISE |= {"and_": "bitwise_and", "or_": "bitwise_or", "xor": "bitwise_xor", "masked_fill": "where"}
_REDUCTIONS = frozenset({
    "all", "amax", "amin", "any", "argmax", "argmin", "logsumexp", "max", "mean", "median", "min", "prod",
    "std", "sum", "var",
})  # fmt: skip
_OF_SIZE = frozenset({"empty", "ones", "rand", "randn", "zeros"})


def rule_of(target: Any) -> Callable[..., Any] | None:
    """The rule for a function or method; None where there is none."""
    if not is_torchs(target):
        return None
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name in _RULES:
        return _RULES[name]
    if name in _SAME:
        return _same
    if name in _REDUCTIONS:
        return functools.partial(_reduced, pair=name in ("max", "min", "median"))
    if name in _OF_SIZE:
        return _of_size
    if name in {f"new_{kind}" for kind in _OF_SIZE}:
        return lambda input, *sizes, size=None, **_: _of_size(*sizes, size=size)
    plain = name.removesuffix("_") if name not in _POINTWISE else name
    plain = plain[1:] if vars(operator).get(name) is target and name[1:] in vars(operator) else plain
    return broadcast_all if _is_pointwise(_POINTWISE.get(plain, plain)) else None


@functools.cache
def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())


def rule_of_module(cls: type[nn.Module], module: nn.Module) -> Callable[..., Any] | None:
    """The same for a module of torch.nn, whose class is ``cls``."""
    name, attributes = attributes_of(cls)
    if name:
        weight = module._parameters.get("weight")
        of_weight = {} if weight is None else {"weight": tuple(map(constant, weight.shape))}
        return functools.partial(_RULES[name], **of_weight, **{a: module.__dict__[a] for a in attributes})
    is_activation = cls.__module__ == nn.ReLU.__module__ and cls is not nn.MultiheadAttention
    return _same if is_activation or issubclass(cls, _KEEPING) else None


_KEEPING = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
)
_OF_WEIGHT = {nn.Linear: "linear", nn.Embedding: "embedding"}


def attributes_of(cls: type[nn.Module]) -> tuple[str, tuple[str, ...]]:
    """The function that a module's forward calls, "" for none that is known, and what it gives it of its own."""
    if cls in _OF_WEIGHT:
        return _OF_WEIGHT[cls], ()
    return ("glu", ("dim",)) if cls is nn.GLU else windows.ATTRIBUTES.get(cls, ("", ()))


def is_torchs(target: Any) -> bool:
    """Whether a target of a graph is a method, or a function of torch's, or arithmetic."""
    module = str(getattr(target, "__module__", None) or "torch")
    return isinstance(target, str) or module.partition(".")[0] in ("torch", "_operator", "builtins", "math")


def _same(input: Sizes, *_: Any, **__: Any) -> Sizes:
    return input


def _flat(sizes: tuple[Any, ...]) -> list[Any]:
    """``view(2, 3)`` and ``view((2, 3))`` are the same call."""
    return list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else list(sizes)


def _reduced(input: Sizes, dim: Any = None, keepdim: bool = False, *, pair: bool, axis: Any = None, **_: Any) -> Any:
    dim = axis if dim is None else dim
    if pair and isinstance(dim, tuple):  # another tensor: max(a, b)
        return broadcast_all(input, dim)
    dims = range(len(input)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d % len(input) for d in dims}
    sizes = tuple(constant(1) if i in gone else s for i, s in enumerate(input) if keepdim or i not in gone)
    return [sizes, sizes] if pair and dim is not None else sizes


def _topk(input: Sizes, k: Any, dim: int = -1, *_: Any, **__: Any) -> list[Sizes]:
    return [_replaced(input, dim, term(k))] * 2


def _sorted(input: Sizes, *_: Any, **__: Any) -> list[Sizes]:
    return [input, input]


def _of_size(*sizes: Any, size: Any = None, **_: Any) -> Sizes:
    return tuple(map(term, _flat(sizes) if size is None else size))


def _full(size: Any, *_: Any, **__: Any) -> Sizes:
    return tuple(map(term, size))


def _new_full(input: Sizes, size: Any, *_: Any, **__: Any) -> Sizes:
    return tuple(map(term, size))


def _arange(start: Any, end: Any = None, step: Any = 1, **_: Any) -> Sizes:
    if step != 1:
        return (None,)
    return (term(start),) if end is None else (apply(operator.sub, term(end), term(start)),)


def _reshape(input: Sizes, *shape: Any, **named: Any) -> Sizes:
    sizes = [s if s == -1 else term(s) for s in _flat(shape or (named["shape"],))]
    if -1 in sizes:
        sizes[sizes.index(-1)] = quotient(product(input), product(s for s in sizes if s != -1))
    return tuple(sizes)


def _flatten(input: Sizes, start_dim: int = 0, end_dim: int = -1) -> Sizes:
    first, last = start_dim % len(input), end_dim % len(input)
    return (*input[:first], product(input[first : last + 1]), *input[last + 1 :])


def _unflatten(input: Sizes, dim: int, sizes: Any) -> Sizes:
    dim %= len(input)
    return (*input[:dim], *_reshape((input[dim],), *sizes), *input[dim + 1 :])


def _expand(input: Sizes, *sizes: Any) -> Sizes:
    wanted = _flat(sizes)
    padded = (None,) * (len(wanted) - len(input)) + input
    return tuple(old if new == -1 else term(new) for old, new in zip(padded, wanted, strict=True))


def _repeat(input: Sizes, *repeats: Any) -> Sizes:
    times = _flat(repeats)
    padded = (constant(1),) * (len(times) - len(input)) + input
    return tuple(product((old, term(n))) for old, n in zip(padded, times, strict=True))


def _repeat_interleave(input: Sizes, repeats: Any, dim: int) -> Sizes:
    return _replaced(input, dim, product((input[dim], None if isinstance(repeats, tuple) else term(repeats))))


def _transpose(input: Sizes, dim0: int, dim1: int) -> Sizes:
    sizes = list(input)
    sizes[dim0], sizes[dim1] = sizes[dim1], sizes[dim0]
    return tuple(sizes)


def _permute(input: Sizes, *dims: Any, **named: Any) -> Sizes:
    return tuple(input[d] for d in _flat(dims or (named["dims"],)))


def _t(input: Sizes) -> Sizes:
    return input[::-1]


def _getattr(input: Sizes, name: str) -> Any:
    return {"T": input[::-1], "mT": (*input[:-2], *input[:-3:-1])}.get(name)


def _unsqueeze(input: Sizes, dim: int) -> Sizes:
    dim %= len(input) + 1
    return (*input[:dim], constant(1), *input[dim:])


def _squeeze(input: Sizes, dim: int) -> Sizes:
    # That it is one is settled: what may be another size has no rank.
    dim %= len(input)
    return (*input[:dim], *input[dim + 1 :])


def _replaced(input: Sizes, dim: int, size: Known) -> Sizes:
    dim %= len(input)
    return (*input[:dim], size, *input[dim + 1 :])


def _split(tensor: Sizes, split_size_or_sections: Any, dim: int = 0) -> Any:
    if isinstance(split_size_or_sections, (list, tuple)):
        return [_replaced(tensor, dim, term(size)) for size in split_size_or_sections]
    whole = tensor[dim]
    if whole is None or not whole.is_constant or not isinstance(split_size_or_sections, int):
        return _pieces(tensor, dim)
    each = split_size_or_sections
    return [_replaced(tensor, dim, constant(min(each, whole.value - i))) for i in range(0, whole.value, each)]


def _chunk(input: Sizes, chunks: int, dim: int = 0) -> Any:
    whole = input[dim]
    if whole is None or not whole.is_constant:
        return _pieces(input, dim)
    return _split(input, -(-whole.value // chunks), dim)


def _unbind(input: Sizes, dim: int = 0) -> Any:
    return _Pieces(_squeeze(input, dim))


class _Pieces:
    """As many as there may be, all alike as far as is known."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes

    def __getitem__(self, index: int) -> Sizes:
        return self.sizes


def _pieces(input: Sizes, dim: int) -> _Pieces:
    return _Pieces(_replaced(input, dim, None))


def _getitem(input: Any, index: Any) -> Any:
    return input[index] if isinstance(input, (list, _Pieces)) else indexed(input, index)


def _glu(input: Sizes, dim: int = -1) -> Sizes:
    return _replaced(input, dim, apply(operator.floordiv, input[dim], constant(2)))


def _narrow(input: Sizes, dim: int, start: Any, length: Any) -> Sizes:
    return _replaced(input, dim, term(length))


def _unfold(input: Sizes, dimension: int, size: int, step: int) -> Sizes:
    return (*_replaced(input, dimension, windows.count(input[dimension], size, step, 0, 1)), constant(size))


def _select(input: Sizes, dim: int, index: Any) -> Sizes:
    return _squeeze(input, dim)


def _gather(input: Sizes, dim: int, index: Sizes, **_: Any) -> Sizes:
    return index


def _stack(tensors: Any, dim: int = 0) -> Sizes:
    dim %= len(tensors[0]) + 1
    return (*tensors[0][:dim], constant(len(tensors)), *tensors[0][dim:])


def _cat(tensors: Any, dim: int = 0) -> Sizes:
    return _replaced(
        tensors[0], dim, functools.reduce(functools.partial(apply, operator.add), (t[dim] for t in tensors))
    )


def _linear(input: Sizes, weight: Sizes, bias: Any = None) -> Sizes:
    return (*input[:-1], weight[0])


def _matmul(input: Sizes, other: Sizes) -> Sizes:
    if len(input) < 2 or len(other) < 2:
        raise TypeError("a vector")
    return (*broadcast_all(input[:-2], other[:-2]), input[-2], other[-1])


def _baddbmm(input: Sizes, batch1: Sizes, batch2: Sizes, **_: Any) -> Sizes:
    return _matmul(batch1, batch2)


def _addmm(input: Sizes, mat1: Sizes, mat2: Sizes, **_: Any) -> Sizes:
    return _matmul(mat1, mat2)


def _einsum(equation: str, *operands: Any) -> Sizes:
    given, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        raise TypeError("what it returns is left to be worked out")
    size: dict[str, Known] = {}
    most = ""
    for letters, sizes in zip(given.split(","), operands, strict=True):
        # Digits name the dimensions that dots stand for, the last one 0.
        dots = "9876543210"[10 - (len(sizes) - len(letters.replace("...", ""))) :]
        most = max(most, dots if "..." in letters else "", key=len)
        for letter, s in zip(letters.replace("...", dots), sizes, strict=True):
            size[letter] = broadcast(size.get(letter, constant(1)), s)
    return tuple(size[letter] for letter in result.replace("...", most))


def _attention(query: Sizes, key: Sizes, value: Sizes, *_: Any, **__: Any) -> Sizes:
    return (*query[:-1], value[-1])


def _embedding(input: Sizes, weight: Sizes, *_: Any, **__: Any) -> Sizes:
    return (*input, weight[-1])


def _pad(input: Sizes, pad: Iterable[Any], *_: Any, **__: Any) -> Sizes:
    sizes, amounts = list(input), list(map(term, pad))
    for i in range(len(amounts) // 2):
        both = apply(operator.add, amounts[2 * i], amounts[2 * i + 1])
        sizes[-1 - i] = apply(operator.add, sizes[-1 - i], both)
    return tuple(sizes)


_RULES: dict[str, Callable[..., Any]] = windows.RULES | {
    "addmm": _addmm,
    "arange": _arange,
    "baddbmm": _baddbmm,
    "bmm": _matmul,
    "broadcast_to": _expand,
    "cat": _cat,
    "chunk": _chunk,
    "concat": _cat,
    "einsum": _einsum,
    "embedding": _embedding,
    "expand": _expand,
    "flatten": _flatten,
    "full": _full,
    "gather": _gather,
    "getattr": _getattr,
    "getitem": _getitem,
    "glu": _glu,
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "narrow": _narrow,
    "new_full": _new_full,
    "pad": _pad,
    "permute": _permute,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "reshape": _reshape,
    "scaled_dot_product_attention": _attention,
    "select": _select,
    "sort": _sorted,
    "split": _split,
    "split_with_sizes": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "swapaxes": _transpose,
    "swapdims": _transpose,
    "t": _t,
    "topk": _topk,
    "transpose": _transpose,
    "unbind": _unbind,
    "unflatten": _unflatten,
    "unfold": _unfold,
    "unsqueeze": _unsqueeze,
    "view": _reshape,
}
"""Name of a function or method -> its rule."""
