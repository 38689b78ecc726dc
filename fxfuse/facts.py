"""What is known of the values in a region before it runs: shape, dtype and device, and what that knowledge rests on.

Values that depend on parameters alone are known without any input. With example inputs everything else is, too, but
only for that example: a rule that decides by it must turn it into an assumption, checked when the region is called.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from fxfuse.capture.tree import hooked
from fxfuse.spellings import ACTIVATIONS, spell


@dataclass(frozen=True)
class Fact:
    """The type of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> Fact:
        return Fact(tuple(tensor.shape), tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        """A tensor of which this is true, contiguous and of no particular values."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def without_data(tensor: torch.Tensor) -> torch.Tensor:
    """One like it under a FakeTensorMode; made afresh, since a converter would keep weak references to parameters."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def quietly() -> Iterator[None]:
    """Keeps out of torch's log that an operator did not run without data: then its value is unknown, and that is all.

    Some do not that run on real tensors, such as ``torch._grouped_mm`` in float32 on the CPU.
    """
    thread = threading.get_ident()

    def by_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    _LOG.addFilter(by_others)
    try:
        yield
    finally:
        _LOG.removeFilter(by_others)


class Unknown(Exception):
    """A value could not be worked out; whatever depends on it cannot be, either."""


class Propagate(fx.Interpreter):
    """Runs the graph on tensors without data, going on past nodes that cannot be run so."""

    def __init__(self, gm: fx.GraphModule, examples: Mapping[str, Any]):
        super().__init__(gm, garbage_collect_values=False)
        self.examples = examples

    def empty(self, tensor: torch.Tensor) -> torch.Tensor:
        return without_data(tensor)

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return None
        try:
            if n.op == "placeholder":
                return self.placeholder_value(n)
            if n.op == "get_attr":
                value = self.fetch_attr(str(n.target))
                return self.empty(value) if isinstance(value, torch.Tensor) else value
            if any(self.env.get(arg, Unknown) is Unknown for arg in n.all_input_nodes):
                return Unknown
            return super().run_node(n)
        except Exception:  # an op that does not run without data: the value is unknown, which is never wrong
            return Unknown

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """On tensors without data in place of its own, so that a batch norm counts nothing; torch's modules only."""
        module = self.fetch_attr(str(target))
        if not type(module).__module__.startswith("torch.nn") or hooked(module):
            raise Unknown
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return functional_call(module, {name: self.empty(t) for name, t in tensors.items()}, args, kwargs)

    def placeholder_value(self, n: fx.Node) -> Any:
        value = self.examples.get(str(n.target), Unknown)
        return value.empty() if isinstance(value, Fact) else value


class Facts:
    """Known facts of one graph. ``examples`` maps placeholder names to the ``Fact`` of the recorded argument."""

    def __init__(self, gm: fx.GraphModule, examples: Mapping[str, Any] | None = None, *, checked: bool = True):
        self.checked = checked
        """Whether what is assumed of arguments is checked at each call."""
        self.known: dict[fx.Node, Fact] = {}
        self.static: set[fx.Node] = set()
        """Nodes that depend on no placeholder."""
        self.examples = dict(examples or {})
        for node in gm.graph.nodes:
            if node.op != "placeholder" and all(arg in self.static for arg in node.all_input_nodes):
                self.static.add(node)
        run = Propagate(gm, self.examples)
        with torch.no_grad(), quietly(), FakeTensorMode(allow_non_fake_inputs=True):
            run.run(*[None for node in gm.graph.nodes if node.op == "placeholder"])
        self.known = {n: Fact.of(v) for n, v in run.env.items() if isinstance(v, torch.Tensor)}

    def get(self, node: Any) -> Fact | None:
        return self.known.get(node) if isinstance(node, fx.Node) else None

    def inherit(self, new: fx.Node, old: fx.Node) -> None:
        if old in self.known:
            self.known[new] = self.known[old]
        if old in self.static:
            self.static.add(new)

    def given(self, node: Any) -> fx.Node | None:
        """The node whose shape settles that of ``node``, or None for everything that is computed from the input.

        That is ``node`` itself where it depends on no placeholder, or the one placeholder that it is a view of.
        """
        while isinstance(node, fx.Node) and node not in self.static and node.op != "placeholder":
            call = spell(node)
            view = call is not None and (
                call.name in _VIEWS or (call.name == "getattr" and call.args["name"] in _TRANSPOSED)
            )
            if not view or len(node.all_input_nodes) != 1:
                return None
            node = node.all_input_nodes[0]
        return node if isinstance(node, fx.Node) else None

    def is_floating(self, node: Any) -> bool:
        """Whether a value is known to be floating point, whatever the input is."""
        if node in self.static:
            return self._known_floating(node)
        call = spell(node)
        if call is None:
            return False
        if call.name in _WEIGHTS:  # both operands of a product have one dtype
            return any(self._known_floating(call.args[name]) for name in _WEIGHTS[call.name])
        if call.name in ("add", "sub", "mul", "div"):
            return self.is_floating(call.args["input"]) or self.is_floating(call.args["other"])
        return call.name in _SAME_DTYPE and self.is_floating(call.args.get("input", call.args.get("tensor")))

    def _known_floating(self, node: Any) -> bool:
        fact = self.get(node)
        return fact is not None and self.given(node) is not None and fact.dtype.is_floating_point

    def rank(self, node: Any) -> int | fx.Node | None:
        """The rank of a value: a number where the graph fixes it, a placeholder that has the same rank, or None."""
        if not isinstance(node, fx.Node):
            return 0 if isinstance(node, (int, float)) else None
        if node.op == "placeholder":
            return node
        if node in self.static and node in self.known:
            return len(self.known[node].shape)
        call = spell(node)
        if call is None:
            return None
        if call.name in ("mm", "addmm", "t"):
            return 2
        if call.name == "reshape" and isinstance(call.args["shape"], Sequence):
            return len(call.args["shape"])
        if call.name in _SAME_RANK:
            return self.rank(call.args["input"])
        if call.name == "matmul" and self.rank(call.args["other"]) == 2:
            return self.rank(call.args["input"])
        if call.name in ("add", "mul", "sub", "div"):
            # The larger rank of the two; a parameter of rank 0 or 1 never adds a dimension to a matrix.
            ranks = [self.rank(call.args["input"]), self.rank(call.args["other"])]
            low = [r for r in ranks if isinstance(r, int) and r <= 1]
            return (
                next((r for r in ranks if r not in low), None) if low else (ranks[0] if ranks[0] == ranks[1] else None)
            )
        return None


_VIEWS = {"t", "transpose", "permute", "reshape", "flatten", "unflatten", "contiguous", "getitem"}
_WEIGHTS = {
    "linear": ("weight",),
    "matmul": ("input", "other"),
    "mm": ("input", "mat2"),
    "addmm": ("mat1", "mat2"),
    "einsum": ("input", "other"),
    "tensordot": ("a", "b"),
}
_SAME_DTYPE = _VIEWS | {*ACTIVATIONS, "dropout", "glu", "chunk", "split", "split_with_sizes", "narrow"}
_TRANSPOSED = {"T", "mT", "H", "mH"}
_SAME_RANK = {
    *ACTIVATIONS,
    "dropout",
    "contiguous",
    "neg",
    "exp",
    "erf",
    "square",
    "clamp",
    "clamp_min",
    "transpose",
    "permute",
    "linear",
    "glu",
    "pow",
}
