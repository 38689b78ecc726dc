"""The traced parts of an optimized model, each before and after: its regions, and what was traced but not installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fxfuse.bench.predict import Leaf
from fxfuse.capture.arguments import Arguments
from fxfuse.capture.assumed import Question
from fxfuse.capture.installed import Installed
from fxfuse.capture.record import trial_copy
from fxfuse.capture.region import graph_module
from fxfuse.capture.tree import ROOT, hooked
from fxfuse.capture.walk import Walk, join
from fxfuse.facts import Fact


@dataclass(frozen=True)
class Part:
    """One traced module."""

    path: str
    """"" is the model itself."""
    before: fx.GraphModule
    after: fx.GraphModule
    """As ``before`` where nothing is gained in it, so that it runs as it did."""
    facts: Mapping[str, Any]
    """Name of an argument -> what it was in the example run, with the ``Fact`` of each tensor in its place."""
    leaves: dict[str, Leaf] = field(default_factory=dict)
    """Target of the call of somebody's own module in the graphs -> the module."""
    questions: Sequence[Question] = ()
    """What is asked of a call's values, in the forward before and in the checks after."""


def parts(model: nn.Module, optimized: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Part]:
    """The parts of ``model`` in what ``optimize`` returned for it, in the order in which they were traced.

    ``model`` is called once with ``args`` and ``kwargs``, to see with what it calls its parts.
    """
    installed: Installed = optimized.__dict__[ROOT]
    regions = {region.path: region for region in installed.regions}
    paths = list(dict.fromkeys(info.path for info in installed.report.regions))
    calls = _calls(model, paths, args, kwargs)
    found = []
    for path in paths:
        if path not in calls:
            continue
        if path in regions:
            region = regions[path]
            graphs = region.graph_module(original=True), region.graph_module()
            facts = _facts(region.arguments, *calls[path])
            found.append(Part(path, *graphs, facts, questions=region.questions))
        else:
            found += _left_alone(path, optimized, installed, calls[path])
    for part in found:
        part.leaves.update(_leaves(part, model, [other.path for other in found]))
    return found


def _leaves(part: Part, model: nn.Module, paths: Sequence[str]) -> Iterator[tuple[str, Leaf]]:
    for target in dict.fromkeys(str(node.target) for node in part.before.graph.nodes if node.op == "call_module"):
        path = join(part.path, target)
        module = model.get_submodule(path)
        if not type(module).__module__.startswith("torch.nn") and not hooked(module):
            apart = tuple(other.removeprefix(f"{path}.") for other in paths if other.startswith(f"{path}."))
            yield target, Leaf(trial_copy(module), apart)


Call = tuple[tuple[Any, ...], dict[str, Any]]


def _calls(model: nn.Module, paths: Iterable[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Call]:
    """Path -> its first call, with the ``Fact`` of each tensor in its place."""
    calls: dict[str, Call] = {}

    def note(path: str) -> Callable[..., None]:
        def noted(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            calls.setdefault(path, tree_map_only(Tensor, Fact.of, (given, named)))

        return noted

    hooks = [model.get_submodule(path).register_forward_pre_hook(note(path), with_kwargs=True) for path in paths]
    try:
        with torch.inference_mode():
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _facts(arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What is known of the arguments of a call, by the names of their placeholders: not of caches and the like."""
    given = arguments.values(args, kwargs)
    plain = (Fact, bool, int, float, str, torch.dtype, torch.device)
    return {name: value for name, value in given.items() if all(isinstance(leaf, plain) for leaf in tree_leaves(value))}


def _left_alone(path: str, optimized: nn.Module, installed: Installed, call: Call) -> list[Part]:
    """A part that has no region is traced again; nothing if that is refused now."""
    walk = Walk(path, optimized.get_submodule(path), installed.options, installed.recorded)
    for trace in walk.traces:
        if trace.path == path:
            gm = graph_module(trace.graph, trace.module, trace.tracer.constants)
            return [Part(path, gm, gm, _facts(trace.arguments, *call))]
    return []
