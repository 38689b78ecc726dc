"""A region's graph as the function that its forward calls where every assumption holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxfuse import ops


def read_targets(graph: fx.Graph) -> list[str]:
    """What the graph reads from the model, in the order in which a body takes it."""
    return list(dict.fromkeys(str(n.target) for n in graph.nodes if n.op == "get_attr"))


def compile_body(graph: fx.Graph, name: str) -> Callable[..., Any]:
    """``body(self, *placeholders, *reads)``, with a site of its own at each place where a fused operator is called.

    Sites remember what they found out about weights, so a body belongs to one region and its owner.
    """
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {n: new.node_copy(n) for n in graph.nodes if n.op == "placeholder"}
    reads = {target: new.placeholder(f"fx_read_{i}") for i, target in enumerate(read_targets(graph))}
    for node in graph.nodes:
        if node.op == "get_attr":
            mapping[node] = reads[str(node.target)]
        elif node.op == "output":
            new.output(fx.map_arg(node.args[0], mapping.__getitem__))
        elif node not in mapping:
            mapping[node] = copied = new.node_copy(node, mapping.__getitem__)
            site = ops.site(copied)
            if site is not None:
                copied.target, copied.args = site
            elif _is_transposed_parameter(node):
                copied.target = ops.Kept(torch.t).__call__
    code = new.python_code("self")
    scope = dict(code.globals)
    exec(compile(code.src, f"<fxfuse graph {name}>", "exec"), scope)
    body: Callable[..., Any] = scope["forward"]
    return body


def _is_transposed_parameter(node: fx.Node) -> bool:
    """Whether the node transposes a parameter for fused operators only: nobody else may get hold of a view we keep."""
    source = node.args[0] if node.op == "call_function" and node.target is torch.t else None
    return isinstance(source, fx.Node) and source.op == "get_attr" and all(u.target in ops.SITES for u in node.users)
