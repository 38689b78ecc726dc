"""Decisions of a forward by device, ``if x.device.type == "mps": ...``, taken under an assumption that is kept.

Only such a comparison is an assumption, and no device: a model may move from one to another that it treats alike.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from fxfuse.capture.watched import own_class
from fxfuse.spellings import ACTIVATIONS, MODULES, spell

_COMPARISONS = {operator.eq: True, operator.ne: False}
# What these return lies where their first operand does.
_KEEPING = frozenset(ACTIVATIONS) | {
    "chunk", "dropout", "reshape", "flatten", "unflatten", "transpose", "permute", "contiguous", "t",
}  # fmt: skip

Origins = tuple[torch.device, Mapping[tuple[str, str], torch.Tensor]]
"""Where a value of the example lay, and what it was computed from, by the keys of ``Decisions``."""
Decisions = dict[tuple[str, str], dict[str, bool]]
"""("placeholder", its name) or ("get_attr", path of the tensor) -> names of devices, and whether it lay there."""


class Devices:
    """Where the graph's values lie, as far as its arguments and parameters tell, or its example."""

    def __init__(self, root: nn.Module, decisions: Decisions, example: Callable[[fx.Node], Origins | None]):
        self.root, self.decisions, self.example = root, decisions, example

    def decide(self, node: fx.Node) -> bool | None:
        """The truth of a comparison of a device's type with a name; None where the node is something else."""
        if node.target not in _COMPARISONS or len(node.args) != 2:
            return None
        side, name = node.args
        owner = _read(_read(side, "type"), "device")
        if owner is None or not isinstance(name, str):
            return None
        source = self.source(owner)
        device = self.device(*source) if source is not None else None
        is_there = self.in_example(owner, name) if device is None else self.assume(source, name, device)
        return None if is_there is None else is_there == _COMPARISONS[node.target]

    def assume(self, source: Any, name: str, device: torch.device) -> bool:
        return self.decisions.setdefault(source, {}).setdefault(name, device.type == name)

    def in_example(self, node: fx.Node, name: str) -> bool | None:
        """Whether a value lay on such a device. It does again where all that it is computed from lies so again."""
        found = self.example(node)
        if found is None:
            return None
        device, origins = found
        if any(self.assume(source, name, t.device) != (t.device.type == name) for source, t in origins.items()):
            return None  # an argument had been taken to lie beside the parameters
        return device.type == name

    def source(self, node: fx.Node) -> tuple[str, str] | None:
        """The argument, or tensor of the model, beside which a value lies."""
        if node.op in ("placeholder", "get_attr"):
            return node.op, str(node.target)
        if node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            if own_class(module) is nn.Linear:  # it would have raised elsewhere
                return "get_attr", f"{node.target}.weight"
            keeps = isinstance(module, (nn.Dropout, nn.Identity, *MODULES))
        else:
            call = spell(node)
            keeps = node.target is operator.getitem or (call is not None and call.name in _KEEPING)
        first = node.args[0] if node.args else None
        return self.source(first) if keeps and isinstance(first, fx.Node) else None

    def device(self, op: str, target: str) -> torch.device | None:
        """That of a tensor of the model; arguments are taken to lie beside the parameters."""
        tensor: torch.Tensor | None
        if op == "placeholder":
            tensor = next(self.root.parameters(), None)
        else:
            path, _, name = target.rpartition(".")
            module = self.root.get_submodule(path)
            tensor = module._parameters.get(name, module._buffers.get(name))
        return tensor.device if tensor is not None else None


def _read(node: object, name: str) -> fx.Node | None:
    """Of what a node is the attribute ``name``."""
    if not isinstance(node, fx.Node) or node.target is not getattr or node.args[1] != name:
        return None
    owner = node.args[0]
    return owner if isinstance(owner, fx.Node) else None
