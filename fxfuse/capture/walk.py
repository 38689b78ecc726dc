"""The largest subtrees of a model that can be traced."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import fx, nn

from fxfuse.capture.alike import alike, same_call
from fxfuse.capture.arguments import Arguments, Recorded, plan
from fxfuse.capture.tracer import ASKING, Tracer, trace_module
from fxfuse.capture.tree import copy_tree, hooked, is_opaque
from fxfuse.capture.value import Untraceable
from fxfuse.options import Options
from fxfuse.report import Uncaptured

SERVED = (nn.MultiheadAttention,)
"""Run in inference as one operator of torch, ``_native_multi_head_attention``."""
KINDS = 4
"""Of how many kinds the layers of one class may be, one after the other, and still be known again."""


@dataclass
class Trace:
    """A module whose forward has a graph."""

    path: str
    module: nn.Module
    arguments: Arguments
    tracer: Tracer
    """Equal layers have one."""
    recorded: Recorded | None
    calls: set[str]
    """Paths of the modules that the trace was told to keep as calls."""

    def is_that_of(self, module: nn.Module, recorded: Recorded | None) -> bool:
        """Whether another module, called as ``recorded``, has the same trace."""
        assumed = self.tracer.assumed
        # What is asked of one layer's mask was answered by it.
        if self.tracer.constants or assumed.questions or not alike(self.module, module, assumed, self.tracer.inlined):
            return False
        if self.recorded is None or recorded is None:
            return self.recorded is recorded
        return same_call((self.recorded.args, self.recorded.kwargs), (recorded.args, recorded.kwargs))

    @property
    def graph(self) -> fx.Graph:
        return self.tracer.graph


class Walk:
    """Traces ``model`` from the top; where a module has no graph, its children are tried, then it again around them.

    ``wrong`` are paths that have shown before that their graph is not faithful, with the reason. ``leaves`` are paths
    of modules that a trace around them keeps as calls. Without ``by_value`` nothing is decided by values of arguments.
    """

    def __init__(
        self,
        path: str,
        model: nn.Module,
        options: Options,
        recorded: Mapping[str, Recorded] | None,
        wrong: Mapping[str, str] | None = None,
        leaves: Collection[str] = (),
        by_value: bool = True,
    ):
        self.by_value = by_value
        self.options, self.recorded, self.wrong, self.leaves = options, recorded, wrong or {}, leaves
        self.traces: list[Trace] = []
        self.uncaptured: list[Uncaptured] = []
        self.seen: dict[int, bool] = {}
        self.known: defaultdict[type, list[Trace]] = defaultdict(list)
        """The last traces of modules of a class: a layer that is like one before has its trace."""
        self.visit(path, model)

    def visit(self, path: str, module: nn.Module) -> set[str]:
        """The paths at or below ``path`` that a trace around them must keep as calls; none where all of it has a graph.

        Shared modules are taken once, where they are met first.
        """
        if id(module) not in self.seen:
            self.seen[id(module)] = True  # a module that contains itself
            calls = self.capture(path, module)
            self.seen[id(module)] = not calls
            return calls
        return set() if self.seen[id(module)] else {path}

    def capture(self, path: str, module: nn.Module) -> set[str]:
        if not _has_forward(module):
            if not path and not has_projection(module):
                self.uncaptured.append(Uncaptured(path, type(module).__name__, "it has no forward"))
            return self.below(path, module)
        try:
            trace = self.trace(path, module, set())
        except Untraceable as refusal:
            reason = str(refusal)
        else:
            # Without a matrix there is nothing to fuse, unless matrices are arguments of the model itself.
            if has_projection(module) or not path:
                self.add(trace)
            return set()
        if path and not has_projection(module):
            return {path}
        if not (is_opaque(module) or type(module) in SERVED or self.is_excluded(path, module)):
            inner = len(self.traces)
            calls = self.below(path, module)
            # Then with every part that is captured by itself as a call: what it returns decides nothing.
            parts = {t.path for t in self.traces[inner:] if _is_composite(t.module)}
            for kept in dict.fromkeys((frozenset(calls), frozenset(calls | parts))):
                if not kept:
                    continue
                try:
                    trace = self.trace(path, module, {_relative(call, path) for call in kept})
                except Untraceable as refusal:
                    reason = reason if kept > calls else str(refusal)
                else:
                    # What was captured beside the calls is part of the larger region; what lies inside them stays.
                    self.traces[inner:] = [t for t in self.traces[inner:] if _within(t.path, kept)]
                    self.add(trace)
                    return calls
        self.uncaptured.append(Uncaptured(path, type(module).__name__, reason))
        return {path}

    def below(self, path: str, module: nn.Module) -> set[str]:
        return set().union(*(self.visit(join(path, name), child) for name, child in module.named_children()))

    def add(self, trace: Trace) -> None:
        """Keep a trace; modules that it only calls may have regions of their own inside."""
        self.traces.append(trace)
        for target in dict.fromkeys(str(n.target) for n in trace.graph.nodes if n.op == "call_module"):
            module = trace.module.get_submodule(target)
            if has_projection(module) and (_is_composite(module) or hooked(module) or "forward" in module.__dict__):
                self.visit(join(trace.path, target), module)

    def trace(self, path: str, module: nn.Module, leaves: set[str]) -> Trace:
        self.refuse(path, module)
        recorded = self.recorded.get(path) if self.recorded is not None else None
        if self.recorded is not None and recorded is None:
            raise Untraceable("the example inputs did not reach it")
        calls = leaves | self.excluded(path, module)
        known = self.known[type(module)]
        like = next((t for t in known if t.calls == calls and t.is_that_of(module, recorded)), None)
        if like is not None:
            return replace(like, path=path, module=module)
        try:
            arguments, tracer = _traced(module, recorded, calls, by_value=self.by_value)
        except Untraceable:
            if recorded is None or not self.by_value or not ASKING & sys.modules.keys():
                raise
            # Where it hears that it is traced, the forward may do without what it decides by values.
            arguments, tracer = _traced(module, recorded, calls, by_value=False)
        trace = Trace(path, module, arguments, tracer, recorded, calls)
        self.known[type(module)] = [trace, *known[: KINDS - 1]]
        return trace

    def refuse(self, path: str, module: nn.Module) -> None:
        if is_opaque(module):
            raise Untraceable("it is scripted")
        if type(module) in SERVED:
            raise Untraceable("torch's own fused inference path serves it")
        if path in self.wrong:
            raise Untraceable(self.wrong[path])
        if "forward" in module.__dict__:
            raise Untraceable("its forward was replaced on the instance")
        if hasattr(type(module), "__copy__") and not isinstance(module, fx.GraphModule):
            # Whatever moves a __dict__ by hand takes along a forward that is bound to the original.
            raise Untraceable("its class has a __copy__ of its own, which may miss that the forward is fused")
        if self.is_excluded(path, module):
            raise Untraceable("excluded by Options.exclude")

    def excluded(self, path: str, module: nn.Module) -> set[str]:
        """Paths below ``module`` that the options leave alone, or that are kept as calls."""
        return {
            inner
            for inner, m in module.named_modules()
            if inner and (self.is_excluded(join(path, inner), m) or join(path, inner) in self.leaves)
        }

    def is_excluded(self, path: str, module: nn.Module) -> bool:
        return bool(self.options.exclude.intersection((path, type(module).__name__)))


def _traced(
    module: nn.Module, recorded: Recorded | None, calls: Collection[str], *, by_value: bool
) -> tuple[Arguments, Tracer]:
    root = copy_tree(module, isolate=True)
    arguments = plan(root.forward, recorded)
    if recorded is None:
        return arguments, trace_module(root, arguments, calls)
    example = arguments.values(*recorded.told) if by_value else None
    return arguments, trace_module(root, arguments, calls, facts=arguments.facts, example=example)


def has_projection(module: nn.Module) -> bool:
    """Whether there is a matrix anywhere in it; without one there is nothing to fuse."""
    return any(p.ndim >= 2 for p in module.parameters()) or any(b.ndim >= 2 for b in module.buffers())


def _has_forward(module: nn.Module) -> bool:
    return is_opaque(module) or type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _is_composite(module: nn.Module) -> bool:
    """Whether a module does more than one step: whatever has children, and every class that is not torch's own."""
    return any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn")


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _relative(path: str, base: str) -> str:
    return path[len(base) :].lstrip(".")


def _within(path: str, bases: Collection[str]) -> bool:
    return any(path == base or path.startswith(base + ".") for base in bases)
