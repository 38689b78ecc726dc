"""Predictions against traces on the CPU: operators and oneDNN's products; kernels, bytes and operations by hand."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxfuse
from benchmarks import gpu
from fxfuse import choose, ops
from fxfuse.bench import models, onednn_verbose, predict_fused, trace
from fxfuse.bench.predict import predict
from fxfuse.bench.work import FOLLOWS, Work
from fxfuse.capture.tree import ROOT
from fxfuse.facts import Fact
from fxfuse.ops import onednn

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]

needs_onednn = pytest.mark.skipif(not onednn.AVAILABLE, reason="needs oneDNN")


def total(works, what):
    return sum((getattr(work, what) for work in works), Counter())


def of(model, *args) -> list[Work]:
    """The prediction for a module as it is written."""
    gm = fx.symbolic_trace(model)
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    return predict(gm, dict(zip(names, map(Fact.of, args), strict=True)))


GOLDEN = {
    "matmul then add": (
        lambda: gpu.MatmulThenAdd(32, 64),
        {"gemm": 1, "elementwise": 1},
        {"matmul": 1, "mm": 1, "add": 1},
    ),
    "nn.Linear": (lambda: nn.Linear(32, 64), {"gemm": 1}, {"linear": 1, "t": 1, "addmm": 1}),
    "GeGLU": (
        lambda: models.GegluMLP(32, 64),
        {"gemm": 3, "elementwise": 2},
        {"linear": 3, "t": 3, "addmm": 3, "gelu": 1, "mul": 1},
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_what_eager_launches(name):
    build, kernels, operators = GOLDEN[name]
    model, x = build().eval(), torch.randn(1024, 32)
    works = of(model, x)
    assert total(works, "kernels") == kernels
    assert total(works, "host") == {f"aten::{op}": count for op, count in operators.items()}
    with torch.inference_mode():
        call = trace.trace(lambda: model(x), CPU, keep=None)[-1]
    assert call.host_ops(None) == total(works, "host")


class Act(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.linear, self.act = nn.Linear(512, 512), act

    def forward(self, x):
        return self.act(self.linear(x))


class Packed(nn.Module):
    def __init__(self, strided, bias):
        super().__init__()
        self.linear, self.strided = nn.Linear(512, 1024, bias=bias), strided

    def forward(self, x):
        h = self.linear(x)
        gate, up = (h[..., ::2], h[..., 1::2]) if self.strided else h.chunk(2, dim=-1)
        return F.silu(gate) * up


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(64, 512), nn.LayerNorm(512)
        self.qkv, self.out = nn.Linear(512, 1536), nn.Linear(512, 512)

    def forward(self, tokens):
        h = self.norm(self.embed(tokens))
        q, k, v = (t.view(*t.shape[:-1], 8, 64).transpose(1, 2) for t in self.qkv(h).split(512, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(h.shape)
        return (h + self.out(y)).mean(-1).softmax(-1)


def rows(*shape):
    return lambda: torch.randn(*shape)


TRACED = {
    **{
        f"linear, {act.__name__}": (lambda act=act: Act(act), rows(64, 512))
        for act in (F.relu, F.silu, F.hardswish, F.mish)
    },
    "linear, gelu": (lambda: Act(F.gelu), rows(64, 512)),
    "linear, gelu tanh": (lambda: Act(nn.GELU("tanh")), rows(2, 32, 512)),
    "linear, squared relu": (lambda: Act(lambda h: F.relu(h) ** 2), rows(64, 512)),
    "linear, quick gelu": (lambda: Act(lambda h: h * torch.sigmoid(1.702 * h)), rows(64, 512)),
    "one row": (lambda: Act(F.gelu), rows(1, 512)),
    "matmul then add": (lambda: gpu.MatmulThenAdd(512, 512), rows(64, 512)),
    "matmul then add of sequences": (lambda: gpu.MatmulThenAdd(512, 512), rows(2, 32, 512)),
    "too small for oneDNN": (lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), rows(4, 32)),
    "GeGLU": (lambda: models.GegluMLP(512, 1024), rows(64, 512)),
    "SwiGLU of sequences": (lambda: models.SwigluMLP(512, 1024), rows(2, 32, 512)),
    "packed": (lambda: Packed(strided=False, bias=True), rows(64, 512)),
    "packed, no bias": (lambda: Packed(strided=False, bias=False), rows(64, 512)),
    "packed, strided": (lambda: Packed(strided=True, bias=True), rows(64, 512)),
    "Conv1D": (lambda: models.Conv1dMLP(512, 1024), rows(64, 512)),
    "attention": (Attention, lambda: torch.randint(64, (2, 32))),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("original", [True, False], ids=["eager", "fxfuse"])
@pytest.mark.parametrize("name", TRACED)
def test_a_trace_has_what_was_predicted(name, original, dtype):
    build, example = TRACED[name]
    torch.manual_seed(0)
    model, x = build().eval().to(dtype), example()
    x = x.to(dtype) if x.is_floating_point() else x
    optimized = fxfuse.optimize(model, x, tune="off")
    regions = vars(optimized)[ROOT].regions
    run = model if original else optimized
    with torch.inference_mode():
        with trace.marked({r.path: run.get_submodule(r.path) for r in regions}):
            call = trace.trace(lambda: run(x), CPU, keep=None)[-1]
        primitives = onednn_verbose.primitives(lambda: run(x))
    for region in regions:
        works = predict(region.graph_module(original), region.arguments.facts)
        assert not [work.unknown for work in works if work.unknown]
        assert total(works, "host") == call.host_ops(region.path)
        products = [work.products for work in works]
        if region.path == "" and None not in products:
            assert sum(p.primitive in onednn_verbose.PRODUCTS for p in primitives) == sum(products)


@needs_onednn
@pytest.mark.parametrize("taken", [choose.PLAIN, choose.ONEDNN])
def test_a_measured_choice_is_predicted(taken):
    model, x = Act(F.gelu).eval(), torch.randn(64, 512)
    key = ops.key(ops.linear_act, (x, model.linear.weight, model.linear.bias), ("gelu", ()))
    choose.CHOICES.put({key: choose.Choice((taken, choose.PLAIN), {taken: 1e-3, choose.PLAIN: 1e-3})})
    (region,) = vars(fxfuse.optimize(model, x, tune="off"))[ROOT].regions
    works = predict(region.graph_module(), region.arguments.facts)
    plain = {"aten::linear": 1, "aten::t": 1, "aten::addmm": 1, "aten::gelu": 1}
    assert total(works, "host") == (plain if taken == choose.PLAIN else {"mkldnn::_linear_pointwise": 1})


class Row(nn.Module):
    def __init__(self, row, **tensors):
        super().__init__()
        self.row, self.names = row, tuple(tensors)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, x):
        return self.row(x, *(getattr(self, name) for name in self.names))


X, W, B, IDS = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6), torch.tensor([3, 1, 2])
COSTS = {
    # kind, operations, bytes of each pass
    "linear": (Row(F.linear, w=W, b=B), X, [("gemm", 2 * 4 * 8 * 6, 4 * (32 + 48 + 6 + 24))]),
    "in 16 bits": (Row(F.linear, w=W.half(), b=B.half()), X.half(), [("gemm", 384, 2 * (32 + 48 + 6 + 24))]),
    "a bias that cuBLAS does not add": (
        Row(lambda x, w, b: torch.addmm(b, x, w.t()), w=W, b=torch.randn(4, 6)),
        X,
        [("gemm", 384, 4 * (24 + 32 + 48 + 24)), ("copy", 0, 4 * (24 + 24))],
    ),
    "sum of two": (Row(torch.add, y=X.clone()), X, [("elementwise", 0, 4 * 96)]),
    "a broadcast row is read once": (
        Row(lambda x, r: x + r.expand(4, 8), r=torch.randn(1, 8)),
        X,
        [("elementwise", 0, 4 * 72)],
    ),
    "one tensor twice": (Row(lambda x: x * x), X, [("elementwise", 0, 4 * 64)]),
    "in place": (Row(torch.relu_), X, [("elementwise", 0, 4 * 64)]),
    "views": (Row(lambda x: x.t().reshape(-1)[None].unsqueeze(0).chunk(2)[0].view(-1)), X, [("copy", 0, 4 * 64)]),
    "a table is not read whole": (
        Row(F.embedding, table=torch.randn(100, 8)),
        IDS,
        [("gather", 0, 2 * 3 * 8 * 4 + 3 * 8)],
    ),
    "normalisation": (Row(lambda x: F.layer_norm(x, (8,))), X, [("reduce", 0, 4 * (32 + 32 + 4 + 4))]),
}


@pytest.mark.parametrize("name", COSTS)
def test_bytes_and_operations(name):
    model, x, expected = COSTS[name]
    passes = [done for work in of(model, x) for done in work.passes]
    assert [(done.kind, done.flops, done.moved) for done in passes] == expected


@needs_onednn
def test_bytes_and_operations_of_a_gated_linear():
    model, x = models.GegluMLP(512, 1024).eval(), torch.randn(64, 512)
    (region,) = vars(fxfuse.optimize(model, x, tune="off"))[ROOT].regions
    gated, down = predict(region.graph_module(), region.arguments.facts)
    operand, weight, bias, out = 64 * 512, 512 * 1024, 1024, 64 * 1024
    each, flops = operand + weight + bias + out, 2 * 64 * 512 * 1024
    assert [(p.kind, p.flops, p.moved) for p in gated.passes] == [
        ("fused gemm", flops, 4 * each),
        ("fused gemm", flops, 4 * (each + out)),
    ]
    assert [p.moved for p in down.passes] == [4 * (out + weight + 512 + operand)]


ONE_KERNEL = {
    # the model; host operators beside the kernel's output; bytes in elements of float32
    "linear, gelu": (lambda: Act(F.gelu), {}, 64 * 512 + 512 * 512 + 512 + 64 * 512),
    "gate and up": (lambda: models.GegluMLP(512, 1024), {}, 64 * 512 + 2 * (512 * 1024 + 1024) + 64 * 1024),
    "packed": (lambda: Packed(strided=False, bias=True), {"aten::is_set_to": 2}, 64 * 512 + 1024 * 513 + 64 * 512),
}


@needs_onednn
@pytest.mark.parametrize("name", ONE_KERNEL)
def test_a_kernel_of_ours_is_one_launch_and_its_output(name, monkeypatch):
    build, beside, elements = ONE_KERNEL[name]
    model, x = build().eval(), torch.randn(64, 512)
    (region,) = vars(fxfuse.optimize(model, x, tune="off"))[ROOT].regions
    monkeypatch.setattr(predict_fused, "implementation", lambda target, tensors, rest: "hopper192")
    first = predict(region.graph_module(), region.arguments.facts)[0]
    assert first.op.endswith(" (hopper192)")
    assert first.host == {"aten::empty": 1, **beside}
    ((kind, moved),) = [(done.kind, done.moved) for done in first.passes]
    assert (kind, moved) == ("fused gemm", 4 * elements)


class Somebodys(nn.Module):
    def forward(self, x):
        return x + 1


UNKNOWN = {
    "a scan": (
        Row(lambda x: x.cumsum(-1)),
        X,
        "unknown_kernels",
        "aten::cumsum: how many kernels it takes is not known",
    ),
    "rows of seven": (
        Row(lambda x: F.layer_norm(x, (7,))),
        torch.randn(4, 7),
        "unknown_kernels",
        "aten::native_layer_norm: rows that are no multiple of 4 take one kernel or two",
    ),
    "what hangs on values": (
        Row(lambda x: x[x > 0]),
        X,
        "unknown",
        "getitem hangs on values",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_predicted_is_named(name):
    model, x, what, reason = UNKNOWN[name]
    works = of(model, x)
    assert [getattr(work, what) for work in works if getattr(work, what)] == [reason]
    assert not any(work.host for work in works if work.unknown), "half of a node's operators is no prediction"


def test_a_module_that_is_called_is_not_predicted_nor_what_takes_its_result():
    class Leaf(fx.Tracer):
        def is_leaf_module(self, m, name):
            return isinstance(m, Somebodys) or super().is_leaf_module(m, name)

    model = nn.Sequential(Somebodys(), nn.ReLU())
    gm = fx.GraphModule(model, Leaf().trace(model))
    works = predict(gm, {"input": Fact.of(X)})
    assert [(work.op, work.unknown) for work in works] == [
        ("Somebodys", "what Somebodys does in its forward is not known"),
        ("ReLU", FOLLOWS),
    ]
    assert all(not work.passes and not work.host for work in works)
