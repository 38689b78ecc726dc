"""The largest subtrees of a model that can be traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx, nn

from fxfuse.capture.arguments import Arguments, Recorded, plan
from fxfuse.capture.tracer import Tracer, Untraceable, trace_module
from fxfuse.capture.tree import copy_tree, is_opaque
from fxfuse.options import Options
from fxfuse.report import Uncaptured


@dataclass
class Trace:
    """A module whose forward has a graph."""

    path: str
    module: nn.Module
    arguments: Arguments
    tracer: Tracer

    @property
    def graph(self) -> fx.Graph:
        return self.tracer.graph


class Walk:
    """Traces ``model`` from the top; where a module has no graph, its children are tried, then it again around them."""

    def __init__(self, model: nn.Module, options: Options, recorded: Mapping[str, Recorded] | None):
        self.model, self.options, self.recorded = model, options, recorded
        self.traces: list[Trace] = []
        self.uncaptured: list[Uncaptured] = []
        self.seen: set[int] = set()
        self.visit("", model)

    def visit(self, path: str, module: nn.Module) -> bool:
        """Whether the module lies in a region. Shared modules are taken once, where they are met first."""
        if id(module) in self.seen or not has_projection(module):
            return True
        self.seen.add(id(module))
        try:
            self.traces.append(self.trace(path, module, set()))
            return True
        except Untraceable as refusal:
            reason = str(refusal)
        if is_opaque(module) or self.is_excluded(path, module):
            self.uncaptured.append(Uncaptured(path, type(module).__name__, reason))
            return False
        inner = len(self.traces)
        leaves = {
            name for name, child in module.named_children() if not self.visit(f"{path}.{name}".lstrip("."), child)
        }
        if leaves:
            below = {t.path[len(path) :].lstrip(".") for t in self.traces[inner:]}
            try:
                whole = self.trace(path, module, leaves)
                # What was captured beside the leaves is part of the larger region; what lies inside them stays.
                self.traces[inner:] = [t for t in self.traces[inner:] if _within(t.path, path, leaves)]
                self.traces.append(whole)
                return True
            except Untraceable as refusal:
                reason = str(refusal) if below else reason
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            self.uncaptured.append(Uncaptured(path, type(module).__name__, reason))
        return False

    def trace(self, path: str, module: nn.Module, leaves: set[str]) -> Trace:
        self.refuse(path, module)
        recorded = self.recorded.get(path) if self.recorded is not None else None
        if self.recorded is not None and recorded is None:
            raise Untraceable("the example inputs did not reach it")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise Untraceable("it has no forward")
        root = copy_tree(module, isolate=True)
        arguments = plan(root.forward, recorded)
        return Trace(path, module, arguments, trace_module(root, arguments.call, leaves | self.excluded(path, module)))

    def refuse(self, path: str, module: nn.Module) -> None:
        if is_opaque(module):
            raise Untraceable("it is scripted")
        if "forward" in module.__dict__:
            raise Untraceable("its forward was replaced on the instance")
        if self.is_excluded(path, module):
            raise Untraceable("excluded by Options.exclude")

    def excluded(self, path: str, module: nn.Module) -> set[str]:
        """Paths below ``module`` that the options leave alone."""
        return {
            inner for inner, m in module.named_modules() if inner and self.is_excluded(f"{path}.{inner}".lstrip("."), m)
        }

    def is_excluded(self, path: str, module: nn.Module) -> bool:
        return bool(self.options.exclude.intersection((path, type(module).__name__)))


def has_projection(module: nn.Module) -> bool:
    """Whether there is a matrix anywhere in it; without one there is nothing to fuse."""
    return any(p.ndim >= 2 for p in module.parameters()) or any(b.ndim >= 2 for b in module.buffers())


def _within(path: str, base: str, leaves: set[str]) -> bool:
    inner = path[len(base) :].lstrip(".")
    return any(inner == leaf or inner.startswith(leaf + ".") for leaf in leaves)
