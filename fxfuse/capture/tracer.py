"""Symbolic tracing of one module, called with a given mixture of free tensors and constants.

torch.fx's own ``Tracer.trace`` patches ``nn.Module`` for the whole process while it runs, bakes random numbers and
other tensors made inside a forward as constants, and lets a forward leave proxies behind on the model. Here the modules
to be traced are copies whose class records calls and reads, a function mode records what has no proxy among its
arguments, and whatever the forward did to its own attributes is looked for afterwards.
"""

from __future__ import annotations

import dataclasses
import functools
import linecache
import math
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx._symbolic_trace import _autowrap_check, _new_patcher, _patch_wrapped_functions
from torch.utils._pytree import tree_leaves

from fxfuse.capture import asked, factories
from fxfuse.capture.arguments import Arguments
from fxfuse.capture.assumed import Assumed
from fxfuse.capture.by_value import ByValue
from fxfuse.capture.devices import Devices, Origins
from fxfuse.capture.dtypes import Dtypes
from fxfuse.capture.foreign import StandIns
from fxfuse.capture.names import names_of, tensors_of
from fxfuse.capture.recording import Recording
from fxfuse.capture.refusals import NOT_A_FORWARD, explained
from fxfuse.capture.results import check_result
from fxfuse.capture.sizes import Sizes
from fxfuse.capture.tree import changed, contents, hooked, is_opaque, preserved, same, snapshot
from fxfuse.capture.value import Handed, Number, Shape, Untraceable, Value, finfo, is_instance, is_tensor
from fxfuse.capture.values import Values
from fxfuse.capture.watched import TRACER, own_class, watched
from fxfuse.facts import Fact, Unknown

LOCK = threading.RLock()
"""Functions marked with ``torch.fx.wrap`` are patched while a trace runs, so one trace runs at a time."""

ASKING = frozenset({"transformers.utils.import_utils", "transformers.utils.generic"})
"""Modules with functions that tell whether a forward is traced: then it would do without what it decides by value."""
_TRANSPARENT = (nn.Sequential, nn.TransformerDecoderLayer)
"""Modules of torch.nn that are looked into; the others stay calls."""


class Tracer(fx.Tracer):
    """Traces copies of modules made by ``copy_tree(isolate=True)``; see ``trace_module``."""

    def __init__(
        self, root: nn.Module, leaves: Collection[str], has_example: bool, facts: Mapping[str, Fact] | None = None
    ):
        super().__init__(autowrap_modules=(math,))
        self.root = root
        self.has_example = has_example
        self.assumed = Assumed()
        known = {name: fact.dtype for name, fact in (facts or {}).items()}
        self.dtypes = Dtypes(root, known, self.assumed.dtypes, self.dtype_in_example)
        self.devices = Devices(root, self.assumed.devices, self.device_in_example)
        self.by_value: ByValue | None = None
        self.stand_ins = StandIns(self.assumed, lambda: self.running)
        self.replaced: dict[int, Callable[..., Any]] = {}
        """id of a function of torch -> what a forward finds in its place."""
        self.leaves = set(leaves)
        self.graph = fx.Graph(tracer_cls=fx.Tracer)
        # Generated code calls the module ``self``, so a node for a submodule of that name needs another.
        self.graph._graph_namespace.create_name("self", None)
        self.paths = {id(m): path for path, m in root.named_modules()}
        self.tensors = {id(t): name for name, t in _tensors(root)}
        self.taken = set(dir(root))
        self.reads: dict[str, fx.Proxy] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.sizes = Sizes(Values(root, self.constants, facts), self.assumed) if facts is not None else None
        self.inlined: dict[str, nn.Module] = {}
        """Paths of modules whose forward was traced through."""
        self.running = False
        self.watches_modules = False
        """Whether calls of modules are refused: a function's graph would not notice when these change."""
        self.patcher: Any = None
        self.handed: dict[str, tuple[str, type]] = {}
        """See ``Arguments.handed``."""
        self.given: dict[int, tuple[dict[str, Any], dict[str, Any], fx.Proxy]] = {}
        """id of a dict among the arguments -> it, what it held, and what stands for it where it is handed on."""

    def begin(self, arguments: Arguments, example: Mapping[str, Any] | None) -> None:
        """Take the arguments that the forward is to be called with."""
        self.handed = arguments.handed
        if example is not None and self.sizes is not None:
            self.by_value = ByValue(example, arguments.free, self.sizes, self.assumed.questions)

    # modules

    def call(self, module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        path = self.paths.get(id(module))
        if path is None:
            return forward(*args, **kwargs)
        if self.is_leaf(module, path):
            return self.create_proxy("call_module", path, args, kwargs)
        self.inlined[path] = module
        _wrap_functions(self, module)
        return forward(*args, **kwargs)

    def is_leaf(self, module: nn.Module, path: str) -> bool:
        if path in self.leaves or is_opaque(module) or "forward" in module.__dict__ or hooked(module):
            return True
        return _is_torch_leaf(own_class(module))

    # values

    def guesses(self, call: fx.Node) -> bool:
        """Whether nothing is known of what a ``call_module`` node returns."""
        return not self.has_example and not _is_torch_leaf(own_class(self.root.get_submodule(str(call.target))))

    def gives_tensor(self, node: fx.Node) -> bool:
        """Whether a node is known to be one tensor: an argument, or what most classes of torch.nn return."""
        if node.op != "call_module":
            return node.op in ("placeholder", "get_attr")
        module = self.root.get_submodule(str(node.target))
        return _is_torch_leaf(own_class(module)) and not isinstance(
            module, (nn.RNNBase, nn.LSTMCell, nn.MultiheadAttention, nn.AdaptiveLogSoftmaxWithLoss)
        )

    def read(self, path: str) -> fx.Proxy:
        if path not in self.reads:
            self.reads[path] = self.create_proxy("get_attr", path, (), {})
        return self.reads[path]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            path = self.tensors.get(id(a))
            if path is None:
                path = f"_tensor_constant{len(self.constants)}"
                while path in self.taken:
                    path += "_"
                self.constants[path] = a
                self.tensors[id(a)] = path
            return self.read(path).node
        if isinstance(a, nn.Module):
            raise Untraceable(f"passes the module {type(a).__name__} to a function")
        if id(a) in self.given:
            return self.given[id(a)][2].node
        if type(a).__module__ == "numpy" and hasattr(a, "item"):
            return a.item()
        if isinstance(a, dict) and dataclasses.is_dataclass(a):  # fx would make a plain dict of it
            fields = {name: self.create_arg(value) for name, value in a.items()}
            return self.create_node("call_function", type(a), (), fields)
        return super().create_arg(a)

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: Any = None
    ) -> fx.Node:
        if _autocast():
            raise Untraceable("enters autocast")
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        node.meta["source"] = self.look_back()
        return node

    def look_back(self) -> str:
        """``file:line: code`` of the innermost statement that is not PyTorch's or fxfuse's. Notes who took part."""
        source, module = "", ""
        frame: Any = sys._getframe(2)
        # Nodes are made below the forward, and the last one by _run itself: whoever called optimize took no part.
        while frame is not None and frame.f_code not in (_call_with_placeholders.__code__, _run.__code__):
            name = frame.f_code.co_filename
            if frame.f_code is nn.Module._call_impl.__code__:
                module = type(frame.f_locals["self"]).__name__
            elif not name.startswith(NOT_A_FORWARD):
                self.assumed.code[frame.f_code] = frame.f_globals
                source = source or f"{name}:{frame.f_lineno}: {linecache.getline(name, frame.f_lineno).strip()}"
            frame = frame.f_back
        if module and self.watches_modules:
            raise Untraceable(f"calls the module {module}, which may change: optimize a module around it")
        return source

    def to_bool(self, obj: fx.Proxy) -> bool:
        for known in (self.dtypes, self.devices, self.sizes, self.by_value):
            decided = known.decide(obj.node) if known is not None else None
            if decided is not None:
                return decided
        return super().to_bool(obj)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        if node.op == "placeholder" and node.target in self.handed:
            return Handed(node, self)
        value = self.sizes.note(node) if self.sizes is not None else None
        return Number(node, self) if type(value) in (bool, int, float) else Value(node, self)

    # what the example tells of a value

    def rank(self, value: fx.Proxy) -> int | None:
        return self.sizes.rank(value.node) if self.sizes is not None else None

    def shape(self, value: fx.Proxy) -> Shape | None:
        """The sizes of a tensor, each a value of the graph; None where not even its rank is known."""
        rank = self.rank(value)
        if rank is None:
            return None
        # The last one counted from the end, as forwards and rules speak of it.
        dims = (*range(rank - 1), -1) if rank else ()
        return Shape(self.create_proxy("call_method", "size", (value, dim), {}) for dim in dims)

    def dtype_in_example(self, node: fx.Node) -> torch.dtype | None:
        return self.sizes.dtype(node) if self.sizes is not None else None

    def device_in_example(self, node: fx.Node) -> Origins | None:
        return self.sizes.device(node) if self.sizes is not None else None

    def attribute(self, value: fx.Proxy, name: str) -> Any:
        """What ``value.name`` is, where it is no method and known already; None otherwise."""
        if name == "shape":
            return self.shape(value)
        if name == "ndim":
            return self.rank(value)
        known = self.sizes.values.get(value.node) if self.sizes is not None else None
        if isinstance(known, torch.Tensor) and name in ("T", "mT", "H", "mH", "real", "imag", "data"):
            return self.create_proxy("call_function", getattr, (value, name), {})
        return None

    def kind(self, value: fx.Proxy) -> type | None:
        """The class of a value."""
        known = self.sizes.values.get(value.node) if self.sizes is not None else Unknown
        return None if known is Unknown else torch.Tensor if isinstance(known, torch.Tensor) else type(known)

    def count(self, value: fx.Proxy) -> int | None:
        """How many values one stands for, under the assumption that it still does."""
        return self.sizes.count(value.node) if self.sizes is not None else None

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        count, values = self.count(obj), cast(Any, obj)
        return super().iter(obj) if count is None else iter([values[i] for i in range(count)])

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val


def _is_torch_leaf(cls: type[nn.Module]) -> bool:
    return cls.__module__.startswith("torch.nn") and cls not in _TRANSPARENT


def trace_module(
    root: nn.Module,
    arguments: Arguments,
    leaves: Collection[str],
    *,
    facts: Mapping[str, Fact] | None = None,
    example: Mapping[str, Any] | None = None,
) -> Tracer:
    """Trace ``root.forward``, called with ``arguments``.

    ``facts``: those of the arguments, by placeholder name, where an example told them; ``example``: themselves.

    ``root`` is an isolated copy and is used up. Raises Untraceable with the reason where there is no faithful graph.
    """
    tracer = Tracer(root, leaves, facts is not None, facts)
    tracer.begin(arguments, example)
    for module in root.modules():
        if not is_opaque(module):
            module.__dict__[TRACER] = tracer
            # Fused operators serve inference: where the forward asks for the flag, this is the answer assumed.
            module.__dict__["training"] = False
            cls: Any = type(module)
            module.__class__ = watched(cls)
    before = snapshot(root)
    tracer.inlined[""] = root
    run = functools.partial(_call_with_placeholders, tracer, root.forward, arguments.call)
    with preserved(root) as altered:
        return _run(tracer, run, root.forward, lambda: changed(root, before) or altered())


def trace_function(
    function: Callable[..., Any],
    arguments: Arguments,
    facts: Mapping[str, Fact] | None = None,
    example: Mapping[str, Any] | None = None,
) -> Tracer:
    """Trace a plain function; tensors that it finds by name are constants of the graph. The rest as above."""
    if isinstance(function, types.MethodType):
        raise Untraceable("it is a method, of an object that may change: optimize a module, or a function")
    tracer = Tracer(nn.Module(), (), has_example=True, facts=facts)
    tracer.watches_modules = True
    tracer.begin(arguments, example)
    _run(tracer, functools.partial(_call_with_placeholders, tracer, function, arguments.call), function, lambda: None)
    if {id(t) for t in tracer.constants.values()} - tensors_of(names_of([function], tracer.assumed.code)):
        raise Untraceable("reads a tensor that is neither its argument nor found by a name")
    return tracer


def _call_with_placeholders(tracer: Tracer, forward: Callable[..., Any], call: Callable[..., Any]) -> Any:
    def given(opened: dict[str, Any], placeholder: fx.Proxy) -> None:
        tracer.given[id(opened)] = opened, dict(opened), placeholder

    args, kwargs = call(lambda name: tracer.create_proxy("placeholder", name, (), {}), given)
    return forward(*args, **kwargs)


def _run(tracer: Tracer, run: Callable[[], Any], code: Callable[..., Any], altered: Callable[[], str | None]) -> Tracer:
    with LOCK, ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        tracer.patcher = stack.enter_context(_new_patcher())
        _patch_wrapped_functions(tracer.patcher)
        _autowrap_check(tracer.patcher, vars(math), tracer._autowrap_function_ids)
        tracer.patcher.patch(vars(torch), "is_tensor", is_tensor)
        tracer.replaced = asked.patches(tracer.assumed.answers) | factories.patches() | {id(torch.finfo): finfo}
        _patch_replaced(tracer, vars(torch))
        _patch_replaced(tracer, vars(torch.random))
        for asking in ASKING & sys.modules.keys() if tracer.by_value is not None else ():
            tracer.patcher.patch(vars(sys.modules[asking]), "isinstance", is_instance)
        _wrap_functions(tracer, code)
        states = asked.RandomStates()
        try:
            tracer.running = True
            with Recording(tracer):
                result = run()
            tracer.running = False
            check_result(result)
            tracer.create_node("output", "output", (tracer.create_arg(result),), {})
            if tracer.by_value is not None:
                tracer.by_value.drop()
            _drop_decided(tracer)
            _check_handed(tracer)
            tracer.sizes = None  # nothing asks any more
        except Untraceable:
            raise
        except Exception as error:  # whatever a forward may raise when its tensors have no values
            raise Untraceable(explained(error)) from error
        finally:
            tracer.running = False
            moved = states.moved()
            states.put_back()
        if moved:
            raise Untraceable(f"draws or seeds {moved} random numbers other than by an operator")
        name = altered()
        if name is not None:
            raise Untraceable(f"changes {name} when it is called")
    return tracer


def _wrap_functions(tracer: Any, code: Any) -> None:
    """Let math.sqrt on sizes become nodes, and isinstance() answer, where ``code``'s forward was written."""
    forward = getattr(code, "forward", code)
    scope = getattr(getattr(forward, "__func__", forward), "__globals__", {})
    _autowrap_check(tracer.patcher, scope, tracer._autowrap_function_ids)
    # Once only: the patcher undoes its patches in the order in which it made them.
    if scope.get("isinstance") is not is_instance:
        tracer.patcher.patch(scope, "isinstance", is_instance)
        _patch_replaced(tracer, scope)


def _patch_replaced(tracer: Any, scope: dict[str, Any]) -> None:
    for name, value in list(scope.items()):
        if id(value) in tracer.replaced:
            tracer.patcher.patch(scope, name, tracer.replaced[id(value)])


def _drop_decided(tracer: Tracer) -> None:
    """Take out sizes and comparisons that nothing is computed from."""
    if tracer.sizes is None:
        return
    for node in reversed(tracer.graph.nodes):
        if not node.users and type(tracer.sizes.values.get(node)) in (bool, int, float):
            tracer.graph.erase_node(node)


def _check_handed(tracer: Tracer) -> None:
    """Refuse graphs that do more with such an argument than to hand it on."""
    for node in tracer.graph.find_nodes(op="placeholder"):
        if node.target in tracer.handed and any(user.op != "call_module" for user in node.users):
            Handed(node, tracer).refuse()
    for opened, before, handed in tracer.given.values():
        name = str(handed.node.target)
        if not same(contents(opened), contents(before)):
            raise Untraceable(f"changes its argument {tracer.handed[name][0]}")
        if not handed.node.users:
            tracer.graph.erase_node(handed.node)
            del tracer.handed[name]
        elif any(isinstance(v, fx.Proxy) and v.node.users for v in tree_leaves(before)):
            Handed(handed.node, tracer).refuse()  # a module that is called may change the dict that it is given


def _autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _tensors(root: nn.Module) -> Any:
    for path, module in root.named_modules():
        for table in (module._parameters, module._buffers, module.__dict__):
            for name, value in table.items():
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{name}" if path else name, value
