"""Why a Linear is in no fused operator: of a rewritten graph, and of what lies in none."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx, nn

from fxfuse.capture.tree import hooked
from fxfuse.report import Event, Report
from fxfuse.spellings import ACTIVATIONS, spell

_VIEWS = {"t", "transpose", "permute", "getattr", "reshape", "flatten", "unflatten", "contiguous"}
_BETWEEN = {*_VIEWS, *ACTIVATIONS, "dropout", "chunk", "split", "getitem"}
"""What may stand between a Linear and the root of a form that it is part of."""
_STEPS = 4
"""The most of these between them."""
_RETURNED = "nothing follows it in its region"


def of_graph(gm: fx.GraphModule, module: nn.Module, events: list[Event]) -> dict[str, str]:
    """Path in ``module`` of each Linear that its graph reads or calls -> why nothing is fused with it; "" where it is.

    ``gm`` is the rewritten graph, ``events`` are what came of rewriting it.
    """
    fused = {name for e in events if e.kind == "fused" for name in e.nodes}
    kept = {e.nodes[0]: f"{e.rule}: {e.reason}" for e in events if e.kind == "kept"}
    linears = {name: m for name, m in module.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
    found: dict[str, str] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            owner, calls = str(node.target), [node]
        elif node.op == "get_attr" and str(node.target).endswith("weight"):
            owner, calls = str(node.target).rpartition(".")[0], [*_readers(node)]
        else:
            continue
        for call in calls if owner in linears else ():
            inside = not fused.isdisjoint(call.meta.get("fxfuse_from", (call.name,)))
            if found.get(owner) != "":
                found[owner] = "" if inside else _why(call, kept, linears[owner])
    return found


def _readers(weight: fx.Node) -> Iterator[fx.Node]:
    """The operators that work with a weight, or a view of it."""
    for user in weight.users:
        call = spell(user)
        if call is not None and call.name in _VIEWS:
            yield from _readers(user)
        else:
            yield user


def _why(call: fx.Node, kept: dict[str, str], linear: nn.Linear) -> str:
    if call.op == "call_module":
        own = "has a forward of its own" if "forward" in linear.__dict__ else "is left alone"
        hook = hooked(linear)
        return f"it {f'has a {hook}' if hook else own}, and is called as a module"
    reached = [call]
    for _ in range(_STEPS):
        refusal = next((kept[node.name] for node in reached if node.name in kept), None)
        if refusal is not None:
            return refusal
        reached = [user for node in reached if node is call or _is_between(node) for user in node.users]
    following = dict.fromkeys(_named(user) for user in call.users if not _only_returns(user))
    return f"no pass fuses it with the {' and '.join(following)} that follows" if following else _RETURNED


def _only_returns(node: fx.Node) -> bool:
    """Whether a node is the output, or makes the object that the forward returns."""
    return node.op == "output" or isinstance(node.target, type)


def _is_between(node: fx.Node) -> bool:
    call = spell(node)
    return call is not None and call.name in _BETWEEN


def _named(node: fx.Node) -> str:
    call = spell(node)
    if call is not None:
        return call.name
    return str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def add(report: Report, path: str, found: dict[str, str]) -> None:
    """Add what was found in the region at ``path``: of several regions that call a Linear the one that fuses it counts,
    or the one in which something follows it."""
    for name, why in found.items():
        full = f"{path}.{name}".strip(".")
        known = report.linears.get(full)
        if known is None or (known != "" and why != _RETURNED):
            report.linears[full] = why


def complete(model: nn.Module, report: Report) -> None:
    """Add each Linear of ``model`` that no region's graph has, by what the report says of the modules around it."""
    outside = {u.path: (u.kind, u.reason) for u in report.uncaptured}
    regions = {r.path for r in report.regions}
    # A shared one has the path under which its region met it.
    met = {id(model.get_submodule(path)): why for path, why in report.linears.items()}
    report.linears = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            why = met.get(id(module), _RETURNED)
            around = next((p for p in _upwards(name) if p in outside or (p in regions and id(module) not in met)), None)
            if why == _RETURNED and around in outside:
                kind, reason = outside[around]
                why = reason if around == name else f"in {around or 'the model'} ({kind}): {reason}"
            elif id(module) not in met:
                why = "it is not called" if around is None else "the forward of its region does not call it"
            report.linears[name] = why


def _upwards(path: str) -> Iterator[str]:
    """A path, and those of the modules around it."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""
