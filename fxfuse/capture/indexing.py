"""The sizes of what indexing and broadcasting give."""

from __future__ import annotations

from typing import Any

from fxfuse.capture.terms import Known, apply, broadcast, constant, slice_length, term

Sizes = tuple[Known, ...]


def broadcast_all(*operands: Any, **named: Any) -> Sizes:
    """The sizes that tensors broadcast to; what else is among the operands counts for nothing."""
    result: Sizes = ()
    for sizes in (o for o in (*operands, *named.values()) if isinstance(o, tuple)):
        rank = max(len(result), len(sizes))
        one = constant(1)
        padded = [(one,) * (rank - len(s)) + s for s in (result, sizes)]
        result = tuple(map(broadcast, *padded))
    return result


def indexed(input: Sizes, index: Any) -> Sizes:
    """The sizes of ``x[index]``; ``input``: those of x."""
    keys = list(index) if isinstance(index, tuple) and not isinstance(index, Indices) else [index]
    if Ellipsis in keys:
        place = keys.index(Ellipsis)
        taken = sum(key is not None and key is not Ellipsis for key in keys)
        keys[place : place + 1] = [slice(None)] * (len(input) - taken)
    if any(isinstance(key, (bool, list)) for key in keys):
        raise TypeError("a mask, or indices written out")
    sizes: list[Known] = []
    rest = list(input)
    for key in keys:
        if key is None:
            sizes.append(constant(1))
        elif isinstance(key, slice):
            sizes.append(_sliced(rest.pop(0), key))
        else:
            rest.pop(0)
    return (*_with_indices(keys, sizes), *rest)


class Indices(tuple[Known, ...]):
    """Of an index that is a tensor, its sizes."""


def _with_indices(keys: list[Any], sizes: list[Known]) -> Sizes:
    """What indices give stands where they stood, or in front where something stood between them."""
    if not any(isinstance(key, Indices) for key in keys):
        return tuple(sizes)
    # A number takes its dimension away before.
    keys = [key for key in keys if key is None or isinstance(key, (slice, Indices))]
    places = [i for i, key in enumerate(keys) if isinstance(key, Indices)]
    found = broadcast_all(*(keys[i] for i in places))
    first = places[0] if places[-1] - places[0] < len(places) else 0
    return (*sizes[:first], *found, *sizes[first:])


def _sliced(size: Known, key: slice) -> Known:
    if (key.start or None, key.stop, key.step or 1) == (None, None, 1):
        return size
    return apply(slice_length, size, *map(_limit, (key.start, key.stop, key.step)))


def _limit(value: Any) -> Known:
    return constant(None) if value is None else term(value)
