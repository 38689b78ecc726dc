"""Copies of weights in oneDNN's own layout: no reordering in each call, for as many bytes again.

A weight can change in ways that neither its address nor its version counter shows, so each use compares a sample of 64
of its numbers with those that were copied. That sees every update of the whole weight; one of single elements through
``.data`` or numpy it may miss, which is why packing is asked for, and why ``fxfuse.refresh`` exists.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from fxfuse import choose
from fxfuse.ops import onednn

DEFAULT_BYTES = 2**30
"""What the copies of a model may take where ``Options(pack=True)`` names no number."""
_SAMPLE = 64
_CHANGES = 8
"""So many changes of a weight, and it is no longer packed: packing takes as long as tens of small calls."""
_ROWS = 16
"""For which a weight is packed; it then serves 1 and 512 rows as well as one packed for them."""


class Copy:
    """A weight's packed copy, and what shows that the weight is still the one that was packed."""

    __slots__ = ("__weakref__", "dtype", "nbytes", "packed", "probe", "sample", "source", "version")

    def __init__(self, weight: Tensor):
        """``weight``: [N, K] and dense. May raise one of ``onednn.REFUSALS``."""
        with torch.no_grad():
            # An alias keeps the address from being given to another weight, and shares the version counter.
            self.source = weight.detach()
            self.dtype = weight.dtype
            self.version = None if self.source.is_inference() else self.source._version
            self.probe = self.source.as_strided((_SAMPLE,), (weight.numel() // _SAMPLE,))
            # Before the copy, so that a change in between shows.
            self.sample = self.probe.clone()
            self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(self.source, _ROWS)
        self.nbytes: int = torch.ops.mkldnn._nbytes(self.packed)

    def serves(self, weight: Tensor) -> bool:
        return (
            weight.dtype is self.dtype
            and weight.is_set_to(self.source)
            and (self.version is None or self.source._version == self.version)
            and torch.equal(self.probe, self.sample)
        )


class Store:
    """The packed copies of one optimized model: one a weight, within ``limit`` bytes. Copied, it is empty."""

    def __init__(self, limit: int):
        self.limit = limit
        self._lock = threading.RLock()
        # Sites hold the copies; a copy that none holds any more is gone.
        self._copies: weakref.WeakSet[Copy] = weakref.WeakSet()

    @property
    def count(self) -> int:
        with self._lock:
            return len(self._copies)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(copy.nbytes for copy in self._copies)

    def copy_of(self, weight: Tensor) -> Copy | None:
        """The packed copy of a weight that ``onednn.can`` let in; None where there is no room, or nothing to gain."""
        size = weight.numel() * weight.element_size()
        with self._lock:
            for copy in self._copies:
                if copy.serves(weight):
                    return copy
            if weight.numel() < _SAMPLE or self.nbytes + size > self.limit:
                return None
            try:
                copy = Copy(weight)
            except onednn.REFUSALS:
                return None
            # Sizes are padded, to more than the weight's own where that is small.
            if self.nbytes + copy.nbytes > self.limit:
                return None
            self._copies.add(copy)
            return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        new = memo[id(self)] = Store(self.limit)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.limit,)


class Weight(onednn.Weight):
    """What is known of the weight at one place of a region that may pack it."""

    __slots__ = ("_buckets", "_changes", "_copy", "_refused", "_store", "_whole")
    choices = (*onednn.Weight.choices, choose.ONEDNN_PACKED)

    def __init__(self, store: Store, *args: Any, whole: Weight | None = None, **kwargs: Any):
        """``whole``: the weight that this is a part of, whose choice holds for it. The rest as ``onednn.Weight``."""
        super().__init__(*args, **kwargs)
        self._store, self._whole = store, whole
        self._copy: Copy | None = None
        self._changes, self._refused = 0, False
        self._buckets: frozenset[int] = frozenset()
        """Of row counts, by bit_length(), for which the copy is wanted."""

    def allowed(self) -> tuple[str, ...]:
        return onednn.Weight.choices if self._refused else self.choices

    def _implementation(self, x: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> str:
        bucket = rows.bit_length()
        if self._whole is not None:
            # It asks where oneDNN was chosen for the whole.
            name = choose.ONEDNN_PACKED if bucket in self._whole._buckets else choose.ONEDNN
        else:
            name = super()._implementation(x, weight, bias, rows)
        wanted = name == choose.ONEDNN_PACKED and not self._refused
        self._buckets = self._buckets | {bucket} if wanted else self._buckets - {bucket}
        return name

    def expected(self, x: Tensor, weight: Tensor, rows: int) -> str:
        name = super().expected(x, weight, rows)
        # For one fp32 row oneDNN has a kernel that reads the weight as it lies, as fast as from a copy or faster.
        row_kernel = rows == 1 and x.dtype is torch.float32 and weight.is_contiguous()
        return name if name == choose.PLAIN or row_kernel or self._refused else choose.ONEDNN_PACKED

    def operand(self, x: Tensor, weight: Tensor) -> Tensor:
        """What oneDNN is to be given as the weight, where ``way`` says that it is to be given anything."""
        if (x.numel() // weight.shape[1]).bit_length() not in self._buckets:
            return weight
        copy = self._copy
        return copy.packed if copy is not None and copy.serves(weight) else self._packed(weight)

    def _packed(self, weight: Tensor) -> Tensor:
        if self._copy is not None:
            self._changes += 1
            self._copy = None
        copy = self._store.copy_of(weight) if self._changes < _CHANGES else None
        if copy is None:
            # What is best without a copy is asked anew, from the next call on.
            self._refused, self._buckets, self.known = True, frozenset(), (None, None, 1, {})
            return weight
        self._copy = copy
        return copy.packed
