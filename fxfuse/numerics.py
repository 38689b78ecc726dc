"""When is an answer right? By measurement: against a float64 run of the same graph, within what eager itself misses.

For fxfuse's answer y, eager's answer e, the float64 answer r and the scale m on which rounding errors arise (for a
linear layer |x| |W|^T + |b|), with eps of y's dtype:

    ||y - r|| <= 2 ||e - r|| + 4 eps ||m||  (Frobenius),  and  |y - r| <= 2 |e - r| + 8 eps m  for every element.

In float64 eager is the reference: r = e. NaN and inf stand where eager has them and nowhere else.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_map

from fxfuse.amplifying import AMPLIFYING, Rule
from fxfuse.ops.gpu.portable import allows_tf32

_NORM_EPS = 4
_ELEMENT_EPS = 8


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison; true if the answer is right."""

    reason: str = ""
    """What is wrong and by how much; empty if nothing is."""
    norm_used: float = 0.0
    """The share of the allowed error that ||y - r|| took: above 1 is wrong."""
    element_used: float = 0.0
    """The largest share that an element's |y - r| took of its own allowance."""

    def __bool__(self) -> bool:
        return not self.reason


def excess(y: Tensor, e: Tensor, r: Tensor, magnitude: Tensor, *, elements: bool = True) -> Verdict:
    """Judge y against eager's e, by the rule at the top of this module; without ``elements``, by the norm alone.

    y and e have one shape, dtype and device; r and magnitude that shape, in float64 (complex128 for complex r).
    Integers and booleans must be equal. Elements where e is finite but r or magnitude is not are left out of the norm.
    """
    for what in ("shape", "dtype", "device"):
        got, expected = getattr(y, what), getattr(e, what)
        if got != expected:
            return Verdict(f"{what} is {got}, eager's is {expected}", float("inf"), float("inf"))
    if not (y.is_floating_point() or y.is_complex()):
        return _equal(y, e)
    misplaced = _misplaced(y, e)
    if misplaced:
        return Verdict(misplaced, float("inf"), float("inf"))
    eps = _epsilon(y)
    y, e, magnitude = _wide(y), _wide(e), magnitude.to(y.device)
    r = e if eps == torch.finfo(torch.float64).eps else r.to(y.device)
    judged = e.isfinite() & r.isfinite() & magnitude.isfinite()
    error, eager_error, m = (t.masked_fill(~judged, 0) for t in ((y - r).abs(), (e - r).abs(), magnitude))
    norm_allowed = 2 * eager_error.norm() + _NORM_EPS * eps * m.norm()
    element_allowed = 2 * eager_error + _ELEMENT_EPS * eps * m
    norm_used = _share(error.norm(), norm_allowed).item()
    shares = _share(error, element_allowed)
    element_used = shares.max().item() if shares.numel() else 0.0
    reason = ""
    if elements and element_used > 1:
        at = tuple(int(i) for i in torch.unravel_index(shares.argmax(), shares.shape))
        reason = (
            f"element {list(at)} is {y[at].item():.9g}, float64 has {r[at].item():.9g} and eager {e[at].item():.9g}: "
            f"off by {error[at].item():.3g} where {element_allowed[at].item():.3g} is allowed "
            f"({int((shares > 1).sum())} of {shares.numel()} elements are outside)"
        )
    elif norm_used > 1:
        reason = f"the norm of the error is {error.norm().item():.3g}, {norm_allowed.item():.3g} is allowed"
    return Verdict(reason, norm_used, element_used)


def _epsilon(y: Tensor) -> float:
    """Of y's dtype, or of TF32, where products of float32 on this device may be TF32's: eager then rounds to that."""
    if y.dtype is torch.float32 and y.is_cuda and allows_tf32():
        return 2.0**-10
    return torch.finfo(y.dtype).eps


def judge(y: Any, e: Any, r: Any, magnitude: Any, *, elements: bool = True) -> Verdict:
    """`excess` over equal structures (tuples, dicts, dataclasses) of tensors: the first wrong, or the closest call.

    What is no tensor must be equal.
    """
    flats = [tree_flatten(_opened(tree)) for tree in (y, e, r, magnitude)]
    if flats[0][1] != flats[1][1]:
        return Verdict(f"the output is {flats[0][1]}, eager's is {flats[1][1]}", float("inf"), float("inf"))
    verdict = Verdict()
    for index, (got, expected, exact, scale) in enumerate(zip(*(leaves for leaves, _ in flats), strict=True)):
        if isinstance(expected, Tensor) and isinstance(got, Tensor):
            one = excess(got, expected, exact, scale, elements=elements)
        else:
            one = Verdict("" if got == expected else f"is {got!r}, eager's is {expected!r}")
        if not one:
            return Verdict(f"output {index}: {one.reason}", one.norm_used, one.element_used)
        verdict = max(verdict, one, key=lambda v: max(v.norm_used, v.element_used))
    return verdict


def _opened(tree: Any) -> Any:
    """Dataclasses as dicts of their fields; pytree takes those that nobody registered for leaves."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, dict | type):
        return {field.name: _opened(getattr(tree, field.name)) for field in dataclasses.fields(tree)}
    if type(tree) in (tuple, list):
        return type(tree)(map(_opened, tree))
    return {key: _opened(value) for key, value in tree.items()} if type(tree) is dict else tree


def _equal(y: Tensor, e: Tensor) -> Verdict:
    differ = int((y != e).sum())
    return Verdict(f"{differ} of {y.numel()} elements differ from eager's" if differ else "")


def _misplaced(y: Tensor, e: Tensor) -> str:
    for what, where in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        if y.is_complex() and where is not torch.isnan:
            continue
        here, there = where(y), where(e)
        moved = int((here != there).sum())
        if moved:
            return f"{what} in {int(here.sum())} elements, in eager's answer in {int(there.sum())}; {moved} differ"
    return ""


def _share(error: Tensor, allowed: Tensor) -> Tensor:
    """error / allowed, where 0 / 0 is no error."""
    return torch.where(error == 0, torch.zeros_like(error), error / allowed)


# fmt: off
# What the reference knows of an op, by its plain name; see `reference` for what it means.
_MULTILINEAR = frozenset({
    "linear", "matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "einsum", "tensordot", "conv1d",
    "conv2d", "conv3d", "bilinear",
})
_ACTIVATIONS = frozenset({
    "sigmoid", "tanh", "hardsigmoid", "hardtanh", "relu", "relu6", "gelu", "silu", "leaky_relu", "leakyrelu", "elu",
    "hardswish", "softplus", "mish", "quick_gelu", "clamp", "clip", "clamp_min", "clamp_max",
})
_ARITHMETIC = frozenset({"add", "sub", "mul", "div", "neg", "pow", "square", "relu2"})
# Views, and what else is linear with coefficients that are not negative.
_SAME = frozenset({
    "view", "unsafe_view", "alias", "slice", "to_copy", "reshape", "view_as", "reshape_as", "transpose", "t",
    "permute", "swapaxes", "swapdims",
    "movedim", "flatten", "unflatten", "ravel", "chunk", "split", "tensor_split", "unbind", "narrow",
    "select", "getitem", "index_select", "squeeze", "unsqueeze", "expand", "expand_as", "repeat", "cat",
    "concat", "stack", "contiguous", "clone", "detach", "to", "type_as", "float", "double", "half",
    "bfloat16", "getattr", "identity", "dropout", "sum", "mean",
})
# fmt: on
_OPERATORS = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "imatmul": "matmul", "ipow": "pow"}
_ALIASES = _OPERATORS | {"subtract": "sub", "multiply": "mul", "truediv": "div", "divide": "div", "negative": "neg"}


def reference(
    graph_module: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> tuple[Any, Any]:
    """Run graph_module's graph in float64; returns (r, magnitude), both of the structure of its output.

    Floating inputs, parameters and buffers are copied to float64 (complex ones to complex128) as they are read, and so
    is what casts and factories inside the graph make. `args` and `kwargs` are the module's own arguments; neither they
    nor the module change. Random ops draw other numbers than in eager: the graph must be deterministic.

    The magnitude of a tensor is defined op by op: a product of matrices has |x| |W| + |b|; an activation its input's;
    a * b has mag(a) |b| + |a| mag(b); a + b the sum; a view the same view. Anything else, inputs and weights included,
    has |value|, and what another op computed at least its root mean square over the last dimension, because a norm or
    a softmax has no smaller error scale than its row.
    """
    interpreter = _Reference(graph_module)
    with torch.no_grad():
        r = interpreter.run(*_positional(graph_module.graph, args, kwargs or {}))
    graph = graph_module.graph
    return r, graph.process_outputs(interpreter.magnitudes[graph.output_node()])


def _positional(graph: fx.Graph, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    values = list(args)
    for node in graph.find_nodes(op="placeholder")[len(values) :]:
        if node.target in kwargs:
            values.append(kwargs[node.target])
        elif node.args:
            values.append(node.args[0])
    return values


class _Reference(fx.Interpreter):
    """Runs a graph in float64 and keeps each node's magnitude beside its value."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.magnitudes: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        # Before the node runs: an in-place op overwrites what its magnitude is made of.
        magnitude = self._from_inputs(n) if n.op.startswith("call_") else None
        value = super().run_node(n)
        if n.op == "output":
            magnitude = fx.map_arg(n.args[0], self.magnitudes.__getitem__)
        elif magnitude is None:
            magnitude = tree_map(_absolute if n.op in ("placeholder", "get_attr") else _row_scale, _opened(value))
        elif isinstance(value, Tensor):
            # sigmoid(0) is 1/2 though the magnitude of 0 is 0.
            magnitude = torch.maximum(magnitude, _abs(value))
        self.magnitudes[n] = magnitude
        if n.op in ("call_function", "call_method") and n.args and isinstance(n.args[0], fx.Node) and self._writes(n):
            self.magnitudes[n.args[0]] = magnitude
        elif n.target is operator.setitem:
            self._assign(*n.args)
        for done in self.user_to_last_uses.get(n, ()) if n.op != "output" else ():
            self.magnitudes.pop(done, None)  # a whole model's would take its activations' memory many times over
        return value

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return tree_map(_wide_copy, super().placeholder(target, args, kwargs))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return tree_map(_wide_copy, super().get_attr(target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return tree_map(_wide, super().call_function(target, *tree_map(_wide_dtype, (args, kwargs))))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in ("float", "half", "bfloat16"):
            target = "double"
        return tree_map(_wide, super().call_method(target, *tree_map(_wide_dtype, (args, kwargs))))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return tree_map(_wide, self._call_leaf(target, _wide_copy, args, kwargs))

    def _call_leaf(self, target: Any, convert: Callable[[Any], Any], args: Any, kwargs: Any) -> Any:
        """Call the leaf module at `target` with convert(t) for each of its parameters and buffers."""
        leaf = self.fetch_attr(target)
        state = {**dict(leaf.named_parameters()), **dict(leaf.named_buffers())}
        return functional_call(leaf, {name: convert(tensor) for name, tensor in state.items()}, args, kwargs)

    def _op_name(self, n: fx.Node) -> str:
        """The name of what n calls: add for operator.add and torch.ops.aten.add.Tensor, add_ for Tensor.add_."""
        if n.op == "call_module":
            return type(self.fetch_attr(str(n.target))).__name__.lower()
        name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
        return name.split(".")[0]

    def _writes(self, n: fx.Node) -> bool:
        name = self._op_name(n)
        return name in _OPERATORS or (name.endswith("_") and not name.endswith("__"))

    def _assign(self, written: Any, key: Any, value: Any) -> None:
        """The items of a tensor that were assigned to have the magnitude of what they hold now."""
        scale = self.magnitudes[written].clone()  # which may be that of another node as well
        of_value: Any = fx.map_arg(value, self.magnitudes.__getitem__)
        scale[self.map_nodes_to_values(key, written)] = of_value if isinstance(of_value, Tensor) else abs(of_value)
        self.magnitudes[written] = scale

    def _from_inputs(self, n: fx.Node) -> Any:
        """The magnitude of n's output where it follows from n's inputs, else None."""
        name = self._op_name(n).strip("_")
        name = _ALIASES.get(name, name)
        args, kwargs = self._magnitudes_of(n)
        if name in _SAME:
            return self._rerun(n, args, kwargs)
        if dataclasses.is_dataclass(n.target):  # a graph builds it from keywords
            # One that is a dict as well holds its fields but for None.
            is_dict = isinstance(n.target, type) and issubclass(n.target, dict)
            return {key: scale for key, scale in kwargs.items() if scale is not None} if is_dict else kwargs
        if name == "glu":
            return self._glu(n)
        if name in AMPLIFYING:
            return self._amplified(n, AMPLIFYING[name])
        if name in _ACTIVATIONS:
            scale = args[0] if args else kwargs["input"]
            return scale
        if name in _MULTILINEAR:
            args, kwargs = tree_map(_absolute, self.map_nodes_to_values((n.args, n.kwargs), n))
            return self._rerun(n, args, {key: abs(v) if key in ("alpha", "beta") else v for key, v in kwargs.items()})
        if name in _ARITHMETIC:
            values: Any = self.map_nodes_to_values([*n.args, *n.kwargs.values()], n)
            if not any(isinstance(value, Tensor) for value in values):
                return None  # arithmetic on sizes
            scales = [_abs(scale) for scale in [*args, *kwargs.values()] if isinstance(scale, Tensor | int | float)]
            return _arithmetic(name, values, scales, abs(kwargs.get("alpha", 1)))
        return None

    def _amplified(self, n: fx.Node, scale_of: Rule) -> Tensor | None:
        """Of an op whose error scale is its operands' times what their values make of it; None in an unusual form."""
        values: Any = self.map_nodes_to_values((n.args, n.kwargs), n)
        scales = self._magnitudes_of(n)
        if n.op == "call_module":
            leaf: Any = self.fetch_attr(str(n.target))
            wide = {name: _wide_copy(t) for name, t in leaf.named_parameters()}
            values = ((*values[0], leaf.normalized_shape), {**values[1], **wide, "eps": leaf.eps})
        try:
            found = scale_of(scales[0], *values[0], **values[1])
        except (TypeError, RuntimeError, IndexError):  # operands by name, nested or grouped
            return None
        return None if found is None else torch.maximum(found[0], _row_scale(found[1]))

    def _glu(self, n: fx.Node) -> Tensor:
        """a * sigmoid(b), where the error of the sigmoid is at most that of b."""
        dim = n.args[1] if len(n.args) > 1 else n.kwargs.get("dim", -1)
        source: Any = n.args[0] if n.args else n.kwargs["input"]
        (a, _), (scale, of_gate) = (t.chunk(2, dim) for t in (self.env[source], self.magnitudes[source]))
        return scale + a.abs() * of_gate

    def _magnitudes_of(self, n: fx.Node) -> tuple[Any, Any]:
        """n.args and n.kwargs with the magnitude of each node in its place."""
        args: Any = fx.map_arg(n.args, self.magnitudes.__getitem__)
        kwargs: Any = fx.map_arg(n.kwargs, self.magnitudes.__getitem__)
        return args, kwargs

    def _rerun(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """n's op on other operands; a leaf module with the absolute values of its parameters."""
        if n.op == "call_module":
            return self._call_leaf(n.target, lambda tensor: _absolute(_wide_copy(tensor)), args, kwargs)
        return getattr(self, n.op)(n.target, args, kwargs)


def _arithmetic(name: str, values: list[Any], scales: list[Any], alpha: float) -> Any:
    """First-order error scale of an elementwise op; values and scales are its operands and their magnitudes."""
    if name == "neg":
        return scales[0]
    if name in ("add", "sub"):
        return scales[0] + alpha * scales[1]
    if name in ("pow", "square", "relu2"):
        a, exponent = (*values, 2)[:2]
        if isinstance(exponent, Tensor) or not isinstance(a, Tensor):
            return None
        return abs(exponent) * a.abs() ** (exponent - 1) * scales[0]
    a, b = values[:2]
    if name == "mul":
        return scales[0] * _abs(b) + _abs(a) * scales[1]
    return scales[0] / _abs(b) + _abs(a) * scales[1] / _abs(b) ** 2


def _abs(value: Any) -> Any:
    """Of a number or a tensor; torch has none of booleans, which are masks: they count as 0 and 1."""
    if isinstance(value, Tensor) and value.dtype is torch.bool:
        return value.double()
    return abs(value)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _wide(value: Any) -> Any:
    """Floating tensors in float64, complex ones in complex128, anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    if value.is_complex():
        return value.to(torch.complex128)
    return value.to(torch.float64) if value.is_floating_point() else value


def _wide_copy(value: Any) -> Any:
    """The same, never the caller's own memory: the graph may write to it."""
    return _wide(value.detach().clone()) if isinstance(value, Tensor) else value


def _wide_dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _absolute(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.abs() if value.is_floating_point() or value.is_complex() else value
    return value


def _row_scale(value: Any) -> Any:
    """|value|, but at least its root mean square over the last dimension; NaN and inf stay out of the mean."""
    scale = _absolute(value)
    if not _is_real(scale) or scale.ndim == 0 or not scale.numel():
        return scale
    finite = scale.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return torch.maximum(scale, finite.square().mean(-1, keepdim=True).sqrt())
