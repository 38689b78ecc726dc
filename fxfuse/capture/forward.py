"""The forward of a region as Python source: its checks, the call of its body, and the way out."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxfuse.capture import assumptions, by_value
from fxfuse.capture.arguments import Arguments
from fxfuse.capture.assumed import Assumed
from fxfuse.capture.body import read_targets
from fxfuse.capture.names import Name, names_of
from fxfuse.capture.terms import arguments_of
from fxfuse.capture.tracer import LOCK
from fxfuse.engine import Rewriting
from fxfuse.spellings import MODULES

P = inspect.Parameter


@dataclass
class Generated:
    """Source that defines ``forward`` and ``explain``, and the names that it uses, ``fx_region`` besides."""

    source: str
    scope: dict[str, Any]
    owned: dict[str, Any]
    """Names of the model's own modules and values: a copy of the model has others."""


def generate(region: Any, assumed: Assumed, rewriting: Rewriting) -> Generated:
    """The source for a region; ``explain`` tells the first check that does not hold: (kind, why, where)."""
    writer = _Writer(region, assumed)
    checks = writer.checks(rewriting)
    parameters, names = _parameters(region.arguments, writer.on_module, writer.scope)
    values = ", ".join([*writer.own, *region.arguments.placeholders.values(), *writer.reads.values()])
    lines = [
        f"def forward({parameters}):",
        "    try:",
        "        fx_holds = (",
        *(f"            {'and ' if i else ''}{c.holds}" for i, c in enumerate(checks)),
        "        )",
        "    except (KeyError, AttributeError, ArithmeticError, ValueError):",
        "        fx_holds = False",
        "    if fx_holds:",
        "        fx_region.calls.fused += 1",
        f"        return fx_region.body({values})",
        f"    return fx_region.otherwise({', '.join([*(writer.own or ['None']), *([names] if names else [])])})",
        "",
        f"def explain({parameters}):",
    ]
    for c in checks:
        lines += ["    try:", f"        fx_holds = {c.holds}"]
        lines += ["    except (KeyError, AttributeError, ArithmeticError, ValueError):", "        fx_holds = False"]
        lines += ["    if not fx_holds:", f"        return {c.kind!r}, {c.why}, {c.at!r}"]
    lines.append("    return 'plain', 'the assumptions hold again', None")
    owned = {name: region.inlined[path] for path, name in writer.local.items() if path in writer.named}
    owned |= {f"fx_held_{i}": value for i, value in enumerate(writer.held)}
    return Generated("\n".join(lines) + "\n", writer.scope, owned)


class _Writer:
    """Collects the checks of one region, and the names in them."""

    def __init__(self, region: Any, assumed: Assumed):
        self.region, self.assumed = region, assumed
        self.on_module = region.on_module
        self.own = ["self"] if self.on_module else []
        self.local: dict[str, str] = {"": "self"} if self.on_module else {}
        """Module path -> the name that it has in the source."""
        self.named: set[str] = set()
        """Paths of the modules that have their names in ``owned``."""
        self.classes: dict[type, str] = {}
        self.reads: dict[str, str] = {}
        """Target of a tensor that the graph reads -> its name."""
        self.scope: dict[str, Any] = dict(assumptions.SCOPE)
        self.held: list[Any] = []

    def checks(self, rewriting: Rewriting) -> list[assumptions.Check]:
        arguments = self.region.arguments
        checks = [*assumptions.ENVIRONMENT]
        taken = [text for question in self.assumed.questions for text in question.arguments]
        sized = set().union(*map(arguments_of, (*self.assumed.sizes, *taken)))
        ranks = self.assumed.ranks | rewriting.ranks
        checks += assumptions.of_arguments(arguments, ranks, rewriting.shapes, sized, self.scope)
        checks += [assumptions.of_size(*size, arguments) for size in self.assumed.sizes.items()]
        checks += [assumptions.of_answer(*answer, self.scope) for answer in sorted(self.assumed.answers.items())]
        if self.on_module:
            checks.append(assumptions.of_owner())
            checks += self._of_modules()
            checks += self._of_attributes()
        for owner, name, value in self.assumed.foreign.values():
            checks.append(assumptions.of_foreign(owner, name, value, self.held))
        for source, dtype in self.assumed.dtypes.items():
            checks.append(assumptions.of_dtype(source[1], self._reach_source(*source), dtype))
        for source, there in self.assumed.devices.items():
            reach = self._reach_source(*source)
            checks += [assumptions.of_device(source[1], reach, name, was) for name, was in there.items()]
        with LOCK:  # while another thread traces, others stand in for some of a file's functions
            checks += [assumptions.of_name(name, self.scope) for name in self._names()]
        checks += self._of_reads()
        checks += self._of_shapes()
        checks.append(assumptions.of_gradients(arguments, "self" if self.on_module else None))
        # Last, since these run operators.
        return checks + [by_value.check_of(q, self.scope) for q in self.assumed.questions]

    def _of_modules(self) -> list[assumptions.Check]:
        checks: list[assumptions.Check] = []
        for path, module in sorted(self.region.inlined.items()):
            reach = self._reach(path)
            name = self.local.setdefault(path, f"fx_m{len(self.local)}")
            if path:
                self.named.add(path)
            checks += assumptions.of_module(name, reach, path, module, self._class(type(module)))
            if type(module) in MODULES:
                kept = MODULES[type(module)][1](module)
                checks += [assumptions.of_attribute(name, path, key, module, self.held) for key in kept]
        checks += [
            assumptions.of_container(self._table(path, "_modules"), path, len(self.region.resolve(path)._modules))
            for path in self._containers()
        ]
        methods = {(type(self.region.resolve(path)), name) for path, name in self.assumed.methods}
        methods |= {(type(module), "forward") for module in self.region.inlined.values()}
        for cls, name in sorted(methods, key=repr):
            given, constant = getattr(cls, name), f"fx_constant_{len(self.scope)}"
            self.scope[constant] = given
            checks.append(assumptions.of_class(self._class(cls), name, type(given), constant))
        return checks

    def _of_attributes(self) -> list[assumptions.Check]:
        """What was read of modules, whether the graph stands for them, or calls them, or neither."""
        read = [(*key, "attribute") for key in self.assumed.attributes]
        read += [(*key, "absent") for key in self.assumed.absent]
        read += [(*key, "method") for key in self.assumed.methods]
        checks = []
        for path in sorted({path for path, _, _ in read} - self.local.keys()):
            local = f"fx_m{len(self.local)}"
            checks.append(assumptions.of_holder(local, self._reach(path), path))
            self.local[path] = local
        for path, name, kind in sorted(read):
            local, module = self.local[path], self.region.resolve(path)
            if kind == "attribute":
                checks.append(assumptions.of_attribute(local, path, name, module, self.held))
            elif kind == "absent":
                checks.append(assumptions.of_absent(local, path, name, module))
            elif not isinstance(getattr(type(module), name), property):
                checks.append(assumptions.of_method(local, path, name))
        return checks

    def _of_reads(self) -> list[assumptions.Check]:
        """Names the tensors that the graph reads from the model, and checks what is checked of each."""
        checks: list[assumptions.Check] = []
        floating: dict[torch.dtype, tuple[str, str]] = {}
        """dtype -> the first tensor read that has it, and an expression for what the others share: weights are cast
        together or not at all."""
        for target in read_targets(self.region.graph):
            name = self.reads[target] = f"fx_read_{len(self.reads)}"
            value = self.region.resolve(target)
            at = target.rpartition(".")[0]
            at = at if at in self.region.inlined else ""
            checks += assumptions.of_read(target, name, self._reach_tensor(target), value, at or None)
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                continue
            if value.dtype not in floating:
                floating[value.dtype] = name, f"(fx_dtype_of_{name} := {name}.dtype)"
                continue
            first, dtype = floating[value.dtype]
            checks.append(assumptions.of_like(target, name, first, dtype, at or None))
            floating[value.dtype] = first, f"fx_dtype_of_{first}"
        return checks

    def _of_shapes(self) -> list[assumptions.Check]:
        """Shapes that something was taken from, of tensors that the graph does not read."""
        unread = sorted(self.assumed.shapes - self.reads.keys() - self.region.constants.keys())
        return [
            assumptions.of_shape(target, self._reach_tensor(target), tuple(self.region.resolve(target).shape))
            for target in unread
        ]

    def _containers(self) -> list[str]:
        """Modules whose children are counted: what a forward goes through may hold others later."""
        region = self.region
        called = {str(n.target) for n in region.graph.nodes if n.op == "call_module"}
        above = {path.rpartition(".")[0] for path in (*region.inlined, *called) if path}
        above |= {path.rpartition(".")[0] for path in above if path} | set(region.inlined)
        kinds = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
        return sorted({path for path in above if isinstance(region.resolve(path), kinds)} | self.assumed.iterated)

    def _names(self) -> list[Name]:
        """What the forwards in the graph, or the function, find by name."""
        if not self.on_module:
            return names_of([self.region.owner], self.assumed.code)
        own = {type(m) for m in self.region.inlined.values() if not type(m).__module__.startswith("torch.nn")}
        return names_of([cls.forward for cls in sorted(own, key=repr)], self.assumed.code)

    def _class(self, cls: type) -> str:
        name = self.classes.setdefault(cls, f"fx_class_{len(self.classes)}")
        self.scope[name] = cls
        return name

    def _reach(self, path: str) -> str:
        if path in self.local:
            return self.local[path]
        parent, _, name = path.rpartition(".")
        return f"{self._table(parent, '_modules')}[{name!r}]"

    def _table(self, path: str, name: str) -> str:
        """One of the tables that a module keeps its parameters, buffers and modules in."""
        if path in self.local:
            return f"{assumptions.attributes(self.local[path])}[{name!r}]"
        return f"{self._reach(path)}.{name}"

    def _reach_source(self, op: str, target: str) -> str:
        return self.region.arguments.free[target] if op == "placeholder" else self._reach_tensor(target)

    def _reach_tensor(self, target: str) -> str:
        if target in self.region.constants:
            return f"fx_region.constants[{target!r}]"
        path, _, name = target.rpartition(".")
        module = self.region.resolve(path) if path else self.region.owner
        for table in ("_parameters", "_buffers"):
            if name in getattr(module, table):
                return f"{self._table(path, table)}[{name!r}]"
        return f"getattr({self._reach(path)}, {name!r}, None)"


def _parameters(arguments: Arguments, on_module: bool, scope: dict[str, Any]) -> tuple[str, str]:
    """The parameter list of the generated forward, and its call with the same arguments."""
    parts = ["self"] if on_module else []
    passed: list[str] = []
    star = False
    parameters = list(arguments.signature.parameters.values())
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


def dress(forward: Any, owner: Any) -> None:
    """What inspection shows of the generated forward is what it showed of the original."""
    on_module = isinstance(owner, nn.Module)
    original = owner.forward if on_module else owner
    plain = getattr(original, "__func__", original)
    for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__"):
        if hasattr(plain, name):
            setattr(forward, name, getattr(plain, name))
    signature = inspect.signature(original)
    if on_module:
        positional_only = any(p.kind is P.POSITIONAL_ONLY for p in signature.parameters.values())
        own = P("self", P.POSITIONAL_ONLY if positional_only else P.POSITIONAL_OR_KEYWORD)
        signature = signature.replace(parameters=[own, *signature.parameters.values()])
    forward.__signature__ = signature
