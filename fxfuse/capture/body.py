"""A region's graph as the function that its forward calls where every assumption holds."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxfuse import ops
from fxfuse.ops.prepack import Store

Watch = Callable[[Callable[..., torch.Tensor], tuple[Any, ...], tuple[Any, ...]], None]
"""Is told of each call of a fused operator: the operator, its tensors, its other arguments."""


def read_targets(graph: fx.Graph) -> list[str]:
    """What the graph reads from the model, in the order in which a body takes it."""
    return list(dict.fromkeys(str(n.target) for n in graph.nodes if n.op == "get_attr"))


def copied(graph: fx.Graph) -> fx.Graph:
    """A graph of its own with the same nodes; that of a GraphModule keeps it alive, and the parameters that it had."""
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    new.set_codegen(graph._codegen)  # what an exported program takes and returns is nested, while its graph is flat
    return new


def compile_body(
    graph: fx.Graph, name: str, store: Store | None = None, watch: Watch | None = None
) -> Callable[..., Any]:
    """``body(self, *placeholders, *reads)``, with a site of its own at each place where a fused operator is called.

    Sites remember what they found out about weights, so a body belongs to one region and its owner. ``store`` takes the
    packed copies of weights, where there may be any; ``watch`` sees each call of a site before it runs.
    """
    new = fx.Graph()
    # A graph is a cycle, and the body another one if it is among its own globals. With the sites in neither, what they
    # keep of weights goes with the last call of the body, and not at some collection.
    runs: dict[Callable[..., Any], Callable[..., Any]] = {}

    def stand_in(run: Callable[..., Any]) -> Callable[..., Any]:
        def site() -> None: ...

        runs[site] = run
        return site

    mapping: dict[fx.Node, fx.Node] = {n: new.node_copy(n) for n in graph.nodes if n.op == "placeholder"}
    reads = {target: new.placeholder(f"fx_read_{i}") for i, target in enumerate(read_targets(graph))}
    for node in graph.nodes:
        if node.op == "get_attr":
            mapping[node] = reads[str(node.target)]
        elif node.op == "output":
            new.output(fx.map_arg(node.args[0], mapping.__getitem__))
        elif node not in mapping:
            mapping[node] = copied = new.node_copy(node, mapping.__getitem__)
            site = ops.site(copied, store, vouched=all(map(_is_read, node.args[1:])))
            if site is not None:
                run, tensors = site
                if watch is not None:
                    run = _watched(run, watch, node.target, copied.args[len(tensors) :])
                copied.target, copied.args = stand_in(run), tensors
            elif is_transposed_parameter(node):
                copied.target = stand_in(ops.Kept(torch.t).__call__)
    code = new.python_code("self")
    scope = {k: runs.get(v, v) if isinstance(v, types.FunctionType) else v for k, v in code.globals.items()}
    exec(compile(code.src, f"<fxfuse graph {name}>", "exec"), scope)
    body: Callable[..., Any] = scope.pop("forward")
    return body


def _is_read(argument: fx.node.Argument) -> bool:
    """Whether an operand is read from the model, whose tensors a region asks about, or is none."""
    if isinstance(argument, fx.Node) and argument.target is torch.t:
        argument = argument.args[0]
    return not isinstance(argument, fx.Node) or argument.op == "get_attr"


def _watched(run: Callable[..., Any], watch: Watch, target: Any, rest: tuple[Any, ...]) -> Callable[..., Any]:
    def watched(*tensors: Any) -> Any:
        watch(target, tensors, rest)
        return run(*tensors)

    return watched


def is_transposed_parameter(node: fx.Node) -> bool:
    """Whether the node transposes a parameter for fused operators only: nobody else may get hold of a view we keep."""
    source = node.args[0] if node.op == "call_function" and node.target is torch.t else None
    return isinstance(source, fx.Node) and source.op == "get_attr" and all(u.target in ops.SITES for u in node.users)
