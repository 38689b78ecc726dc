"""A region: one traced forward, its graphs before and after, and the forward that is generated from them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import linecache
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from fxfuse.capture.arguments import Arguments
from fxfuse.capture.assumed import Assumed
from fxfuse.capture.body import Watch, compile_body, copied
from fxfuse.capture.copies import protect, release
from fxfuse.capture.forward import dress, generate
from fxfuse.capture.replay import Replayed, refusal
from fxfuse.capture.tree import REGION, ROOT, intact
from fxfuse.engine import Rewriting
from fxfuse.ops.prepack import Store
from fxfuse.report import Calls


class Region:
    """What is installed on one module (or stands behind one function)."""

    def __init__(
        self,
        path: str,
        owner: Any,
        arguments: Arguments,
        graph: fx.Graph,
        original: fx.Graph,
        constants: dict[str, torch.Tensor],
        inlined: dict[str, nn.Module],
        assumed: Assumed,
        rewriting: Rewriting,
    ):
        self.path, self.owner, self.arguments = path, owner, arguments
        self.graph, self.original, self.constants, self.inlined = graph, original, constants, inlined
        self.calls = Calls()
        self.previous: Any = None
        """The instance's own forward before, if it had one."""
        self.fallbacks, self.running_fallbacks, self.fused_then = 0, 0, 0
        """Fallbacks, those since the last fused call, and the count of fused calls at the last fallback."""
        self.fell_back: Callable[[Region, str, str | None], None] = _nobody
        """Called at each fallback with the reason and the path of the inlined module that it lies in, if in one."""
        self.may_be_traced_again = True
        self.without_values: Region | None = None
        """Of the same module, for calls whose values decide otherwise than the example's."""
        self.store: Store | None = None
        """Of the model's packed weights, where it may have any."""
        self.not_captured: Callable[[str], None] | None = None
        """Where its calls are to be captured as CUDA graphs: takes the reason why some are not."""
        self.questions = assumed.questions
        self.generated = generate(self, assumed, rewriting)
        self.body = self.new_body()
        self._bind()
        dress(self.forward, owner)

    def graph_module(self, original: bool = False, owner: Any = None) -> fx.GraphModule:
        """The graph before or after, over the modules and parameters of the owner (or a copy of it) as they are now."""
        graph, owner = self.original if original else self.graph, owner or self.owner
        name = type(owner).__name__ if isinstance(owner, nn.Module) else getattr(owner, "__name__", "function")
        return graph_module(graph, owner, self.constants, name)

    def resolve(self, target: str, owner: Any = None) -> Any:
        return resolve(owner or self.owner, target, self.constants)

    @property
    def on_module(self) -> bool:
        """Whether it is a module's, and no function's."""
        return isinstance(self.owner, nn.Module)

    def _bind(self) -> None:
        """Make the forward over this region's own names: a call in flight keeps to the region that it began with."""
        scope = {**self.generated.scope, **self.generated.owned, "fx_region": self}
        filename = f"<fxfuse region {self.path or 'root'} of {type(self.owner).__name__} {id(self)}>"
        exec(compile(self.source, filename, "exec"), scope)
        # Tracebacks and debuggers show the generated lines.
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(True), filename)
        weakref.finalize(self, linecache.cache.pop, filename, None)
        self.forward, self.explain = scope["forward"], scope["explain"]

    @property
    def source(self) -> str:
        """The generated forward, and the function that tells why a call does not take the graph."""
        return self.generated.source

    def pack_into(self, store: Store | None) -> None:
        """Let its sites put packed copies of weights into ``store``."""
        if store is not None:
            self.store = store
            self.forget()

    def capture_calls(self, not_captured: Callable[[str], None]) -> None:
        """Let its calls be captured as CUDA graphs; ``not_captured`` takes the reason where one is not."""
        self.not_captured = not_captured
        self.forget()

    def forget(self) -> None:
        """Drop what its sites found out, packed weights and CUDA graphs too; they find out anew."""
        self.body = self.new_body()
        if self.without_values is not None:
            self.without_values.forget()

    def new_body(self, watch: Watch | None = None) -> Callable[..., Any]:
        """The graph as a function whose sites have found out nothing yet. One that is watched packs no weights."""
        body = compile_body(self.graph, self.path or "root", None if watch else self.store, watch)
        if self.not_captured is not None and watch is None:
            count = len(self.graph.find_nodes(op="placeholder"))
            body = Replayed(
                body, count, lambda: refusal(self.graph_module()), self.calls.count_replay, self.not_captured
            )
        return body if self.on_module else functools.partial(body, None)

    # calls that do not take the graph

    def run_original(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # No bound method is made here: torch.compile does not know how.
        if owner is None:
            return self.owner(*args, **kwargs)
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return type(owner).forward(owner, *args, **kwargs)

    def otherwise(self, owner: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The original forward, with the reason noted. What the model computes comes first, what is counted second."""
        if torch.compiler.is_compiling():
            return self.run_original(owner, args, kwargs)
        if self.without_values is not None:
            return self.without_values.forward(*([owner] if owner is not None else []), *args, **kwargs)
        kind, why, at = self.explain(*([owner] if owner is not None else []), *args, **kwargs)
        self.calls.reasons[why] += 1
        if kind == "plain":
            self.calls.plain += 1
        else:
            self.calls.fallback += 1
            self.fallbacks += 1
            self.running_fallbacks = self.running_fallbacks + 1 if self.calls.fused == self.fused_then else 1
            self.fused_then = self.calls.fused
            self.fell_back(self, why, at)
        return self.run_original(owner, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        new = object.__new__(Region)
        memo[id(self)] = new
        new.__dict__.update(self.__dict__)
        for name in ("owner", "inlined", "constants", "calls", "previous", "store", "without_values"):
            setattr(new, name, copy.deepcopy(getattr(self, name), memo))
        new.generated = dataclasses.replace(self.generated, owned=copy.deepcopy(self.generated.owned, memo))
        # Whoever copies a whole model says to whom the copy is to turn; a module copied by itself has no model.
        new.fell_back, new.not_captured = _nobody, None
        new.body = new.new_body()
        new._bind()
        for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__", "__dict__"):
            setattr(new.forward, name, getattr(self.forward, name))
        return new


def _nobody(region: Region, why: str, at: str | None) -> None:
    """A region that falls back has nobody to turn to."""


def resolve(owner: Any, target: str, constants: Mapping[str, torch.Tensor]) -> Any:
    """What a target of a graph is: a constant of the trace, or an attribute reached from the owner."""
    if target in constants:
        return constants[target]
    value = owner
    for part in filter(None, target.split(".")):
        value = getattr(value, part)
    return value


def graph_module(
    graph: fx.Graph, owner: Any, constants: Mapping[str, torch.Tensor], name: str = "GraphModule"
) -> fx.GraphModule:
    """``graph`` over what its targets are on ``owner`` now."""
    targets = {str(n.target) for n in graph.nodes if n.op in ("get_attr", "call_module")}
    return fx.GraphModule({t: resolve(owner, t, constants) for t in targets}, copied(graph), name)


def install(region: Region) -> None:
    """Put the generated forward on the region's module."""
    module = region.owner
    region.previous = module.__dict__.get("forward")
    module.__dict__[REGION] = region
    module.__dict__["forward"] = types.MethodType(region.forward, module)
    protect(module)


def uninstall(module: nn.Module) -> None:
    """Put back what the module had before."""
    region = module.__dict__.pop(REGION, None)
    if region is None:  # another thread was faster
        return
    if region.not_captured is not None:  # graphs keep memory for as long as the region lives
        region.forget()
    module.__dict__.pop("forward", None)
    if ROOT not in module.__dict__:
        release(module)
    if region.previous is not None:
        module.__dict__["forward"] = region.previous


def is_installed(region: Region) -> bool:
    """Whether a region's forward is the one that its module has, and nobody has wrapped it."""
    return region.owner.__dict__.get(REGION) is region and intact(region.owner)
