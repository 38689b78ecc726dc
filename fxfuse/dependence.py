"""The dependence graph of a region: who reads whose value, who writes into which memory, who shares it.

A rewrite computes a match at the place of its root. That is only the same program if nothing outside the match reads a
value inside it, and nothing between the match's first node and its root writes what the match reads.
Which functions write or share memory is read off PyTorch's own operator schemas.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn

from fxfuse.capture.tree import hooked
from fxfuse.spellings import spell

OUTSIDE = "memory of the caller and of the model"
"""Arguments, parameters and buffers may all share memory with each other, so they count as one."""

_INPLACE_OPERATORS = {
    f
    for name, f in vars(operator).items()
    if name.startswith("i")
    and f"__{name}__" in dir(operator)
    and name not in ("index", "inv", "invert", "is_", "is_not")
}
_INPLACE_METHODS = {f"__{f.__name__}__" for f in _INPLACE_OPERATORS} | {"__setitem__", "__delitem__", "__setstate__"}
# What a dropout returns in eval mode, or with p = 0, is its input; the schemas do not say so.
_MAY_RETURN_INPUT = {
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
    "type_as",
    "conj_physical",
}
# Composite operators return whatever they are made of, a view perhaps, and their schemas do not say so. These do not.
_FRESH_COMPOSITES = {"linear", "matmul", "layer_norm", "conv1d", "conv2d", "conv3d", "softmax", "log_softmax"}
_PURE_OPERATORS = (
    {f for name, f in vars(operator).items() if callable(f)}
    - _INPLACE_OPERATORS
    - {operator.getitem, operator.setitem, operator.delitem}
)


@functools.cache
def _schema_effect(name: str) -> tuple[bool, bool] | None:
    """(writes its first operand, may return memory of it), over all overloads of the ATen operator of that name."""
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    if not schemas:
        return None
    # An ``out=`` overload only counts where the call says ``out``, which is looked at apart from the schema.
    usual = [s for s in schemas if not any(a.name.startswith("out") and a.kwarg_only for a in s.arguments)]
    first = [s.arguments[0].alias_info for s in usual if s.arguments and s.arguments[0].alias_info is not None]
    shares = bool(first) or name in _MAY_RETURN_INPUT or (name not in _FRESH_COMPOSITES and _is_composite(schemas))
    return any(a.is_write for a in first), shares


def _is_composite(schemas: Collection[Any]) -> bool:
    for schema in schemas:
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        # Some schemas are TorchScript's own, for numbers, and unknown to the dispatcher.
        with contextlib.suppress(RuntimeError):
            if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
                return True
    return False


def _effect(node: fx.Node, module: nn.Module | None) -> tuple[str, bool]:
    """(what it writes: "nothing", "first" operand or "anything"; whether its result may share memory with operands)."""
    if node.op == "call_module":
        return _effect_of_module(module), True
    if _idle_dropout(node):
        return "nothing", True
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    assert isinstance(name, str)
    if node.target in _INPLACE_OPERATORS or node.target is operator.setitem or _inplace(node):
        return "first", True
    if node.op == "call_method" and name in _INPLACE_METHODS:
        return "first", True
    if node.target in _PURE_OPERATORS or (getattr(node.target, "__module__", None) or "").startswith("fxfuse.ops"):
        return "nothing", False
    if node.kwargs.get("out") is not None:
        return "anything", True
    if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket) and _is_custom(node.target):
        return ("anything" if _is_mutable(node.target) else "nothing"), True
    if isinstance(node.target, torch._ops.OpOverload):
        name = node.target._opname
    if node.op == "call_function" and not _known_function(node.target):
        return "anything", True
    effect = _schema_effect(name)
    if effect is None:
        return ("first" if name.endswith("_") and not name.endswith("__") else "nothing"), True
    return ("first" if effect[0] else "nothing"), effect[1]


def _effect_of_module(module: nn.Module | None) -> str:
    """What a module's call writes: one of torch's, as it comes, is known; any other may write anything."""
    if module is None or not type(module).__module__.startswith("torch.nn"):
        return "anything"
    if hooked(module) or "forward" in module.__dict__:
        return "anything"
    steps = module.training and isinstance(module, nn.modules.batchnorm._NormBase)
    return "anything" if steps else "first" if getattr(module, "inplace", False) else "nothing"


def _is_custom(operator: Any) -> bool:
    name = operator.name() if isinstance(operator, torch._ops.OpOverload) else operator._qualified_op_name
    return str(name).partition("::")[0] != "aten"


def _is_mutable(operator: Any) -> bool:
    one = isinstance(operator, torch._ops.OpOverload)
    overloads = [operator] if one else [getattr(operator, name) for name in operator.overloads()]
    return any(overload._schema.is_mutable for overload in overloads)


@functools.cache
def _inplace_position(function: Any) -> int | None:
    """Where ``function`` takes ``inplace``, as torch.nn.functional does; None where it does not."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


def _idle_dropout(node: fx.Node) -> bool:
    """A dropout that drops nothing returns its input, and writes nothing even where it is told to work in place."""
    call = spell(node)
    return call is not None and call.name == "dropout" and (call.args["training"] is False or call.args["p"] == 0)


def _inplace(node: fx.Node) -> bool:
    if "inplace" in node.kwargs:
        return node.kwargs["inplace"] is not False
    if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload):
        return False
    position = _inplace_position(node.target)
    return position is not None and position < len(node.args) and node.args[position] is not False


def _known_function(target: Any) -> bool:
    module = getattr(target, "__module__", None) or ""
    return isinstance(target, torch._ops.OpOverload) or module.split(".")[0] in (
        "torch",
        "fxfuse",
        "_operator",
        "builtins",
        "math",
        "",
    )


class Memory:
    """Where the values of a graph may live, and what its nodes may write, noted in the order of the graph."""

    def __init__(self, modules: Mapping[str, nn.Module]):
        self.modules = modules
        self.memory: dict[fx.Node, frozenset[Any]] = {}
        """Where a node's value may live: the nodes that made that memory, or OUTSIDE."""
        self.writes: dict[fx.Node, frozenset[Any]] = {}
        """What a node may write; nodes that write nothing are left out."""

    def note(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        shared = frozenset().union(*(self.memory[arg] for arg in inputs)) if inputs else frozenset()
        if node.op in ("placeholder", "get_attr"):
            self.memory[node] = frozenset([OUTSIDE])
            return
        if node.op == "output":
            self.memory[node] = shared
            return
        writes, shares = _effect(node, self.modules.get(str(node.target)) if node.op == "call_module" else None)
        self.memory[node] = (
            frozenset([node])
            | (shared if shares else frozenset())
            | (frozenset([OUTSIDE]) if writes == "anything" else frozenset())
        )
        if writes == "first" and inputs:
            self.writes[node] = self.memory[inputs[0]]
        elif writes == "anything":
            self.writes[node] = shared | {OUTSIDE}


class Dependence(Memory):
    """Data, mutation and alias edges of one graph, as a ``networkx.DiGraph`` over its nodes."""

    def __init__(self, gm: fx.GraphModule):
        import networkx as nx  # here, as it would be more than half of what `import fxfuse` costs

        super().__init__(dict(gm.named_modules()))
        self.graph = nx.DiGraph()
        self.position: dict[fx.Node, int] = {}
        last_write: dict[Any, fx.Node] = {}
        for place, node in enumerate(gm.graph.nodes):
            self.add(node, place)
            for memory in self.writes.get(node, ()):
                last_write[memory] = node
            for arg in node.all_input_nodes:
                for memory in self.memory[arg] & last_write.keys():
                    if last_write[memory] not in (arg, node):
                        self.graph.add_edge(last_write[memory], node, kind="mutation")

    def add(self, node: fx.Node, place: int) -> None:
        self.position[node] = place
        self.graph.add_node(node)
        self.graph.add_edges_from(((arg, node) for arg in node.all_input_nodes), kind="data")
        self.note(node)

    def replace(self, old: Iterable[fx.Node], root: fx.Node, created: Iterable[fx.Node], new: fx.Node) -> None:
        """Nodes of a match gave way to ``created`` ones at the place of its root, and its value to that of ``new``."""
        for node in created:
            self.add(node, self.position[root])
        for table in (self.memory, self.writes):
            for node, memory in table.items():
                if root in memory and node is not root:
                    table[node] = memory - {root} | self.memory[new]
        self.forget(old)

    def forget(self, nodes: Iterable[fx.Node]) -> None:
        """Nodes are gone from the graph."""
        for node in nodes:
            self.position.pop(node, None)
            self.memory.pop(node, None)
            self.writes.pop(node, None)
            if node in self.graph:
                self.graph.remove_node(node)

    def writer_between(self, nodes: Collection[fx.Node], root: fx.Node, read: Iterable[fx.Node]) -> fx.Node | None:
        """A node outside ``nodes``, after the first of them and before ``root``, that writes memory of ``read``."""
        if not self.writes:
            return None
        first, last = min(self.position[n] for n in nodes), self.position[root]
        memory = frozenset().union(*(self.memory[n] for n in read))
        return next(
            (
                w
                for w, written in self.writes.items()
                if first < self.position[w] < last and w not in nodes and written & memory
            ),
            None,
        )

    def written_later(self, node: fx.Node) -> bool:
        """Whether the memory of ``node`` is ever written by a node other than the ones that made it."""
        return any(written & self.memory[node] for w, written in self.writes.items() if w is not node)

    def leaves_region(self, node: fx.Node) -> bool:
        """Whether memory of ``node`` reaches the caller through the region's result."""
        return any(self.memory[n] & self.memory[node] for n in self.graph if n.op == "output")

    def convex(self, nodes: Collection[fx.Node]) -> fx.Node | None:
        """None where no path leaves ``nodes`` and comes back; otherwise a node on such a path."""
        inside = set(nodes)
        first, last = min(self.position[n] for n in inside), max(self.position[n] for n in inside)
        front = [s for n in inside for s in self.graph.successors(n) if s not in inside]
        seen: set[fx.Node] = set()
        while front:
            node = front.pop()
            if node in seen or not first < self.position[node] < last:
                continue
            seen.add(node)
            if inside.intersection(self.graph.successors(node)):
                return node
            front.extend(self.graph.successors(node))
        return None
