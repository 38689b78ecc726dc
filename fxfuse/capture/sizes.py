"""Decisions of a forward by sizes, ``if x.shape[1] > 512: ...``, taken as in the example and checked at each call.

What is checked is the comparison itself, over the sizes of the arguments: sizes that fare alike stay on the graph.
"""

from __future__ import annotations

import operator
import types
from typing import Any

import torch
from torch import fx

from fxfuse.capture import shapes
from fxfuse.capture.assumed import Assumed, Decision
from fxfuse.capture.indexing import Indices
from fxfuse.capture.terms import Known, Term, apply, constant, product, size
from fxfuse.capture.values import Values
from fxfuse.capture.watched import own_class
from fxfuse.facts import Unknown

_NUMBERS = (bool, int, float)


class Sizes:
    """What the sizes and numbers of a graph follow from."""

    def __init__(self, values: Values, assumed: Assumed):
        self.values, self.assumed = values, assumed
        self.known: dict[fx.Node, Any] = {}
        """A tuple of terms for a tensor, a term for a number, what a rule gives for several tensors."""
        self.settled: set[fx.Node] = set()
        """Nodes whose rank has been assumed."""
        self.last, self.new = "", False
        """The last assumption, and whether there was none like it before."""
        self.place: tuple[int, int] | None = None
        self.here: list[str] = []
        """Where numbers were taken last, and the assumptions that are new since."""

    def note(self, node: fx.Node) -> Any:
        """Work out the value of a new node, and what it follows from. Returns the value."""
        value = self.values.note(node)
        if value is Unknown:
            return value
        try:
            found = self._follow(node, value)
        except Exception:  # a form of the call that its rule does not know
            found = None
        if isinstance(value, torch.Tensor):
            self.known[node] = found if _agrees(found, value) else (None,) * value.ndim
        elif type(value) in _NUMBERS:
            agrees = isinstance(found, Term) and type(found.value) is type(value) and found.value == value
            self.known[node] = found if agrees else None
        else:
            self.known[node] = found
        return value

    def _follow(self, node: fx.Node, value: Any) -> Any:
        if node.op == "placeholder":
            return tuple(size(str(node.target), i, n) for i, n in enumerate(value.shape))
        if node.op == "get_attr":
            return tuple(map(constant, value.shape))
        args: Any = fx.map_arg(node.args, self.known.get)
        kwargs: Any = fx.map_arg(node.kwargs, self.known.get)
        if type(value) in _NUMBERS:
            return self._number(node, args)
        if node.target is operator.getitem:
            args = args[0], fx.map_arg(node.args[1], self._index)
        if node.op == "call_module":
            module = self.values.root.get_submodule(str(node.target))
            rule = shapes.rule_of_module(own_class(module), module)
        else:
            rule = shapes.rule_of(node.target)
        return rule(*args, **kwargs) if rule is not None and "out" not in kwargs else None

    def _index(self, node: fx.Node) -> Any:
        found: Any = self.known.get(node)
        if isinstance(self.values.get(node), torch.Tensor):
            return Indices(found)
        if found is None:  # which would be an index as well
            raise Unknown
        return found

    def _number(self, node: fx.Node, args: tuple[Any, ...]) -> Known:
        if node.op == "call_method":
            if node.target == "size" and len(args) == 2:
                return args[0][args[1]]
            return product(args[0]) if node.target in ("numel", "nelement") else None
        if not callable(node.target) or node.kwargs:
            return None
        operands = [a if isinstance(a, Term) else constant(a) if type(a) in _NUMBERS else None for a in args]
        return apply(node.target, *operands)

    def origins(self, node: fx.Node) -> dict[tuple[str, str], torch.Tensor] | None:
        """What a tensor is computed from: ("placeholder", name) or ("get_attr", path) -> as it was in the example.

        None where its rank is not settled: what broadcasts against what may tell a dtype and a device.
        """
        if not isinstance(self.values.get(node), torch.Tensor) or not self.assume_rank(node):
            return None
        found: dict[tuple[str, str], torch.Tensor] = {}
        pending, seen = [node], set()
        while pending:
            n = pending.pop()
            if n in seen:
                continue
            seen.add(n)
            pending += n.all_input_nodes
            if n.op in ("placeholder", "get_attr"):
                found[n.op, str(n.target)] = self.values.get(n)
            elif n.op == "call_module":
                for name, parameter in self.values.root.get_submodule(str(n.target))._parameters.items():
                    if parameter is not None:
                        found["get_attr", f"{n.target}.{name}"] = parameter
        return found

    def dtype(self, node: fx.Node) -> torch.dtype | None:
        """The dtype of a tensor, under the assumption that what it is computed from has the dtypes that it had."""
        origins = self.origins(node)
        if origins is None:
            return None
        self.assumed.dtypes |= {source: tensor.dtype for source, tensor in origins.items()}
        # What factories make has it, where they are not told another.
        self.assumed.answers["get_default_dtype"] = torch.get_default_dtype()
        dtype: torch.dtype = self.values.get(node).dtype
        return dtype

    def device(self, node: fx.Node) -> tuple[torch.device, dict[tuple[str, str], torch.Tensor]] | None:
        """Where a tensor lay, and what it is computed from."""
        origins = self.origins(node)
        if origins is None:
            return None
        self.assumed.answers["get_default_device"] = torch.get_default_device()
        return self.values.get(node).device, origins

    # decisions

    def decide(self, node: fx.Node) -> bool | None:
        """The truth of a number; None where the arguments' sizes do not tell it."""
        value = self.values.get(node)
        found = self.known.get(node)
        if type(value) not in _NUMBERS or found is None or not self.assume_rank(node):
            return None
        truth = found if type(value) is bool else apply(operator.ne, found, constant(0))
        return None if truth is None else self._assume(truth, node)

    def take(self, node: fx.Node) -> Any:
        """The number that a node was in the example, under the assumption that it still is; None as for ``decide``."""
        found = self.term(node)
        return None if found is None else self._assume(found, node)

    def term(self, node: fx.Node) -> Term | None:
        """How a number follows from the sizes of arguments, which may be others; None as for ``decide``."""
        found = self.known.get(node)
        return found if isinstance(found, Term) and self.assume_rank(node) else None

    def _assume(self, found: Term, node: fx.Node) -> Any:
        self.new = not found.is_constant and found.text not in self.assumed.sizes
        self.last = found.text
        if self.new:
            self.assumed.sizes[found.text] = Decision(found.value, node.meta.get("source", ""))
        return found.value

    def taken_at(self, frame: types.FrameType) -> None:
        """Note where in Python the last number was taken."""
        place = id(frame), frame.f_lasti
        if self.place != place:
            self.place, self.here = place, []
        self.here += [self.last] if self.new else []

    def withdraw(self, frame: types.FrameType) -> None:
        """Assume no longer what was taken by the call that this frame is at."""
        if self.place == (id(frame), frame.f_lasti):
            for text in self.here:
                del self.assumed.sizes[text]
            self.here = []

    def rank(self, node: fx.Node) -> int | None:
        """The rank of a value, under the assumption that arguments have the rank that they had."""
        value = self.values.get(node)
        if not isinstance(value, torch.Tensor) or not self.assume_rank(node):
            return None
        return value.ndim

    def count(self, node: fx.Node) -> int | None:
        """Of how many values one consists when it is iterated, under the assumption that it still does."""
        value = self.values.get(node)
        if isinstance(value, torch.Tensor):
            cut: Any = node
            size = self.known[node][0] if value.ndim else None
        elif isinstance(value, (tuple, list)):
            name = getattr(node.target, "__name__", node.target)
            if name not in _CUTTING or isinstance(_argument(node, 1, "split_size_or_sections"), (tuple, list)):
                return len(value) if self.assume_rank(node) else None
            cut = node.args[0]
            size = self.known[cut][_argument(node, 1 if name == "unbind" else 2, "dim") or 0]
        else:
            return None
        if size is None or not self.assume_rank(cut):
            return None
        self._assume(size, node)
        return len(value)

    def assume_rank(self, node: fx.Node) -> bool:
        """Assume the ranks of the arguments that a node is computed from; False where they do not settle its own."""
        pending, new = [node], set()
        while pending:
            n = pending.pop()
            if n in self.settled or n in new:
                continue
            if not self._keeps_rank(n):
                return False
            new.add(n)
            pending += n.all_input_nodes
        self.settled |= new
        for n in new:
            if n.op == "placeholder":
                self.assumed.ranks[str(n.target)] = self.values.get(n).ndim
            elif n.op == "get_attr":
                self.assumed.shapes.add(str(n.target))
            elif n.op == "call_module":
                self._assume_module(str(n.target))
        return True

    def _assume_module(self, path: str) -> None:
        """Assume what the sizes of its result follow from."""
        module = self.values.root.get_submodule(path)
        name, attributes = shapes.attributes_of(own_class(module))
        self.assumed.attributes |= {(path, attribute) for attribute in attributes}
        if name and module._parameters.get("weight") is not None:
            self.assumed.shapes.add(f"{path}.weight")

    def _keeps_rank(self, node: fx.Node) -> bool:
        """Whether the ranks of what a node is computed from settle its own."""
        if self.values.get(node) is Unknown:
            return False
        if node.target == "squeeze" or node.target is torch.squeeze:
            dim, squeezed = _argument(node, 1, "dim"), _argument(node, 0, "input")
            is_one = apply(operator.eq, self.known[squeezed][dim], constant(1)) if isinstance(dim, int) else None
            if is_one is None:
                return False
            self._assume(is_one, node)
        return node.op in ("placeholder", "get_attr", "call_module") or shapes.is_torchs(node.target)


_CUTTING = frozenset({"chunk", "split", "tensor_split", "unbind"})
"""What gives as many tensors as the size that it cuts has room for."""


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _agrees(found: Any, value: torch.Tensor) -> bool:
    return (
        isinstance(found, tuple)
        and len(found) == value.ndim
        and all(t is None or t.value == n for t, n in zip(found, value.shape, strict=True))
    )
