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
    """``{"fuse"}``: raise NothingFused where no candidate was fused. ``{"run"}``: raise FellBack at a call that breaks
    an assumption of its region; plain calls (gradients, autocast, training, a mode) go on."""

    check: bool = True
    """With example inputs, compare each region once with its original forward and take out one that differs."""

    tune: Literal["example", "off"] = "example"
    """``"example"``: with example inputs, measure the implementations of each fused operator at its size there, once
    for each size, and keep the choice (``fxfuse cache``). ``"off"``: nothing is measured; earlier choices hold."""

    pack: bool | int = False
    """Let weights be copied into the layout of the faster implementation: the bytes that the copies may take together,
    or True for 1 GiB. For weights that stay as they are; a change of a whole weight is noticed at the next call."""

    cuda_graphs: bool = False
    """On CUDA devices, capture the calls of each region as CUDA graphs, one for each kind of call (shapes, strides and
    dtypes of its tensors, its other arguments), eight at most: the host launches one thing a call. Arguments are copied
    in and results out; a graph keeps the memory of what lies between. Where a call cannot be captured it runs as it
    would, and the report says why."""

    def explained(self) -> list[str]:
        """What those options do that a report should mention: one line each."""
        lines = []
        if self.numerics == "exact":
            lines.append("numerics='exact': only rewrites that call the same kernels on the same operands")
        if self.exclude:
            lines.append(f"exclude: {', '.join(sorted(self.exclude))} left alone (module paths, classes, passes)")
        if "fuse" in self.strict:
            lines.append("strict={'fuse'}: nothing fused would have been an error")
        if "run" in self.strict:
            lines.append("strict={'run'}: a call that breaks an assumption of its region raises; plain calls go on")
        return lines

    def __post_init__(self) -> None:
        if self.numerics not in ("fused", "exact"):
            raise ValueError(f"numerics is {self.numerics!r}; it takes 'fused' or 'exact'")
        if self.tune not in ("example", "off"):
            raise ValueError(f"tune is {self.tune!r}; it takes 'example' or 'off'")
        if not isinstance(self.pack, int) or self.pack < 0:
            raise ValueError(f"pack is {self.pack!r}; it takes True, False or a number of bytes")
        for name in ("exclude", "strict"):
            value = getattr(self, name)
            object.__setattr__(self, name, frozenset([value] if isinstance(value, str) else value))
        unknown = self.strict - {"fuse", "run"}
        if unknown:
            raise ValueError(f"strict has {sorted(unknown)}; it takes 'fuse' and 'run'")
