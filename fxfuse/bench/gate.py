"""No wrong answer is timed: every variant's output is held against a float64 run of the whole target."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from fxfuse import numerics
from fxfuse.bench import peers
from fxfuse.bench.peers import LeftOut, Variant, one_line
from fxfuse.bench.progress import bar
from fxfuse.bench.targets import BadTarget, Target

Make = Callable[[Target], peers.Run]


class Gate:
    """The acceptance rule of ``fxfuse.numerics`` for one target, or half of it where the whole cannot be had."""

    def __init__(self, target: Target, eager: Any) -> None:
        """``eager``: the plain model's output on the example call.

        Raises BadTarget where there is no tensor in it, or no float64 run that it could be held against.
        """
        self._target, self._eager = target, _opened(eager)
        tensors = list(_tensors(eager, set()))
        if not tensors:
            raise BadTarget(f"{target.name}: the model returned no tensor, so no two answers can be compared")
        if any(t.is_meta for t in tensors):
            raise BadTarget(f"{target.name}: tensors on the meta device hold no values, so no answers can be compared")
        self.weaker = ""
        """Why only the norm of the error is judged; empty where every element is."""
        args, kwargs = target.example()
        try:
            with _export_is_silent():
                graph_module = torch.export.export(target.model, args, kwargs, strict=False).module()
            self._reference, self._magnitude = numerics.reference(graph_module, args, kwargs)
        except Exception as error:
            # Without a graph of the whole, the scale of single elements' errors is not known.
            self.weaker = f"there is no graph of the whole: {one_line(error)}"
            self._reference = _opened(_in_float64(target))
            self._magnitude = tree_map_only(Tensor, torch.abs, self._reference)

    def wrong(self, output: Any) -> str:
        """What is wrong with ``output`` and by how much; empty if nothing is.

        Raises BadTarget where the plain model, called again, would be wrong as well.
        """
        reason = self._judged(output)
        if reason:
            again = peers.build("eager", self._target)
            if isinstance(again, Variant) and self._judged(again.output):
                raise BadTarget(
                    f"{self._target.name}: the model answers the same call differently each time, so no two answers "
                    "can be compared: does it draw random numbers, or change its own state?"
                )
        return reason

    def _judged(self, output: Any) -> str:
        elements = not self.weaker
        return numerics.judge(_opened(output), self._eager, self._reference, self._magnitude, elements=elements).reason


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
    """The same for variants that were built for another example: ``first_call_s`` is of their first call at this one.

    Floors are for one size, and built anew.
    """
    makes: dict[str, Make] = {}
    for name, variant in built.items():
        makes[name] = peers.PEERS[name] if name in peers.FLOORS else _made(variant)
    return _admitted(makes, target, progress)


def _made(variant: Variant) -> Make:
    return lambda _target: variant.run


def _admitted(makes: Mapping[str, Make], target: Target, progress: Callable[[str], object]) -> Admitted:
    admitted = Admitted()
    gate: Gate | None = None
    for done, (name, make) in enumerate(makes.items()):
        progress(f"{bar(done, len(makes))} preparing {name}")
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
    try:
        wide = target.in_float64()
        args, kwargs = wide.example()
        with torch.no_grad():
            return wide.model(*args, **kwargs)
    except Exception as error:
        raise BadTarget(
            f"{target.name}: in float64, which every answer is held against, the model raises {one_line(error)}"
        ) from error


def _opened(output: Any) -> Any:
    """With the tensors of an object in its place where it is equal to itself only: of a cache of keys and values."""

    def tensors(leaf: Any) -> Any:
        own = hasattr(leaf, "__dict__") and type(leaf).__eq__ is object.__eq__ and not callable(leaf)
        return [type(leaf).__name__, *_tensors(leaf, set())] if own else leaf

    return tree_map(tensors, output)


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor in ``value``, those in objects that pytree takes for leaves too."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and id(leaf) not in seen:
            seen.add(id(leaf))
            yield from _tensors(vars(leaf), seen)


@contextmanager
def _export_is_silent() -> Iterator[None]:
    """torch.export logs and prints the whole graph of a model that it cannot trace; the exception says enough."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.ERROR))
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
