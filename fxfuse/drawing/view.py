"""What a drawing shows: for each region the operators before and after, and which of them became which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx
from torch import fx

from fxfuse import api
from fxfuse.engine import kernels_of, target_name
from fxfuse.report import Event, Report, short_source
from fxfuse.spellings import spell

_SIZES = {"size", "dim", "numel", "ndimension"}
_NUMBERS = {"shape", "dtype", "device", "ndim"}


@dataclass(frozen=True)
class Change:
    """One way of rewriting, however often it was done: the nodes with ``letter`` before are the one with it after."""

    letter: str
    kind: str
    """``fused``, ``lowered`` or ``tidied``, as in the report."""
    rule: str
    before: str
    after: str
    source: str
    """``file.py:12: code`` of one place."""
    count: int = 0


@dataclass(frozen=True)
class Part:
    """Regions of equal structure, drawn once.

    The nodes of ``before`` and ``after`` are operators that compute, inputs and outputs, in program order, with the
    attributes ``label``, ``detail``, ``role`` (input, op, output), ``mark`` (fused, lowered, tidied, kept or ""),
    ``letter``, ``source`` and ``note``. Views, sizes and parameters are no nodes; ``graph["hidden"]`` counts them.
    """

    kind: str
    """Class of the module."""
    paths: tuple[str, ...]
    """Module path of each region; "" is the model itself."""
    before: nx.DiGraph
    after: nx.DiGraph


@dataclass(frozen=True)
class View:
    """An optimized model as drawings show it."""

    model: str
    parts: tuple[Part, ...]
    changes: tuple[Change, ...]
    uncaptured: int
    """Modules that are in no region, and so in no drawing."""


@dataclass
class _Changes:
    """Letters for ways of rewriting, as they are met."""

    kinds: Mapping[str, tuple[str, str]]
    """Rule by its form -> (kind, pass)."""
    known: dict[tuple[str, ...], Change] = field(default_factory=dict)

    def met(self, form: str, before: str, after: str, source: str) -> Change:
        key = (form, before, after)
        kind, rule = self.kinds[form]
        old = self.known.get(key) or Change(_letter(len(self.known)), kind, rule, before, after, source)
        self.known[key] = replace(old, count=old.count + 1)
        return self.known[key]


def view(model: Any) -> View:
    """The view of what ``optimize`` returned. ``errors.NotOptimized`` for anything else."""
    report = api.report(model)
    rewritten, traced = api.graphs(model), api.graphs(model, original=True)
    classes = {region.path: region.kind for region in report.regions}
    changes = _Changes({event.form: (event.kind, event.rule) for event in report.events if event.kind != "kept"})
    parts: dict[Any, Part] = {}
    for path, after in rewritten.items():
        kept = {e.nodes[0]: e for e in report.kept if e.region == path}
        part = _part(classes.get(path, ""), path, traced[path], after, kept, changes)
        same = _shape(part)
        parts[same] = replace(parts[same], paths=(*parts[same].paths, path)) if same in parts else part
    return View(report.model, tuple(parts.values()), tuple(changes.known.values()), _outside(report))


def _outside(report: Report) -> int:
    return len(report.uncaptured) + sum(not region.installed for region in report.regions)


def _part(
    kind: str,
    path: str,
    traced: fx.GraphModule,
    rewritten: fx.GraphModule,
    kept: Mapping[str, Event],
    changes: _Changes,
) -> Part:
    before, after = _drawn(traced), _drawn(rewritten)
    for node in rewritten.graph.nodes:
        if "fxfuse" in node.meta and node.name in after:
            _join(node, before, after, changes)
    for graph in (before, after):
        for name, attributes in graph.nodes(data=True):
            if name in kept and not attributes["mark"]:
                attributes.update(mark="kept", note=f"stays: {kept[name].reason}")
            attributes["alike"] = tuple(attributes[k] for k in ("label", "role", "detail", "mark", "letter"))
    return Part(kind, (path,), before, after)


def _join(new: fx.Node, before: nx.DiGraph, after: nx.DiGraph, changes: _Changes) -> None:
    """Mark a node that a rule made, and those that it was made of, with their letter."""
    origin = [name for name in new.meta["fxfuse_from"] if name in before]
    labels = Counter(before.nodes[name]["label"] for name in reversed(origin))
    text = ", ".join(f"{n} {label}" if n > 1 else label for label, n in labels.items())
    made = after.nodes[new.name]
    change = changes.met(new.meta["fxfuse"], text, made["label"], made["source"])
    made.update(mark=change.kind, letter=change.letter, note=f"was {text or 'a view'}")
    for name in origin:
        before.nodes[name].update(mark=change.kind, letter=change.letter, note=f"becomes {change.after}")


def _drawn(gm: fx.GraphModule) -> nx.DiGraph:
    """The operators of a graph with who feeds whom, through the views between them."""
    graph = nx.DiGraph(hidden=0)
    numbers = _numbers(gm.graph.nodes)
    feeds: dict[fx.Node, list[str]] = {}
    """What is drawn of a node: itself, or what it views."""
    for node in gm.graph.nodes:
        sources = list(dict.fromkeys(name for arg in node.all_input_nodes for name in feeds[arg]))
        if node in numbers or node.op == "get_attr":
            feeds[node] = []
        elif node.op.startswith("call_") and not kernels_of(node):
            feeds[node] = sources
        else:
            feeds[node] = [node.name]
            graph.add_node(node.name, **_attributes(node, gm))
            graph.add_edges_from((source, node.name) for source in sources)
            continue
        graph.graph["hidden"] += 1
    unread = [name for name, role in graph.nodes(data="role") if role == "input" and not graph.out_degree(name)]
    graph.remove_nodes_from(unread)
    graph.graph["hidden"] += len(unread)
    return graph


def _numbers(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that are sizes, dtypes and arithmetic with them: work of the host."""
    found: set[fx.Node] = set()
    for node in nodes:
        asks = (node.op == "call_method" and node.target in _SIZES) or (
            node.target is getattr and node.args[1] in _NUMBERS
        )
        plain = node.op == "call_function" and getattr(node.target, "__module__", "") in ("_operator", "builtins")
        if asks or (plain and node.all_input_nodes and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def _attributes(node: fx.Node, gm: fx.GraphModule) -> dict[str, Any]:
    role = {"placeholder": "input", "output": "output"}.get(node.op, "op")
    label = str(node.target) if role == "input" else "output" if role == "output" else _label(node, gm)
    return {
        "label": label,
        "detail": _detail(node) if role == "op" else "",
        "role": role,
        "mark": "",
        "letter": "",
        "source": short_source(node.meta.get("source", "")),
        "note": "",
    }


def _label(node: fx.Node, gm: fx.GraphModule) -> str:
    call = spell(node)
    if call is not None:
        return call.name
    if node.op == "call_module":
        return type(gm.get_submodule(str(node.target))).__name__
    # An operator of ours says by its arguments what else is in it: linear_act gelu_tanh
    names = [arg for arg in node.args if isinstance(arg, str)] if "fxfuse" in node.meta else []
    return " ".join([target_name(node), *names])


def _detail(node: fx.Node) -> str:
    """Whose weights it reads, from the last number of the path on: ``h.3.mlp.c_fc.weight`` is ``mlp.c_fc``."""
    if node.op == "call_module":
        paths = [str(node.target)]
    else:
        reads = [n for arg in node.all_input_nodes for n in (arg, *_read_by_helper(arg)) if n.op == "get_attr"]
        paths = [str(n.target).rpartition(".")[0] or str(n.target) for n in reads]
    return ", ".join(dict.fromkeys(_after_number(path) for path in paths))


def _read_by_helper(node: fx.Node) -> list[fx.Node]:
    """What a transposed weight transposes."""
    return node.all_input_nodes if node.op == "call_function" and not kernels_of(node) else []


def _after_number(path: str) -> str:
    parts = path.split(".")
    last = max((i for i, part in enumerate(parts[:-1]) if part.isdecimal()), default=-1)
    return ".".join(parts[last + 1 :])


def _shape(part: Part) -> Any:
    """Equal for regions that are drawn alike."""

    def of(graph: nx.DiGraph) -> Any:
        position = {name: i for i, name in enumerate(graph)}
        nodes = tuple(attributes["alike"] for _, attributes in graph.nodes(data=True))
        return nodes, frozenset((position[a], position[b]) for a, b in graph.edges)

    return part.kind, of(part.before), of(part.after)


def _letter(index: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    return (_letter(index // 26 - 1) if index >= 26 else "") + chr(ord("A") + index % 26)
