"""The dependence graph: who writes which memory, who shares it, and what lies between the parts of a match."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxfuse.dependence import OUTSIDE, Dependence
from tests.conftest import Written, randn


def graph_of(*calls, modules=()) -> tuple[Dependence, dict[str, fx.Node]]:
    """Nodes x, y (arguments), w (a parameter), then one for each (name, kind, target, args, kwargs)."""
    root = nn.Module()
    root.w = nn.Parameter(randn(1, 6, 6))
    for name, module in modules:
        root.add_module(name, module)
    graph = fx.Graph()
    nodes = {"x": graph.placeholder("x"), "y": graph.placeholder("y"), "w": graph.get_attr("w")}
    for name, kind, target, args, *kwargs in calls:

        def take(value):
            return nodes.get(value, value) if isinstance(value, str) else value

        nodes[name] = graph.create_node(
            kind, target, tuple(map(take, args)), {k: take(v) for k, v in (kwargs[0] if kwargs else {}).items()}, name
        )
    graph.output(nodes[name])
    return Dependence(fx.GraphModule(root, graph)), nodes


@torch.library.custom_op("fxfuse_tests::halve", mutates_args=("x",))
def halve(x: torch.Tensor) -> None:
    x.div_(2)


WRITES = {
    "a custom operator": ("call_function", torch.ops.fxfuse_tests.halve, ("h",)),
    "an overload of it": ("call_function", torch.ops.fxfuse_tests.halve.default, ("h",)),
    "add_": ("call_method", "add_", ("h", 1)),
    "relu_": ("call_method", "relu_", ("h",)),
    "zero_": ("call_method", "zero_", ("h",)),
    "copy_": ("call_method", "copy_", ("h", "x")),
    "__setitem__": ("call_method", "__setitem__", ("h", 0, 1)),
    "__iadd__": ("call_method", "__iadd__", ("h", "x")),
    "__ior__": ("call_method", "__ior__", ("h", "x")),
    "fill_": ("call_method", "fill_", ("h", 0)),
    "masked_fill_": ("call_method", "masked_fill_", ("h", "x", 0)),
    "index_put_": ("call_method", "index_put_", ("h", "x", "y")),
    "clamp_": ("call_method", "clamp_", ("h", 0)),
    "torch.relu_": ("call_function", torch.relu_, ("h",)),
    "F.relu_": ("call_function", F.relu_, ("h",)),
    "F.relu, inplace=True": ("call_function", F.relu, ("h",), {"inplace": True}),
    "F.silu, inplace=True": ("call_function", F.silu, ("h",), {"inplace": True}),
    "F.dropout, inplace=True": ("call_function", F.dropout, ("h",), {"inplace": True}),
    "F.relu, by position": ("call_function", F.relu, ("h", True)),
    "F.silu, by position": ("call_function", F.silu, ("h", True)),
    "F.elu, by position": ("call_function", F.elu, ("h", 1.0, True)),
    "F.dropout, by position": ("call_function", F.dropout, ("h", 0.5, True, True)),
    "F.hardtanh, by position": ("call_function", F.hardtanh, ("h", -1.0, 1.0, True)),
    "+=": ("call_function", operator.iadd, ("h", "x")),
    "*=": ("call_function", operator.imul, ("h", 2)),
    "@=": ("call_function", operator.imatmul, ("h", "w")),
    "h[0] = 1": ("call_function", operator.setitem, ("h", 0, 1)),
    "out=h": ("call_function", torch.add, ("x", "y"), {"out": "h"}),
    "aten.add_": ("call_function", torch.ops.aten.add_.Tensor, ("h", "x")),
    "aten.mm.out": ("call_function", torch.ops.aten.mm.out, ("x", "y"), {"out": "h"}),
    "nn.ReLU in place": ("call_module", "act", ("h",)),
}
PURE = {
    "add": ("call_method", "add", ("h", 1)),
    "torch.relu": ("call_function", torch.relu, ("h",)),
    "F.relu": ("call_function", F.relu, ("h",), {"inplace": False}),
    "F.relu, False by position": ("call_function", F.relu, ("h", False)),
    "F.linear": ("call_function", F.linear, ("h", "w")),
    "matmul": ("call_function", operator.matmul, ("h", "w")),
    "F.gelu": ("call_function", F.gelu, ("h",)),
    "view": ("call_method", "view", ("h", -1)),
    "h[0]": ("call_function", operator.getitem, ("h", 0)),
    "torch.softmax": ("call_function", torch.softmax, ("h", -1)),
    "F.layer_norm": ("call_function", F.layer_norm, ("h", (6,))),
    "__add__": ("call_method", "__add__", ("h", 1)),
    "mean": ("call_method", "mean", ("h",)),
    "out=None": ("call_function", torch.add, ("h", "y"), {"out": None}),
    "nn.GELU": ("call_module", "act", ("h",)),
}
H = ("h", "call_function", operator.matmul, ("x", "w"))


@pytest.mark.parametrize(
    ("kind", "target", "args", "kwargs"),
    [pytest.param(*call, *([{}] if len(call) == 3 else []), id=name) for name, call in WRITES.items()],
)
def test_writes(kind, target, args, kwargs):
    dependence, nodes = graph_of(H, ("n", kind, target, args, kwargs), modules=[("act", nn.ReLU(inplace=True))])
    assert nodes["h"] in dependence.writes.get(nodes["n"], ()), "it writes h"
    assert dependence.writer_between({nodes["h"], nodes["n"]}, nodes["n"], [nodes["h"]]) is None, "not between them"


@pytest.mark.parametrize(
    ("kind", "target", "args", "kwargs"),
    [pytest.param(*call, *([{}] if len(call) == 3 else []), id=name) for name, call in PURE.items()],
)
def test_writes_nothing(kind, target, args, kwargs):
    dependence, nodes = graph_of(H, ("n", kind, target, args, kwargs), modules=[("act", nn.GELU())])
    assert nodes["n"] not in dependence.writes


SHARES = {
    "view": ("call_method", "view", ("h", -1)),
    "reshape": ("call_method", "reshape", ("h", -1)),
    "t": ("call_method", "t", ("h",)),
    "torch.transpose": ("call_function", torch.transpose, ("h", 0, 1)),
    "h[0]": ("call_function", operator.getitem, ("h", 0)),
    "h.T": ("call_function", getattr, ("h", "T")),
    "chunk": ("call_method", "chunk", ("h", 2)),
    "torch.split": ("call_function", torch.split, ("h", 2)),
    "unbind": ("call_method", "unbind", ("h",)),
    "narrow": ("call_method", "narrow", ("h", 0, 0, 1)),
    "expand": ("call_method", "expand", ("h", 4, 6)),
    "contiguous": ("call_method", "contiguous", ("h",)),
    "to": ("call_method", "to", ("h", torch.float32)),
    "float": ("call_method", "float", ("h",)),
    "type_as": ("call_method", "type_as", ("h", "x")),
    "detach": ("call_method", "detach", ("h",)),
    "squeeze": ("call_method", "squeeze", ("h",)),
    "F.dropout": ("call_function", F.dropout, ("h", 0.0)),
    "relu_": ("call_method", "relu_", ("h",)),
    "aten.view": ("call_function", torch.ops.aten.view.default, ("h", [-1])),
    "an unknown function": ("call_function", randn, ("h",)),
    "nn.Identity": ("call_module", "act", ("h",)),
}
OWN = {
    "add": ("call_method", "add", ("h", 1)),
    "clone": ("call_method", "clone", ("h",)),
    "torch.relu": ("call_function", torch.relu, ("h",)),
    "matmul": ("call_function", operator.matmul, ("h", "w")),
    "F.linear": ("call_function", F.linear, ("h", "w")),
    "torch.cat": ("call_function", torch.cat, (["h"],)),
}


@pytest.mark.parametrize(("kind", "target", "args"), SHARES.values(), ids=SHARES)
def test_shares_memory(kind, target, args):
    dependence, nodes = graph_of(H, ("n", kind, target, args), modules=[("act", nn.Identity())])
    assert nodes["h"] in dependence.memory[nodes["n"]]


@pytest.mark.parametrize(("kind", "target", "args"), OWN.values(), ids=OWN)
def test_memory_of_its_own(kind, target, args):
    dependence, nodes = graph_of(H, ("n", kind, target, args))
    assert dependence.memory[nodes["n"]] == {nodes["n"]}


@pytest.mark.parametrize("target", [randn, print], ids=["of the model", "built in"])
def test_unknown_functions_may_write_everything(target):
    dependence, nodes = graph_of(H, ("n", "call_function", target, ("h",)))
    writes = dependence.writes.get(nodes["n"], frozenset())
    assert (OUTSIDE in writes and nodes["h"] in writes) or target is print


def test_unknown_modules_may_write_everything():
    dependence, nodes = graph_of(H, ("n", "call_module", "act", ("h",)), modules=[("act", Written(lambda h: h))])
    assert {OUTSIDE, nodes["h"]} <= dependence.writes[nodes["n"]]


def test_a_hooked_module_may_write_everything():
    fc = nn.Linear(6, 6)
    fc.register_forward_hook(lambda module, args, out: out)
    dependence, nodes = graph_of(H, ("n", "call_module", "fc", ("h",)), modules=[("fc", fc)])
    assert {OUTSIDE, nodes["h"]} <= dependence.writes[nodes["n"]]


def test_batch_norm_writes_in_training_only():
    for training in (True, False):
        norm = nn.BatchNorm1d(6).train(training)
        dependence, nodes = graph_of(H, ("n", "call_module", "norm", ("h",)), modules=[("norm", norm)])
        assert (OUTSIDE in dependence.writes.get(nodes["n"], ())) == training


def test_arguments_and_parameters_may_be_one_memory():
    dependence, nodes = graph_of(H, ("n", "call_method", "zero_", ("y",)), ("s", "call_function", torch.add, ("h", 1)))
    between = dependence.writer_between({nodes["h"], nodes["s"]}, nodes["s"], [nodes["x"]])
    assert between is nodes["n"], "y may share memory with x"


def test_a_write_through_a_view_of_a_view():
    dependence, nodes = graph_of(
        H,
        ("v", "call_method", "view", ("h", -1)),
        ("u", "call_function", operator.getitem, ("v", slice(0, 2))),
        ("n", "call_method", "zero_", ("u",)),
        ("s", "call_function", torch.add, ("h", 1)),
    )
    assert dependence.writer_between({nodes["h"], nodes["s"]}, nodes["s"], [nodes["h"]]) is nodes["n"]
    assert dependence.written_later(nodes["h"])


def test_convexity():
    dependence, nodes = graph_of(
        H,
        ("a", "call_function", torch.relu, ("h",)),
        ("b", "call_function", torch.tanh, ("a",)),
        ("s", "call_function", torch.add, ("a", "b")),
    )
    assert dependence.convex({nodes["s"], nodes["a"]}) is nodes["b"]
    assert dependence.convex({nodes["s"], nodes["a"], nodes["b"]}) is None


def test_mutation_is_a_dependence():
    dependence, nodes = graph_of(
        H, ("n", "call_method", "zero_", ("x",)), ("s", "call_function", operator.matmul, ("x", "w"))
    )
    assert dependence.graph.has_edge(nodes["n"], nodes["s"])


@pytest.mark.parametrize(
    "function",
    [torch.atleast_1d, torch.atleast_2d, torch.atleast_3d, torch.broadcast_tensors, torch.meshgrid,
     torch.cartesian_prod, torch.conj_physical],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_composite_operator_may_return_its_input(function):
    dependence, nodes = graph_of(
        ("h", "call_function", torch.relu, ("x",)), ("view", "call_function", function, ("h",))
    )
    assert nodes["h"] in dependence.memory[nodes["view"]]


@pytest.mark.parametrize("function", [F.linear, torch.matmul, torch.add, torch.mul], ids=lambda f: f.__name__)
def test_a_product_is_memory_of_its_own(function):
    dependence, nodes = graph_of(("h", "call_function", function, ("x", "y")))
    assert dependence.memory[nodes["h"]] == {nodes["h"]}
