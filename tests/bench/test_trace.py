import json
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxfuse.bench import trace
from fxfuse.bench.trace import _read

CPU = torch.device("cpu")


def event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def launch(ts, correlation, name="cudaLaunchKernel", cat="cuda_runtime"):
    return event(cat, name, ts, 1, correlation=correlation)


def on_gpu(name, ts, dur, correlation, cat="kernel"):
    return event(cat, name, ts, dur, tid=7, correlation=correlation)


CALL = event("user_annotation", "fxfuse: call", 100, 100)
PART = event("user_annotation", "fxfuse: part h.0", 110, 50)
GPU = [
    CALL,
    PART,
    event("gpu_user_annotation", "fxfuse: part h.0", 300, 50, tid=7),
    launch(112, 1),
    on_gpu("nvjet_tst_128x64_64x4_1x2_h_bz_TNT", 300, 10, 1),
    event("cuda_runtime", "cudaOccupancyMaxActiveBlocksPerMultiprocessor", 114, 1, correlation=2),
    event("cuda_runtime", "cudaMemsetAsync", 115, 1, correlation=3),
    on_gpu("Memset (Device)", 311, 1, 3, cat="gpu_memset"),
    launch(116, 4, "cuLaunchKernel", "cuda_driver"),
    on_gpu("fxfuse_gated_linear_gelu_bf16_128x192x64", 315, 20, 4),
    launch(170, 5, "cudaLaunchKernelExC"),
    on_gpu("triton_poi_fused_0", 335, 5, 5),
    event("cuda_runtime", "cudaMemcpyAsync", 171, 1, correlation=6),
    on_gpu("Memcpy DtoD (Device -> Device)", 345, 5, 6, cat="gpu_memcpy"),
    # of no call that is looked at
    launch(50, 8),
    on_gpu("before", 150, 5, 8),
    launch(250, 9),
    on_gpu("after", 400, 5, 9),
]


def test_kernels_belong_to_the_part_that_launched_them():
    (call,) = _read(GPU)
    assert [(k.name, k.start_us, k.us, k.part, k.says.kind) for k in call.kernels] == [
        ("nvjet_tst_128x64_64x4_1x2_h_bz_TNT", 0, 10, "h.0", "gemm"),
        ("fxfuse_gated_linear_gelu_bf16_128x192x64", 15, 20, "h.0", "fused gemm"),
        ("triton_poi_fused_0", 35, 5, None, "elementwise"),
        ("Memcpy DtoD (Device -> Device)", 45, 5, None, "copy"),
    ]
    assert call.gpu_us("h.0") == 30
    assert call.gpu_us(None) == 10


def test_launches_queries_fills_and_gaps():
    (call,) = _read(GPU)
    assert call.launches == {"cudaLaunchKernel": 1, "cuLaunchKernel": 1, "cudaLaunchKernelExC": 1}
    assert (call.occupancy_queries, call.memsets) == (1, 1)
    assert call.gaps_us == [5, 0, 5]


def test_the_innermost_part_counts():
    inner = event("user_annotation", "fxfuse: part h.0.mlp", 111, 10)
    (call,) = _read(
        [*GPU, inner, event("cpu_op", "aten::mul.Tensor", 112, 2), event("cpu_op", "aten::add.Tensor", 130, 2)]
    )
    assert [kernel.part for kernel in call.kernels] == ["h.0.mlp", "h.0.mlp", None, None]
    assert [(op.name, op.part) for op in call.operators] == [("aten::mul", "h.0.mlp"), ("aten::add", "h.0")]
    assert call.part_us == {"h.0": 50, "h.0.mlp": 10}


def test_other_threads_and_other_annotations_do_not_count():
    others = [event("cpu_op", "aten::mul.Tensor", 112, 2, tid=2), event("user_annotation", "ProfilerStep#3", 90, 200)]
    (call,) = _read([*GPU, *others])
    assert not call.operators


OPERATORS = [
    (lambda x, w, b: F.linear(x, w, b), {"aten::linear": 1, "aten::t": 1, "aten::addmm": 1}),
    (lambda x, w, b: F.linear(x, w), {"aten::linear": 1, "aten::t": 1, "aten::mm": 1}),
    (
        lambda x, w, b: torch.add(torch.matmul(x, w.t()), b),
        {"aten::t": 1, "aten::matmul": 1, "aten::mm": 1, "aten::add": 1},
    ),
    (lambda x, w, b: 2 * x, {"aten::mul": 1}),
    (lambda x, w, b: x.chunk(2), {"aten::chunk": 1, "aten::split": 1}),
    (lambda x, w, b: x.to(torch.float64), {"aten::to": 1, "aten::_to_copy": 1}),
]


@pytest.mark.parametrize(("row", "expected"), OPERATORS)
def test_operators_called_and_those_that_they_end_in(row, expected):
    x, w, b = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6)
    with torch.inference_mode():
        calls = trace.trace(lambda: row(x, w, b), CPU, keep=None)
    assert len(calls) == trace.ACTIVE
    assert all(call.host_ops(None) == Counter(expected) for call in calls)


def test_marks_are_taken_off(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    own = model[1].__dict__["forward"] = lambda x: x + 1
    x = torch.randn(2, 4)
    with torch.inference_mode(), trace.marked({"": model, "0": model[0], "1": model[1]}):
        (call,) = trace.trace(lambda: model(x), CPU, warm_up=0, active=1, keep=tmp_path / "kept.json")
    assert call.host_ops("0") == {"aten::linear": 1, "aten::t": 1, "aten::addmm": 1}
    assert call.host_ops("1") == {"aten::add": 1}
    assert call.part_us[""] >= call.part_us["0"] + call.part_us["1"]
    assert "forward" not in model.__dict__
    assert "forward" not in model[0].__dict__
    assert model[1].__dict__["forward"] is own
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert any(e.get("name") == "aten::addmm" for e in kept["traceEvents"])
    assert "host_name" not in kept


def test_marks_are_taken_off_after_an_error():
    model = nn.Linear(4, 4)
    with pytest.raises(RuntimeError), trace.marked({"": model}):
        model(torch.randn(2, 5))
    assert "forward" not in model.__dict__
