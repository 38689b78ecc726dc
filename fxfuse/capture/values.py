"""The example's values of a graph's nodes, worked out along with the trace: tensors without data, numbers in full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fxfuse.capture.watched import own_class
from fxfuse.facts import Fact, Unknown, quietly, without_data

# After these a tensor has another shape, and with it all that was worked out from it.
_RESHAPING = frozenset({
    "as_strided_", "detach_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_",
    "unsqueeze_",
})  # fmt: skip


class Values:
    """What each node was in the example."""

    def __init__(self, root: nn.Module, constants: Mapping[str, torch.Tensor], facts: Mapping[str, Fact]):
        self.root, self.constants, self.facts = root, constants, facts
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.known: dict[fx.Node, Any] = {}
        self.reads: dict[str, Any] = {}
        self.lost = False
        """Whether a tensor got another shape in place: nothing is known from there on."""

    def get(self, node: fx.Node) -> Any:
        """The value of a node; Unknown, the class, where it is not known."""
        return self.known.get(node, Unknown)

    def note(self, node: fx.Node) -> Any:
        """Work out the value of a new node."""
        self.lost |= node.op == "call_method" and node.target in _RESHAPING
        try:
            if self.lost:
                raise Unknown
            # Without the trace's own function mode, and without data: nothing is computed, and no numbers are drawn.
            with torch._C.DisableTorchFunction(), quietly(), self.mode:
                self.known[node] = self._evaluate(node)
        except Exception:  # an operator that does not run without data
            pass
        return self.get(node)

    def _evaluate(self, node: fx.Node) -> Any:
        target = str(node.target)
        if node.op == "placeholder":
            return self.facts[target].empty()
        if node.op == "get_attr":
            return self._read(target)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._argument)
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return self._called(target)(*args, **kwargs)

    def _argument(self, node: fx.Node) -> Any:
        value = self.get(node)
        if value is Unknown:
            raise Unknown
        return value

    def _read(self, path: str) -> Any:
        if path not in self.reads:
            self.reads[path] = without_data(self.tensor(path))
        return self.reads[path]

    def tensor(self, path: str) -> torch.Tensor:
        """The tensor of the model, or constant of the trace, that a graph reads under this name."""
        if path in self.constants:
            return self.constants[path]
        module_path, _, name = path.rpartition(".")
        module = self.root.get_submodule(module_path)
        for table in (module._parameters, module._buffers, module.__dict__):
            found: Any = table.get(name)
            if isinstance(found, torch.Tensor):
                return found
        raise Unknown

    def _called(self, path: str) -> nn.Module:
        """A module as it is outside of the trace, its tensors without data; torch's own without parts only."""
        module = self.root.get_submodule(path)
        cls = own_class(module)
        if not cls.__module__.startswith("torch.nn") or module._modules:
            raise Unknown
        new = object.__new__(cls)
        new.__dict__.update(module.__dict__)
        for table in ("_parameters", "_buffers"):
            tensors = {n: t if t is None else without_data(t) for n, t in module.__dict__[table].items()}
            new.__dict__[table] = tensors
        return new
