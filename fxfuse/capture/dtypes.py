"""Decisions of a forward by dtype, ``if x.dtype != self.weight.dtype: ...``, taken under an assumption that is kept.

What a module without an example is given is taken to have the dtype of its parameters. Both are checked at each call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from fxfuse.capture.watched import own_class
from fxfuse.spellings import ACTIVATIONS, MODULES, spell

_COMPARISONS = {operator.eq: True, operator.ne: False}
# Of operands of one floating dtype these make a value of the same.
_KEEPING = frozenset(ACTIVATIONS) | {
    "linear", "matmul", "mm", "addmm", "add", "sub", "mul", "div", "neg", "pow", "dropout", "reshape", "flatten",
    "unflatten", "transpose", "permute", "contiguous", "t",
}  # fmt: skip


class Dtypes:
    """The dtypes of a graph's values, as far as the graph's own operators tell, or its example."""

    def __init__(
        self,
        root: nn.Module,
        known: dict[str, torch.dtype],
        assumed: dict[tuple[str, str], torch.dtype],
        example: Callable[[fx.Node], torch.dtype | None],
    ):
        self.root, self.known, self.assumed, self.example = root, known, assumed, example
        """("placeholder", its name) or ("get_attr", path of the tensor) -> what decisions took its dtype to be."""

    def decide(self, node: fx.Node) -> bool | None:
        """The truth of a comparison of dtypes; None where the node is something else, or they are not known."""
        if node.target not in _COMPARISONS or len(node.args) != 2:
            return None
        sides = [self.named(side) for side in node.args]
        if None in sides:
            return None
        return (sides[0] == sides[1]) == _COMPARISONS[node.target]

    def named(self, side: Any) -> torch.dtype | None:
        if isinstance(side, torch.dtype):
            return side
        is_dtype = isinstance(side, fx.Node) and side.target is getattr and side.args[1] == "dtype"
        if not is_dtype:
            return None
        found = self.of(side.args[0])
        return self.example(side.args[0]) if found is None else found

    def of(self, node: fx.Node) -> torch.dtype | None:
        """That of a value. Each node is asked once: with residuals there are more paths than could be walked."""
        found: dict[fx.Node, torch.dtype | None] = {}
        pending = [node]
        while pending:
            n = pending[-1]
            own = self.by_itself(n)
            inputs = n.all_input_nodes if own is None and self.keeps(n) else []
            unseen = [arg for arg in inputs if arg not in found]
            if not unseen:
                found[n] = self.only({found[arg] for arg in inputs}, n) if inputs else own
                pending.pop()
            pending += reversed(unseen)
        return found[node]

    def by_itself(self, node: fx.Node) -> torch.dtype | None:
        """The dtype of a value that is known without that of what it is computed from."""
        taken = self.of_linears(node)
        if taken is not None:
            return taken
        if node.op == "placeholder":
            return self.assume(node, self.known.get(node.name, self.of_parameters(self.root)))
        if node.op == "get_attr":
            path, _, name = str(node.target).rpartition(".")
            module = self.root.get_submodule(path)
            value = module._parameters.get(name, module._buffers.get(name))
            return self.assume(node, value.dtype if value is not None else None)
        return None

    def keeps(self, node: fx.Node) -> bool:
        """Whether a value has the dtype of what it is computed from, if that is one."""
        if node.op == "call_module":
            kinds = (nn.Linear, nn.Dropout, nn.Identity, nn.LayerNorm, *MODULES)
            return isinstance(self.root.get_submodule(str(node.target)), kinds)
        call = spell(node)
        return call is not None and call.name in _KEEPING

    def only(self, inputs: set[torch.dtype | None], node: fx.Node) -> torch.dtype | None:
        if node.op == "call_module":
            inputs |= {parameter.dtype for parameter in self.root.get_submodule(str(node.target)).parameters()}
        only = inputs.pop() if len(inputs) == 1 else None
        return only if only is not None and only.is_floating_point else None

    def of_linears(self, node: fx.Node) -> torch.dtype | None:
        """That of a weight that the value, itself or normalised, was multiplied by: another would have raised there."""
        for user in node.users:
            if user.op != "call_module" or user.args[:1] != (node,):
                continue
            module = self.root.get_submodule(str(user.target))
            weight = module._parameters.get("weight")
            found = None
            if own_class(module) is nn.Linear and weight is not None:
                self.assumed["get_attr", f"{user.target}.weight"] = found = weight.dtype
            elif own_class(module) in (nn.LayerNorm, nn.Dropout):
                found = self.of_linears(user)
            if found is not None:
                return found
        return None

    def assume(self, node: fx.Node, dtype: torch.dtype | None) -> torch.dtype | None:
        if dtype is not None:
            self.assumed[node.op, str(node.target)] = dtype
        return dtype

    @staticmethod
    def of_parameters(module: nn.Module) -> torch.dtype | None:
        return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
