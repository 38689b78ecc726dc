"""A region: one traced forward, its graphs before and after, and the forward that is generated from them."""

from __future__ import annotations

import copy
import functools
import inspect
import linecache
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxfuse.capture import assumptions
from fxfuse.capture.arguments import Arguments
from fxfuse.capture.body import compile_body, read_targets
from fxfuse.capture.copies import protect, release
from fxfuse.capture.names import Name, names_of
from fxfuse.capture.tree import REGION, ROOT
from fxfuse.engine import Rewriting
from fxfuse.report import Calls
from fxfuse.spellings import MODULES

P = inspect.Parameter
GIVE_UP = 64
"""A region whose assumptions failed this many calls running is taken out: it only costs time."""


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
        attributes: Collection[tuple[str, str]],
        rewriting: Rewriting,
        dtypes: Mapping[tuple[str, str], torch.dtype],
        code: Mapping[types.CodeType, dict[str, Any]],
    ):
        self.attributes, self.dtypes, self.code = attributes, dtypes, code
        self.path, self.owner, self.arguments = path, owner, arguments
        self.graph, self.original, self.constants, self.inlined = graph, original, constants, inlined
        self.calls = Calls()
        self.previous: Any = None
        """The instance's own forward before, if it had one."""
        self.modules: tuple[nn.Module, ...] = tuple(module for path, module in inlined.items() if path)
        self.held: list[Any] = []
        """Values that attributes are compared with at each call."""
        self.running_fallbacks, self.fused_then = 0, 0
        """Fallbacks since the last fused call, and the count of fused calls at the last fallback."""
        self.note: Callable[[str], None] = lambda text: None
        self._generate(rewriting)

    def graph_module(self, original: bool = False, owner: Any = None) -> fx.GraphModule:
        """The graph before or after, over the modules and parameters of the owner (or a copy of it) as they are now."""
        graph, owner = self.original if original else self.graph, owner or self.owner
        name = type(owner).__name__ if isinstance(owner, nn.Module) else getattr(owner, "__name__", "function")
        return graph_module(graph, owner, self.constants, name)

    def resolve(self, target: str, owner: Any = None) -> Any:
        return resolve(owner or self.owner, target, self.constants)

    # generated code

    def _generate(self, rewriting: Rewriting) -> None:
        scope: dict[str, Any] = dict(assumptions.SCOPE)
        on_module = isinstance(self.owner, nn.Module)
        local = {"": "self"} if on_module else {}
        checks = [*assumptions.ENVIRONMENT]
        checks += assumptions.of_arguments(self.arguments, rewriting.ranks, rewriting.shapes, scope)
        for path, module in sorted(self.inlined.items()) if on_module else ():
            reach = self._reach(path, local)
            name = local.setdefault(path, f"fx_m{len(local)}")
            scope[f"fx_class_{name}"] = type(module)
            checks += assumptions.of_module(name, reach, path, module)
            if type(module) in MODULES:
                kept = MODULES[type(module)][1](module)
                checks += [assumptions.of_attribute(name, path, key, module, self.held) for key in kept]
        checks += [
            assumptions.of_container(self._reach(path, local), path, len(self.resolve(path)._modules))
            for path in self._containers()
        ]
        for path in sorted({path for path, _ in self.attributes} - local.keys()) if on_module else ():
            # Called as it is, or not at all; only something of it was read.
            checks.append(assumptions.of_holder(f"fx_m{len(local)}", self._reach(path, local), path))
            local[path] = f"fx_m{len(local)}"
        for path, attribute in sorted(self.attributes):
            checks.append(assumptions.of_attribute(local[path], path, attribute, self.resolve(path), self.held))
        for (op, target), dtype in self.dtypes.items():
            reach = self.arguments.free[target] if op == "placeholder" else self._reach_tensor(target, local)
            checks.append(assumptions.of_dtype(target, reach, dtype))
        checks += [assumptions.of_name(name, scope) for name in self._names()]
        reads = self._read(local, checks)
        checks.append(assumptions.of_gradients(self.arguments, "self" if on_module else None))
        scope.update(fx_region=self)
        self.body = self._compile_body()
        values = ", ".join([*(["self"] if on_module else []), *self.arguments.free.values(), *reads])
        parameters, names = self._parameters(scope)
        unpack = ["    fx_region = self._fxfuse"] if on_module else []
        unpack += _unpack([local[path] for path in self.inlined if path], "modules") if on_module else []
        unpack += _unpack([f"fx_held_{i}" for i in range(len(self.held))], "held")
        head = [f"def forward({parameters}):", *unpack]
        rest = "(self, " + names + ")" if on_module else "(None, " + names + ")"
        forward = [
            *head,
            "    try:",
            "        fx_holds = (",
            *(f"            {'and ' if i else ''}{c.holds}" for i, c in enumerate(checks)),
            "        )",
            "    except KeyError:",
            "        fx_holds = False",
            "    if fx_holds:",
            "        fx_region.calls.fused += 1",
            f"        return fx_region.body({values})",
            f"    return fx_region.otherwise{rest}",
        ]
        explain = [head[0].replace("def forward", "def explain"), *head[1:]]
        for c in checks:
            explain += ["    try:", f"        fx_holds = {c.holds}", "    except KeyError:", "        fx_holds = False"]
            explain += ["    if not fx_holds:", f"        return {c.kind!r}, {c.why}"]
        explain.append("    return 'plain', 'the assumptions hold again'")
        self.source = "\n".join([*forward, "", *explain]) + "\n"
        filename = f"<fxfuse region {self.path or 'root'} of {type(self.owner).__name__} {id(self)}>"
        exec(compile(self.source, filename, "exec"), scope)
        # Tracebacks and debuggers show the generated lines.
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(True), filename)
        self.forward, self.explain = scope["forward"], scope["explain"]
        self._dress(self.forward)

    def _containers(self) -> list[str]:
        """Containers of modules that the graph stands for or calls: a forward may go through all that they hold."""
        if not isinstance(self.owner, nn.Module):
            return []
        called = {str(n.target) for n in self.graph.nodes if n.op == "call_module"}
        above = {path.rpartition(".")[0] for path in (*self.inlined, *called) if path}
        above |= {path.rpartition(".")[0] for path in above if path} | set(self.inlined)
        kinds = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
        return sorted(path for path in above if isinstance(self.resolve(path), kinds))

    def _names(self) -> list[Name]:
        """Data that the forwards in the graph, or the function, find by name."""
        if not isinstance(self.owner, nn.Module):
            return names_of([self.owner], self.code)
        own = {type(m) for m in self.inlined.values() if not type(m).__module__.startswith("torch.nn")}
        return names_of([cls.forward for cls in sorted(own, key=repr)], self.code)

    def _reach(self, path: str, local: dict[str, str]) -> str:
        if path in local:
            return local[path]
        parent, _, name = path.rpartition(".")
        if parent in local:
            return f"{local[parent]}._modules[{name!r}]"
        return "self" + "".join(f"._modules[{part!r}]" for part in path.split("."))

    def _read(self, local: dict[str, str], checks: list[assumptions.Check]) -> list[str]:
        """Names of the tensors that the graph reads from the model; adds what is checked of each."""
        names: dict[str, str] = {}
        floating: dict[torch.dtype, str] = {}
        """The first tensor read of each dtype, which the others share: weights are cast together or not at all."""
        for target in read_targets(self.graph):
            name = names[target] = f"fx_read_{len(names)}"
            value = self.resolve(target)
            checks += assumptions.of_read(target, name, self._reach_tensor(target, local), value)
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                first = floating.setdefault(value.dtype, name)
                checks += [assumptions.of_like(target, name, first)] if first != name else []
        return list(names.values())

    def _compile_body(self) -> Callable[..., Any]:
        body = compile_body(self.graph, self.path or "root")
        return body if isinstance(self.owner, nn.Module) else functools.partial(body, None)

    def _reach_tensor(self, target: str, local: dict[str, str]) -> str:
        if target in self.constants:
            return f"fx_region.constants[{target!r}]"
        path, _, name = target.rpartition(".")
        holder = local.get(path) or "self" + "".join(f"._modules[{part!r}]" for part in path.split("."))
        module = self.resolve(path) if path else self.owner
        for table in ("_parameters", "_buffers"):
            if name in getattr(module, table):
                return f"{holder}.{table}[{name!r}]"
        return f"getattr({holder}, {name!r}, None)"

    def _parameters(self, scope: dict[str, Any]) -> tuple[str, str]:
        """The parameter list of the generated forward, and its call with the same arguments."""
        parts = ["self"] if isinstance(self.owner, nn.Module) else []
        passed: list[str] = []
        star = False
        parameters = list(self.arguments.signature.parameters.values())
        for i, p in enumerate(parameters):
            default = ""
            if p.default is not P.empty:
                scope[f"fx_default_{p.name}"] = p.default
                default = f"=fx_default_{p.name}"
            if p.kind is P.VAR_POSITIONAL:
                star = True
                parts.append(f"*{p.name}")
                passed.append(f"*{p.name}")
            elif p.kind is P.VAR_KEYWORD:
                parts.append(f"**{p.name}")
                passed.append(f"**{p.name}")
            elif p.kind is P.KEYWORD_ONLY:
                if not star:
                    parts.append("*")
                    star = True
                parts.append(p.name + default)
                passed.append(f"{p.name}={p.name}")
            else:
                parts.append(p.name + default)
                passed.append(p.name)
                last = i + 1 == len(parameters) or parameters[i + 1].kind is not P.POSITIONAL_ONLY
                if p.kind is P.POSITIONAL_ONLY and last:
                    parts.append("/")
        return ", ".join(parts), ", ".join(passed)

    def _dress(self, forward: Callable[..., Any]) -> None:
        """What inspection shows of the generated forward is what it showed of the original."""
        on_module = isinstance(self.owner, nn.Module)
        original = self.owner.forward if on_module else self.owner
        plain = getattr(original, "__func__", original)
        for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__"):
            if hasattr(plain, name):
                setattr(forward, name, getattr(plain, name))
        signature = inspect.signature(original)
        if on_module:
            own = P("self", P.POSITIONAL_ONLY if _positional_only(signature) else P.POSITIONAL_OR_KEYWORD)
            signature = signature.replace(parameters=[own, *signature.parameters.values()])
        forward.__signature__ = signature  # type: ignore[attr-defined]

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
        kind, why = self.explain(*([owner] if owner is not None else []), *args, **kwargs)
        self.calls.reasons[why] += 1
        if kind == "plain":
            self.calls.plain += 1
        else:
            self.calls.fallback += 1
            self.running_fallbacks = self.running_fallbacks + 1 if self.calls.fused == self.fused_then else 1
            self.fused_then = self.calls.fused
            if self.running_fallbacks >= GIVE_UP and owner is not None:
                self.note(
                    f"region {self.path or '.'} was taken out: {GIVE_UP} calls running broke an assumption ({why})"
                )
                uninstall(owner)
        return self.run_original(owner, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        new = object.__new__(Region)
        memo[id(self)] = new
        new.__dict__.update(self.__dict__)
        for name in ("owner", "modules", "held", "constants", "calls", "previous"):
            setattr(new, name, copy.deepcopy(getattr(self, name), memo))
        new.body = new._compile_body()
        return new


def _unpack(names: list[str], attribute: str) -> list[str]:
    """The generated line that gives the elements of one of the region's sequences their names, if there are any."""
    return [f"    {', '.join(names)}, = fx_region.{attribute}"] if names else []


def _positional_only(signature: inspect.Signature) -> bool:
    return any(p.kind is P.POSITIONAL_ONLY for p in signature.parameters.values())


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
    return fx.GraphModule({t: resolve(owner, t, constants) for t in targets}, graph, name)


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
    module.__dict__.pop("forward", None)
    if ROOT not in module.__dict__:
        release(module)
    if region.previous is not None:
        module.__dict__["forward"] = region.previous


def intact(module: nn.Module) -> bool:
    """Whether the module's forward is still the one that was installed."""
    return getattr(module.__dict__.get("forward"), "__func__", None) is module.__dict__[REGION].forward


def regions_of(model: nn.Module) -> Sequence[tuple[str, nn.Module]]:
    return [(path, m) for path, m in model.named_modules() if REGION in m.__dict__ and m.__dict__[REGION] is not None]
