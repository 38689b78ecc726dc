"""THE table: every op that rules speak of, how models spell it, its argument names, defaults and symmetry.

A rule says ``op.matmul(x, w)``; whether the model wrote ``x @ w``, ``torch.matmul(x, w)`` or ``x.matmul(other=w)`` is
settled here and nowhere else. Modules are spelled as functions of their parameters by ``normalise.py`` first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxfuse.ops import activations

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Op:
    """One operation under its canonical name."""

    name: str
    args: tuple[str, ...]
    """Operand names in positional order."""
    functions: tuple[Callable, ...] = ()
    methods: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    commutative: bool = False
    """The first two operands may change places, as long as every other argument is at its default."""
    inplace: tuple[Callable | str, ...] = ()
    """Spellings that write their result into the first operand."""
    canonical: Callable | None = None
    """The function that normalised and rewritten graphs call; the first of ``functions`` unless said otherwise."""

    @property
    def function(self) -> Callable:
        return self.canonical or self.functions[0]


@dataclass(frozen=True)
class Call:
    """A node read as an op: its operands by name, defaults filled in."""

    op: Op
    node: fx.Node
    args: dict[str, Any]
    writes: bool = False
    """The spelling writes its first operand, or the tensor given as ``out``."""

    @property
    def name(self) -> str:
        return self.op.name


def _unary(
    name: str, *functions: Callable, inplace: tuple = (), defaults: Mapping[str, Any] | None = None, args: tuple = ()
) -> Op:
    return Op(name, ("input", *args), functions, (name,), defaults or {}, inplace=(*inplace, name + "_"))


ACTIVATION_OPS = (
    _unary("relu", F.relu, torch.relu, aten.relu.default, inplace=(torch.relu_, F.relu_)),
    Op("gelu", ("input",), (F.gelu, aten.gelu.default), (), {"approximate": "none"}),
    _unary("silu", F.silu, aten.silu.default),
    _unary("sigmoid", torch.sigmoid, F.sigmoid, torch.special.expit, aten.sigmoid.default, inplace=(torch.sigmoid_,)),
    _unary("tanh", torch.tanh, F.tanh, aten.tanh.default, inplace=(torch.tanh_,)),
    _unary(
        "leaky_relu",
        F.leaky_relu,
        aten.leaky_relu.default,
        inplace=(F.leaky_relu_,),
        args=("negative_slope",),
        defaults={"negative_slope": 0.01},
    ),
    _unary("elu", F.elu, inplace=(F.elu_,), args=("alpha",), defaults={"alpha": 1.0}),
    _unary("hardswish", F.hardswish, aten.hardswish.default),
    _unary("hardsigmoid", F.hardsigmoid, aten.hardsigmoid.default),
    Op(
        "softplus",
        ("input", "beta", "threshold"),
        (F.softplus, aten.softplus.default),
        (),
        {"beta": 1, "threshold": 20},
    ),
    _unary("mish", F.mish, aten.mish.default),
    Op("relu2", ("input",), (activations.relu2,)),
    Op("quick_gelu", ("input", "scale"), (activations.quick_gelu,), (), {"scale": 1.702}),
)
"""What may follow a projection inside one operator. Order of arguments as in ``fxfuse.ops.activations``."""

ACTIVATIONS = tuple(op.name for op in ACTIVATION_OPS)

OPS = {
    op.name: op
    for op in (
        *ACTIVATION_OPS,
        Op("linear", ("input", "weight", "bias"), (F.linear, aten.linear.default), (), {"bias": None}),
        Op(
            "matmul", ("input", "other"), (torch.matmul, operator.matmul, aten.matmul.default), ("matmul", "__matmul__")
        ),
        Op("mm", ("input", "mat2"), (torch.mm, aten.mm.default), ("mm",)),
        Op(
            "addmm",
            ("input", "mat1", "mat2"),
            (torch.addmm, aten.addmm.default),
            ("addmm",),
            {"beta": 1, "alpha": 1},
            inplace=("addmm_",),
        ),
        Op("einsum", ("equation", "input", "other"), (torch.einsum,)),
        Op("tensordot", ("a", "b", "dims"), (torch.tensordot,), (), {"dims": 2}),
        Op(
            "add",
            ("input", "other"),
            (torch.add, operator.add, aten.add.Tensor),
            ("add", "__add__", "__radd__"),
            {"alpha": 1},
            True,
            (operator.iadd, "add_", "__iadd__"),
        ),
        Op(
            "sub",
            ("input", "other"),
            (torch.sub, operator.sub, torch.subtract, aten.sub.Tensor),
            ("sub", "subtract", "__sub__"),
            {"alpha": 1},
            False,
            (operator.isub, "sub_", "__isub__"),
        ),
        Op(
            "mul",
            ("input", "other"),
            (torch.mul, operator.mul, torch.multiply, aten.mul.Tensor),
            ("mul", "multiply", "__mul__", "__rmul__"),
            {},
            True,
            (operator.imul, "mul_", "__imul__"),
        ),
        Op(
            "div",
            ("input", "other"),
            (torch.div, operator.truediv, torch.true_divide, torch.divide, aten.div.Tensor),
            ("div", "divide", "true_divide", "__truediv__"),
            {"rounding_mode": None},
            False,
            (operator.itruediv, "div_"),
        ),
        Op("neg", ("input",), (torch.neg, operator.neg, torch.negative), ("neg", "negative", "__neg__")),
        Op(
            "pow",
            ("input", "exponent"),
            (torch.pow, operator.pow, aten.pow.Tensor_Scalar),
            ("pow", "__pow__"),
            {},
            False,
            ("pow_",),
        ),
        Op("square", ("input",), (torch.square,), ("square",), {}, False, ("square_",)),
        Op("exp", ("input",), (torch.exp,), ("exp",), {}, False, ("exp_",)),
        Op("erf", ("input",), (torch.erf, torch.special.erf), ("erf",), {}, False, ("erf_",)),
        Op(
            "clamp",
            ("input", "min", "max"),
            (torch.clamp, torch.clip),
            ("clamp", "clip"),
            {"min": None, "max": None},
            False,
            ("clamp_", "clip_"),
        ),
        Op("clamp_min", ("input", "min"), (torch.clamp_min,), ("clamp_min",), {}, False, ("clamp_min_",)),
        Op("t", ("input",), (torch.t, aten.t.default), ("t",)),
        Op(
            "transpose",
            ("input", "dim0", "dim1"),
            (torch.transpose, torch.swapaxes, torch.swapdims, aten.transpose.int),
            ("transpose", "swapaxes", "swapdims"),
        ),
        Op("permute", ("input", "dims"), (torch.permute,), ("permute",)),
        Op("reshape", ("input", "shape"), (torch.reshape,), ("reshape", "view")),
        Op(
            "flatten",
            ("input", "start_dim", "end_dim"),
            (torch.flatten,),
            ("flatten",),
            {"start_dim": 0, "end_dim": -1},
        ),
        Op("unflatten", ("input", "dim", "sizes"), (torch.unflatten,), ("unflatten",)),
        Op("contiguous", ("input",), (), ("contiguous",), {"memory_format": torch.contiguous_format}),
        Op(
            "dropout",
            ("input", "p", "training"),
            (F.dropout, torch.dropout),
            (),
            {"p": 0.5, "training": True, "inplace": False},
        ),
        Op(
            "chunk",
            ("input", "chunks", "dim"),
            (torch.chunk, torch.tensor_split),
            ("chunk", "tensor_split"),
            {"dim": 0},
        ),
        Op("split", ("tensor", "split_size_or_sections", "dim"), (torch.split,), ("split",), {"dim": 0}),
        Op(
            "split_with_sizes",
            ("input", "split_sizes", "dim"),
            (torch.split_with_sizes,),
            ("split_with_sizes",),
            {"dim": 0},
        ),
        Op("narrow", ("input", "dim", "start", "length"), (torch.narrow,), ("narrow",)),
        Op("getitem", ("input", "index"), (operator.getitem,), ("__getitem__",)),
        Op("getattr", ("input", "name"), (getattr,)),
        Op("size", ("input", "dim"), (), ("size",), {"dim": None}),
        Op("glu", ("input", "dim"), (F.glu, aten.glu.default), (), {"dim": -1}),
    )
}
"""Every op by its canonical name."""

_BY_FUNCTION = {f: (op, False) for op in OPS.values() for f in op.functions} | {
    f: (op, True) for op in OPS.values() for f in op.inplace if callable(f)
}
_BY_METHOD = {name: (op, False) for op in OPS.values() for name in op.methods} | {
    name: (op, True) for op in OPS.values() for name in op.inplace if isinstance(name, str)
}

# Tensor.softplus and Tensor.glu do not exist; relu, sigmoid and tanh do, the other activations are functions only.
_KEYWORD_ALIASES = {"mat2": "other", "tensors": "input", "self": "input", "x": "input", "train": "training"}


def spell(node: Any) -> Call | None:
    """Read a node as one of ``OPS``, or None where it is something else."""
    found = _spelling(node) if isinstance(node, fx.Node) else None
    if found is None:
        return None
    op, writes = found
    args = _named(op, node)
    if args is None:
        return None
    writes = writes or args.pop("inplace", False) is True or node.kwargs.get("out") is not None
    if op.name in ("clamp", "clamp_min") and args["min"] == 0 and args.get("max") is None:
        op, args = OPS["relu"], {"input": args["input"]}
    return Call(op, node, args, writes)


def _spelling(node: fx.Node) -> tuple[Op, bool] | None:
    """The op that a node's target spells, and whether in place."""
    spellings: Mapping[Any, tuple[Op, bool]] = (
        _BY_FUNCTION if node.op == "call_function" else _BY_METHOD if node.op == "call_method" else {}
    )
    return spellings.get(node.target)


def may_spell(node: fx.Node, names: Collection[str]) -> bool:
    """Whether ``spell`` may read a node as an op of one of these names: told by its target alone, which is quick."""
    found = _spelling(node)
    if found is None:
        return False
    return found[0].name in names or (found[0].name in ("clamp", "clamp_min") and "relu" in names)


def _named(op: Op, node: fx.Node) -> dict[str, Any] | None:
    """Operands by name; None where the call has a form that the table does not know (so nothing is assumed of it)."""
    positional = node.args
    if op.name == "einsum" and len(positional) == 2 and isinstance(positional[1], (list, tuple)):
        positional = (positional[0], *positional[1])
    if op.name in ("reshape", "permute", "unflatten") and len(positional) > len(op.args) - 1:
        # view(2, 3) and view((2, 3)) are the same call
        head, rest = positional[: len(op.args) - 1], positional[len(op.args) - 1 :]
        positional = (*head, rest[0] if len(rest) == 1 and not isinstance(rest[0], int) else tuple(rest))
    # torch.nn.functional takes ``inplace`` as the last positional argument; torch's other options are keywords.
    names = op.args if node.op == "call_method" else (*op.args, "inplace")
    if len(positional) > len(names):
        return None
    named = dict(zip(names, positional, strict=False))
    for key, value in node.kwargs.items():
        if key == "out":  # the op is the same; that it writes into a tensor is looked at by ``spell`` and the engine
            continue
        key = key if key in names else _KEYWORD_ALIASES.get(key, key)
        if key in named:
            return None
        named[key] = value
    named = {**op.defaults, **named}
    known = {*op.args, *op.defaults, "inplace"}
    if not isinstance(named.get("inplace", False), bool):
        return None
    if not known.issuperset(named) or not set(op.args).issubset(named):
        return None
    return named


def activation(call: Call) -> tuple[str, tuple[float, ...]]:
    """The name and arguments that ``fxfuse.ops`` know an activation call by."""
    if call.name == "gelu":
        return ("gelu_tanh" if call.args["approximate"] == "tanh" else "gelu"), ()
    return call.name, tuple(call.args[name] for name in call.op.args[1:])


def _no_arguments(module: nn.Module) -> dict[str, Any]:
    return {}


MODULES: dict[type[nn.Module], tuple[str, Callable[[Any], dict[str, Any]]]] = {
    nn.ReLU: ("relu", lambda m: {"inplace": m.inplace}),
    nn.GELU: ("gelu", lambda m: {"approximate": m.approximate}),
    nn.SiLU: ("silu", lambda m: {"inplace": m.inplace}),
    nn.Sigmoid: ("sigmoid", _no_arguments),
    nn.Tanh: ("tanh", _no_arguments),
    nn.LeakyReLU: ("leaky_relu", lambda m: {"negative_slope": m.negative_slope, "inplace": m.inplace}),
    nn.ELU: ("elu", lambda m: {"alpha": m.alpha, "inplace": m.inplace}),
    nn.Hardswish: ("hardswish", lambda m: {"inplace": m.inplace}),
    nn.Hardsigmoid: ("hardsigmoid", lambda m: {"inplace": m.inplace}),
    nn.Softplus: ("softplus", lambda m: {"beta": m.beta, "threshold": m.threshold}),
    nn.Mish: ("mish", lambda m: {"inplace": m.inplace}),
    nn.GLU: ("glu", lambda m: {"dim": m.dim}),
}
"""Modules without parameters that are an op with the arguments that they keep as attributes."""
