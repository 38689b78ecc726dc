"""The table of spellings: each way to write an op is read as that op, operands by name; other forms are not."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxfuse.normalise import normalise
from fxfuse.ops.activations import ACTIVATIONS as IMPLEMENTED
from fxfuse.ops.activations import activation as implementation
from fxfuse.pattern import Builder
from fxfuse.spellings import ACTIVATIONS, MODULES, OPS, activation, may_spell, spell
from tests.conftest import randn


def node(kind: str, target, *args, **kwargs) -> fx.Node:
    """A call on the arguments of that name."""
    graph = fx.Graph()
    named = {name: graph.placeholder(name) for name in "xyz"}

    def take(value):
        return named.get(value, value) if isinstance(value, str) else value

    return graph.create_node(kind, target, tuple(map(take, args)), {k: take(v) for k, v in kwargs.items()})


def read(call) -> dict:
    return {k: v.name if isinstance(v, fx.Node) else v for k, v in call.args.items()}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_spelling_is_of_one_op(op):
    arguments = ["x", "y", "z", "x"][: len(op.args)]
    for target in op.functions:
        assert spell(node("call_function", target, *arguments)).name == op.name
    for target in op.methods:
        assert spell(node("call_method", target, *arguments)).name == op.name
    for target in op.inplace:
        call = spell(node("call_method" if isinstance(target, str) else "call_function", target, *arguments))
        assert (call.name, call.writes) == (op.name, True), target


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_what_may_be_spelled_is_told_by_the_target(op):
    others = OPS.keys() - {op.name} - ({"relu"} if op.name.startswith("clamp") else set())
    calls = [("call_function", f) for f in op.functions] + [("call_method", name) for name in op.methods]
    for kind, target in calls:
        assert may_spell(node(kind, target, "x"), {op.name})
        assert not may_spell(node(kind, target, "x"), others)
    assert not may_spell(node("placeholder", op.name), {op.name})


@pytest.mark.parametrize("call", [("clamp", "x", 0), ("clamp_min", "x", 0)])
def test_a_clamp_may_be_a_relu(call):
    clamp = node("call_method", *call)
    assert spell(clamp).name == "relu"
    assert may_spell(clamp, {"relu"})


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_functions_and_methods_exist(op):
    for name in (*op.methods, *(i for i in op.inplace if isinstance(i, str))):
        assert hasattr(torch.Tensor, name) or name.removesuffix("_") in ACTIVATIONS, name
    assert op.name in ("contiguous", "size") or callable(op.function)


@pytest.mark.parametrize(
    ("call", "args"),
    [
        (node("call_function", torch.matmul, "x", other="y"), {"input": "x", "other": "y"}),
        (node("call_function", torch.matmul, input="x", other="y"), {"input": "x", "other": "y"}),
        (node("call_method", "mm", "x", mat2="y"), {"input": "x", "mat2": "y"}),
        (node("call_function", torch.add, "x", "y", alpha=2), {"input": "x", "other": "y", "alpha": 2}),
        (node("call_function", torch.add, "x", "y", out=None), {"input": "x", "other": "y", "alpha": 1}),
        (node("call_function", F.linear, "x", "y"), {"input": "x", "weight": "y", "bias": None}),
        (node("call_function", F.linear, "x", weight="y", bias="z"), {"input": "x", "weight": "y", "bias": "z"}),
        (node("call_function", F.gelu, "x", approximate="tanh"), {"input": "x", "approximate": "tanh"}),
        (node("call_function", F.leaky_relu, "x", 0.2, True), {"input": "x", "negative_slope": 0.2}),
        (node("call_function", F.dropout, "x", 0.1, False), {"input": "x", "p": 0.1, "training": False}),
        (node("call_function", torch.dropout, "x", 0.1, train=False), {"input": "x", "p": 0.1, "training": False}),
        (node("call_method", "view", "x", 2, 3), {"input": "x", "shape": (2, 3)}),
        (node("call_method", "view", "x", (2, 3)), {"input": "x", "shape": (2, 3)}),
        (node("call_method", "view", "x", -1), {"input": "x", "shape": (-1,)}),
        (node("call_method", "view", "x", "y"), {"input": "x", "shape": "y"}),
        (node("call_method", "permute", "x", 1, 0), {"input": "x", "dims": (1, 0)}),
        (node("call_function", torch.permute, "x", dims=(1, 0)), {"input": "x", "dims": (1, 0)}),
        (node("call_method", "chunk", "x", 2, dim=-1), {"input": "x", "chunks": 2, "dim": -1}),
        (node("call_method", "split", "x", 4), {"tensor": "x", "split_size_or_sections": 4, "dim": 0}),
        (node("call_function", torch.einsum, "a,b", "x", "y"), {"equation": "a,b", "input": "x", "other": "y"}),
        (
            node("call_function", torch.addmm, "x", "y", "z", beta=0),
            {"input": "x", "mat1": "y", "mat2": "z", "beta": 0, "alpha": 1},
        ),
        (node("call_method", "clamp", "x", min=0), {"input": "x"}),
        (node("call_function", torch.clamp_min, "x", 0.0), {"input": "x"}),
        (node("call_function", F.softplus, "x", 2), {"input": "x", "beta": 2, "threshold": 20}),
        (node("call_function", operator.getitem, "x", 0), {"input": "x", "index": 0}),
        (node("call_function", getattr, "x", "T"), {"input": "x", "name": "T"}),
    ],
)
def test_operands_by_name(call, args):
    assert read(spell(call)) == args


@pytest.mark.parametrize(
    "call",
    [
        node("call_function", torch.matmul, "x"),
        node("call_function", torch.matmul, "x", "y", "z"),
        node("call_function", torch.add, "x", "y", surprise=1),
        node("call_function", torch.add, "x", input="y", other="z"),
        node("call_function", F.linear, "x", "y", "z", 1, 2),
        node("call_function", torch.einsum, "a,b,c", "x", "y", "z", "x"),
        node("call_function", torch.bmm, "x", "y"),
        node("call_function", torch.baddbmm, "x", "y", "z"),
        node("call_method", "softmax", "x", -1),
        node("call_module", "fc", "x"),
        node("get_attr", "w"),
    ],
)
def test_other_forms_are_no_op(call):
    assert spell(call) is None


@pytest.mark.parametrize("value", [None, 1, 0.5, "x", (1, 2), torch.relu])
def test_what_is_no_node_is_no_call(value):
    assert spell(value) is None


@pytest.mark.parametrize(
    ("call", "writes"),
    [
        (node("call_function", F.relu, "x"), False),
        (node("call_function", F.relu, "x", inplace=False), False),
        (node("call_function", F.relu, "x", inplace=True), True),
        (node("call_function", F.relu, "x", True), True),
        (node("call_function", F.elu, "x", 1.0, True), True),
        (node("call_method", "relu_", "x"), True),
        (node("call_function", operator.iadd, "x", "y"), True),
        (node("call_function", torch.add, "x", "y", out="z"), True),
        (node("call_function", torch.add, "x", "y", out=None), False),
        (node("call_method", "clamp_", "x", 0), True),
    ],
)
def test_in_place(call, writes):
    assert spell(call).writes == writes


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (node("call_method", "clamp", "x", 0), "relu"),
        (node("call_method", "clamp", "x", 0, None), "relu"),
        (node("call_method", "clamp", "x", 0, 6), "clamp"),
        (node("call_method", "clamp", "x", 1), "clamp"),
        (node("call_method", "clamp", "x", max=0), "clamp"),
        (node("call_method", "clamp", "x", "y"), "clamp"),
        (node("call_function", torch.clamp_min, "x", "y"), "clamp_min"),
    ],
)
def test_clamp_at_zero_is_relu(call, name):
    assert spell(call).name == name


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_is_implemented_under_its_name(name):
    call = spell(node("call_function", OPS[name].function, "x"))
    known, arguments = activation(call)
    assert known in IMPLEMENTED
    x = randn(1, 5, 7, dtype=torch.float64)
    torch.testing.assert_close(implementation(known).function(x, *arguments), OPS[name].function(x))


@pytest.mark.parametrize("name", [n for n in IMPLEMENTED if n != "gelu_tanh"])
def test_every_implementation_has_a_spelling(name):
    assert name in ACTIVATIONS


@pytest.mark.parametrize("cls", MODULES, ids=lambda cls: cls.__name__)
def test_modules_are_their_functions(cls):
    arguments = {nn.LeakyReLU: (0.3,), nn.ELU: (0.3,), nn.Softplus: (2, 3), nn.GELU: ("tanh",)}.get(cls, ())
    module = cls(*arguments)
    graph = fx.Graph()
    graph.output(graph.call_module("act", (graph.placeholder("x"),)))
    gm = fx.GraphModule({"act": module}, graph)
    assert normalise(gm, lambda m: True, training=False) == {"act": module}
    gm.recompile()
    assert not [n for n in gm.graph.nodes if n.op == "call_module"]
    x = randn(1, 5, 8)
    torch.testing.assert_close(gm(x), module(x), rtol=0, atol=0)


def test_a_subclass_has_a_forward_of_its_own():
    class Loud(nn.ReLU):
        def forward(self, x):
            return super().forward(x) + 1

    graph = fx.Graph()
    graph.output(graph.call_module("act", (graph.placeholder("x"),)))
    gm = fx.GraphModule({"act": Loud()}, graph)
    assert not normalise(gm, lambda m: True, training=False)


def test_an_unknown_op_is_named():
    with pytest.raises(AttributeError, match="no op is called 'linaer'"):
        Builder().__getattr__("linaer")
