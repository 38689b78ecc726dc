"""Module calls become function calls on the module's own parameters, so that rules need to know functions only."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import fx, nn

from fxfuse.spellings import MODULES, OPS


def normalise(gm: fx.GraphModule, may_inline: Callable[[nn.Module], bool], *, training: bool) -> dict[str, nn.Module]:
    """Spell out the module calls that the table knows, in place. Returns path -> module that the graph now stands for.

    Only modules of exactly these classes: a subclass has a forward of its own. ``training``: dropout modules may be
    called in training mode, so they stay.
    """
    inlined: dict[str, nn.Module] = {}
    modules = dict(gm.named_modules())
    for node in list(gm.graph.nodes):
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if module is None or not may_inline(module):
            continue
        with gm.graph.inserting_before(node):
            new = _spelled(gm.graph, node, module, training)
        if new is None:
            continue
        for created in (new, *new.all_input_nodes):
            created.meta = {**node.meta, **created.meta}
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        inlined[str(node.target)] = module
    gm.graph.lint()
    return inlined


def _spelled(graph: fx.Graph, node: fx.Node, module: nn.Module, training: bool) -> fx.Node | None:
    operands = [*node.args, *node.kwargs.values()]
    if len(operands) != 1 or not isinstance(operands[0], fx.Node):
        return None
    x = operands[0]
    if type(module) is nn.Linear:
        weight = graph.get_attr(f"{node.target}.weight")
        bias = graph.get_attr(f"{node.target}.bias") if module.bias is not None else None
        return graph.call_function(F.linear, (x, weight, bias))
    if type(module) is nn.Identity:
        return x
    if type(module) is nn.Dropout and not training:
        return graph.call_function(F.dropout, (x,), {"p": module.p, "training": False})
    if type(module) in MODULES:
        name, arguments = MODULES[type(module)]
        given = {k: v for k, v in arguments(module).items() if not (k == "inplace" and v is False)}
        return graph.call_function(OPS[name].function, (x,), given)
    return None
