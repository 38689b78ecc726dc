"""What a caller may choose. One frozen value, so that it can be compared, kept and shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Options:
    """How ``optimize`` and ``rewrite`` go about it."""

    inplace: bool = False
    """Rewrite the given modules themselves instead of a copy of the module tree that shares their parameters."""

    numerics: Literal["fused", "exact"] = "fused"
    """``"exact"`` allows only rewrites that call the same kernels on the same operands."""

    exclude: frozenset[str] = field(default_factory=frozenset)
    """Names left alone: module paths (``"decoder.0"``), class names (``"LlamaMLP"``) or passes (``"gated_linear"``)."""

    strict: frozenset[str] = field(default_factory=frozenset)
    """``{"fuse"}``: raise NothingFused where no candidate was fused."""

    check: bool = True
    """With example inputs, compare each region once with its original forward and take out one that differs."""

    def __post_init__(self) -> None:
        if self.numerics not in ("fused", "exact"):
            raise ValueError(f"numerics is {self.numerics!r}; it takes 'fused' or 'exact'")
        for name in ("exclude", "strict"):
            value = getattr(self, name)
            object.__setattr__(self, name, frozenset([value] if isinstance(value, str) else value))
        unknown = self.strict - {"fuse"}
        if unknown:
            raise ValueError(f"strict has {sorted(unknown)}; it takes 'fuse'")
