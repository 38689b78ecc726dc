"""No wrong answer is timed: every variant's output is held against a float64 run of the whole target."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fxfuse import numerics
from fxfuse.bench import peers
from fxfuse.bench.peers import LeftOut, Variant, one_line
from fxfuse.bench.targets import BadTarget, Target

Make = Callable[[Target], peers.Run]


class Gate:
    """The acceptance rule of ``fxfuse.numerics`` for one target, or half of it where the whole cannot be had."""

    def __init__(self, target: Target, eager: Any) -> None:
        """``eager``: the plain model's output on the example call. Raises BadTarget where there is no tensor in it."""
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(eager)):
            raise BadTarget(f"{target.name}: the model returned no tensor, so no two answers can be compared")
        self._eager = eager
        self.weaker = ""
        """Why only the norm of the error is judged; empty where every element is."""
        args, kwargs = target.example()
        try:
            graph_module = torch.export.export(target.model, args, kwargs, strict=False).module()
            self._reference, self._magnitude = numerics.reference(graph_module, args, kwargs)
        except Exception as error:
            # Without a graph of the whole, the scale of single elements' errors is not known.
            self.weaker = one_line(error)
            self._reference = _in_float64(target)
            self._magnitude = tree_map_only(Tensor, torch.abs, self._reference)

    def wrong(self, output: Any) -> str:
        """What is wrong with ``output`` and by how much; empty if nothing is."""
        verdict = numerics.judge(output, self._eager, self._reference, self._magnitude)
        only_elements = verdict.norm_used <= 1 < verdict.element_used
        return "" if self.weaker and only_elements else verdict.reason


@dataclass
class Admitted:
    """The variants of a target that answer rightly, and why others are missing."""

    variants: dict[str, Variant] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    weaker: str = ""
    """As ``Gate.weaker``."""


def admit(names: Collection[str], target: Target, progress: Callable[[str], object]) -> Admitted:
    """Build those of ``peers.PEERS`` that are in ``names``, eager among them, and hold their answers against eager's.

    Raises BadTarget without example inputs, and TargetRaised where the model itself raises.
    """
    # What torch.compile learned about the sizes of the target before would change the code that it makes for this one.
    torch.compiler.reset()
    return _admitted({name: make for name, make in peers.PEERS.items() if name in names}, target, progress)


def admit_again(built: Mapping[str, Variant], target: Target, progress: Callable[[str], object]) -> Admitted:
    """The same for variants that were built for another example: ``setup_s`` is what their first call takes here.

    Floors are for one size, and built anew.
    """
    makes: dict[str, Make] = {}
    for name, variant in built.items():
        makes[name] = peers.PEERS[name] if name in peers.FLOORS else lambda _target, run=variant.run: run
    return _admitted(makes, target, progress)


def _admitted(makes: Mapping[str, Make], target: Target, progress: Callable[[str], object]) -> Admitted:
    admitted = Admitted()
    gate: Gate | None = None
    for name, make in makes.items():
        progress(f"preparing {name}")
        variant = peers.build(name, target, make)
        if isinstance(variant, Variant):
            gate = gate or Gate(target, eager=variant.output)
            wrong = "" if name in peers.FLOORS else gate.wrong(variant.output)
            variant = LeftOut(name, f"wrong answer: {wrong}") if wrong else variant
        if isinstance(variant, LeftOut):
            admitted.left_out.append(variant)
        else:
            admitted.variants[name] = variant
    admitted.weaker = gate.weaker if gate else ""
    return admitted


def _in_float64(target: Target) -> Any:
    args, kwargs = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, target.example())
    with torch.no_grad():
        return copy.deepcopy(target.model).double()(*args, **kwargs)
