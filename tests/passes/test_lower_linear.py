"""lower_linear: what is still a plain linear gets the faster implementation of its device, and the same answers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from fxfuse.ops import onednn
from tests.conftest import Written, assert_right, ops_of, randn

SPELLINGS = {
    "nn.Linear": lambda x, fc: fc(x),
    "F.linear": lambda x, fc: F.linear(x, fc.weight, fc.bias),
    "F.linear without a bias": lambda x, fc: F.linear(x, fc.weight),
    "x @ w.T + b": lambda x, fc: x @ fc.weight.T + fc.bias,
    "addmm": lambda x, fc: torch.addmm(fc.bias, x, fc.weight.t()),
    "aten.linear": lambda x, fc: torch.ops.aten.linear.default(x, fc.weight, fc.bias),
    "read twice": lambda x, fc: fc(x) + fc(x).mean(),
    "returned and activated": lambda x, fc: (torch.relu(fc(x)), fc(x)),
}


@pytest.mark.skipif(not onednn.AVAILABLE, reason="this build of torch has no oneDNN linear")
@pytest.mark.parametrize("row", SPELLINGS.values(), ids=SPELLINGS)
def test_lowered(row, example):
    model = Written(row, fc=nn.Linear(128, 128))
    x = randn(3, 4, 128)
    optimized = fxfuse.optimize(model, (x,)) if example else fxfuse.optimize(model)
    (gm,) = fxfuse.graphs(optimized).values()
    assert F.linear not in {n.target for n in gm.graph.nodes}
    assert "linear" in ops_of(optimized)
    lowered = [e for e in fxfuse.report(optimized).events if e.kind == "lowered"]
    assert [(e.rule, e.reason) for e in lowered] == [("lower_linear", "is now linear")]
    assert not [e for e in fxfuse.report(optimized).kept if e.rule == "lower_linear"]
    assert_right(model, optimized, [x])


@pytest.mark.parametrize(
    ("size", "dtype", "bias"),
    [(6, torch.float32, True), (128, torch.bfloat16, False)],
    ids=["small weight", "eager's bare product is oneDNN's own"],
)
def test_not_where_eager_is_as_fast(size, dtype, bias, example):
    model = Written(SPELLINGS["nn.Linear"], fc=nn.Linear(size, size, bias=bias)).to(dtype)
    x = randn(3, 4, size, dtype=dtype)
    optimized = fxfuse.optimize(model, (x,)) if example else fxfuse.optimize(model)
    assert not fxfuse.report(optimized).events
    assert not fxfuse.graphs(optimized), "nothing was gained, so the module is as it was"


@pytest.mark.skipif(torch.bfloat16 not in onednn._LEAST_WORK, reason="oneDNN has no bfloat16 here")
def test_a_16_bit_bias_goes_into_the_epilogue(example):
    model = Written(SPELLINGS["nn.Linear"], fc=nn.Linear(128, 128)).bfloat16()
    x = randn(3, 4, 128, dtype=torch.bfloat16)
    optimized = fxfuse.optimize(model, (x,)) if example else fxfuse.optimize(model)
    assert [e.rule for e in fxfuse.report(optimized).events] == ["lower_linear"]
    assert_right(model, optimized, [x])


def test_not_for_exact_numerics(example):
    model = Written(SPELLINGS["nn.Linear"], fc=nn.Linear(128, 128))
    optimized = (
        fxfuse.optimize(model, (randn(3, 4, 128),), numerics="exact")
        if example
        else fxfuse.optimize(model, numerics="exact")
    )
    assert not fxfuse.report(optimized).events


def test_not_where_excluded():
    model = Written(SPELLINGS["nn.Linear"], fc=nn.Linear(128, 128))
    assert not fxfuse.report(fxfuse.optimize(model, exclude="lower_linear")).events


def test_a_fused_linear_is_none():
    model = Written(lambda x, fc: torch.relu(fc(x)), fc=nn.Linear(128, 128))
    assert not [e for e in fxfuse.report(fxfuse.optimize(model)).events if e.kind == "lowered"]


def test_a_weight_of_unknown_shape():
    optimized = fxfuse.optimize(lambda x, w: F.linear(x, w) * 2)
    assert not fxfuse.report(optimized).events
