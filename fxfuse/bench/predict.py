"""What a region's graph says about its forward before that runs: operators, kernels, bytes, operations, least time.

The graph is run on tensors without data, and each operator that would reach a kernel is noted with the node that it
comes from. Calls of fxfuse's own operators are replaced by what the implementation chosen for them does. What the
tables do not have is "not predicted", by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from fxfuse import ops
from fxfuse.bench import trace
from fxfuse.bench.predict_fused import fused
from fxfuse.bench.work import FOLLOWS, Noted, Work, moved
from fxfuse.capture.body import is_transposed_parameter
from fxfuse.facts import Fact, Propagate, Unknown


@dataclass(frozen=True)
class Leaf:
    """A module that a graph calls as it is."""

    module: nn.Module
    """A copy, whose forward may leave in it what it likes."""
    apart: tuple[str, ...]
    """Paths inside it of modules whose work is not the graph's: they are parts of their own."""


def predict(gm: fx.GraphModule, examples: Mapping[str, Any], leaves: Mapping[str, Leaf] | None = None) -> list[Work]:
    """One ``Work`` for each call in a region's graph, in the order of the graph.

    ``examples``: name of an argument -> its value, with the ``Fact`` of each tensor, which is taken to be contiguous.
    What is chosen for fused operators is what the table of measured choices says now. ``leaves``: target of a module's
    call -> what is run for it; others than torch's own modules are not predicted without.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    # torch.fx renames the node of an argument that is called as a built-in function is: "input" becomes input_1.
    named = {
        str(node.target): examples[key] for node in placeholders for key in (node.name, node.target) if key in examples
    }
    run = _Run(gm, named, leaves or {})

    def without_data() -> None:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), run.noted:
            run.run(*[None for _ in placeholders])

    (call,) = trace.trace(without_data, torch.device("cpu"), warm_up=0, active=1, keep=None)
    for node, work in run.works.items():
        if work.unknown:
            continue
        work.host = call.host_ops(node.name)
        if node.target in ops.SITES:
            run.works[node] = fused(work, node, run.tensors(node)) or work
        elif is_transposed_parameter(node):
            # The region keeps the view, and only asks whether the parameter is still where it was.
            work.host = Counter({"aten::is_set_to": 1})
    return list(run.works.values())


_APART = "(apart)"


class _Run(Propagate):
    def __init__(self, gm: fx.GraphModule, examples: Mapping[str, Any], leaves: Mapping[str, Leaf]):
        super().__init__(gm, examples)
        self.leaves = leaves
        self.works: dict[fx.Node, Work] = {}
        self.noted = Noted()

    def run_node(self, n: fx.Node) -> Any:
        if not n.op.startswith("call_"):
            return super().run_node(n)
        work = self.noted.work = self.works[n] = Work(n.name, self._called(n))
        with trace.part(n.name):
            result = super().run_node(n)
        self.noted.work = None
        if result is Unknown:
            work.passes, work.products = [], None
            work.unknown = self._why(n, work.op)
        else:
            work.out = moved(result)
        return result

    def _why(self, n: fx.Node, op: str) -> str:
        unknown = [arg for arg in n.all_input_nodes if self.env.get(arg, Unknown) is Unknown]
        if unknown:
            return FOLLOWS if unknown[0].op.startswith("call_") else f"{unknown[0].name} is not known"
        return f"what {op} does in its forward is not known" if n.op == "call_module" else f"{op} hangs on values"

    def empty(self, tensor: Tensor) -> Tensor:
        with self._apart():
            return super().empty(tensor)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        leaf = self.leaves.get(str(target))
        if leaf is None:
            return super().call_module(target, args, kwargs)
        for path in leaf.apart:
            inner = leaf.module.get_submodule(path)
            inner.__dict__["forward"] = self._running_apart(inner.forward)
        tensors = {**dict(leaf.module.named_parameters()), **dict(leaf.module.named_buffers())}
        return functional_call(leaf.module, {name: self.empty(t) for name, t in tensors.items()}, args, kwargs)

    def placeholder_value(self, n: fx.Node) -> Any:
        return tree_map_only(Fact, Fact.empty, self.examples.get(str(n.target), Unknown))

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """While it lasts, nothing is work of the node that runs: making what stands for a parameter, other parts."""
        work, self.noted.work = self.noted.work, None
        with trace.part(_APART):
            yield
        self.noted.work = work

    def _running_apart(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def apart(*args: Any, **kwargs: Any) -> Any:
            with self._apart():
                return forward(*args, **kwargs)

        return apart

    def _called(self, n: fx.Node) -> str:
        if n.op == "call_module":
            return type(self.fetch_attr(str(n.target))).__name__
        return n.target if isinstance(n.target, str) else getattr(n.target, "__name__", str(n.target))

    def tensors(self, node: fx.Node) -> list[Tensor | None]:
        """Real tensors like those that a fused operator is called with: the model's own weights, others without values.

        Which implementation is taken hangs on strides and addresses, which tensors without data do not have.
        """
        return [self._real(arg) for arg in node.args[: ops.SITES[node.target].tensors]]  # type: ignore[index]

    def _real(self, arg: Any) -> Tensor | None:
        if not isinstance(arg, fx.Node):
            return None
        if arg.op == "get_attr":
            value = self.fetch_attr(str(arg.target))
            assert isinstance(value, Tensor)
            return value
        if is_transposed_parameter(arg):
            weight = self._real(arg.args[0])
            assert weight is not None
            return weight.t()
        fake = self.env[arg]
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
