"""fxfuse.rewrite: a graph has nobody round it who would check what a rule counted on, so rules count on nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxfuse
from tests.conftest import Written, randn

W, B = randn(1, 8, 8), randn(2, 8)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (
            lambda x, fc: F.silu(fc(x).chunk(2, 1)[0]) * fc(x).chunk(2, 1)[1],
            "dimension 1 is the last one only of 2 dimensions (its rank is not known)",
        ),
        (lambda x, fc: F.glu(fc(x), 1), "dimension 1 is the last one only of 2 dimensions (its rank is not known)"),
        (
            lambda x, fc: torch.add(fc.bias, x @ fc.weight.t(), alpha=2),
            "alpha scales the product, which only addmm on two dimensions does (its rank is not known)",
        ),
        (
            lambda x, fc: torch.addmm(fc.bias, x, fc.weight.t()),
            "torch.addmm takes two dimensions only (its rank is not known)",
        ),
    ],
    ids=["chunk", "glu", "alpha", "addmm"],
)
@pytest.mark.parametrize("example", [None, (randn(0, 4, 8),)], ids=["bare", "example"])
def test_no_rank_is_assumed(row, why, example):
    gm = fx.symbolic_trace(Written(row, fc=nn.Linear(8, 8)))
    new, report = fxfuse.rewrite(gm, example)
    assert [e.reason for e in report.kept] == [why]
    for shape in ((4, 8), (3, 4, 8)):
        x = randn(3, *shape)
        try:
            expected = gm(x)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                new(x)
        else:
            torch.testing.assert_close(new(x), expected, rtol=0, atol=0)


def test_no_shape_of_an_argument_is_assumed():
    gm = fx.symbolic_trace(lambda x, w, b: torch.relu(x @ w + b))
    new, report = fxfuse.rewrite(gm, (randn(0, 4, 8), W, B))
    assert [e.reason for e in report.kept] == ["weight is an argument, whose shape a graph by itself does not check"]
    x, stacked = randn(3, 3, 4, 8), randn(4, 3, 8, 8)
    torch.testing.assert_close(new(x, stacked, B), gm(x, stacked, B), rtol=0, atol=0)


def test_dropout_still_follows_its_flag():
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5))).eval()
    new, report = fxfuse.rewrite(gm)
    assert [e.rule for e in report.fused] == ["linear_act"]
    assert (new(randn(0, 64, 8).abs() + 1) == gm(randn(0, 64, 8).abs() + 1)).float().mean() > 0.9
    new.train()
    gm.train()
    x = randn(0, 64, 8)
    torch.manual_seed(0)
    ours = new(x)
    torch.manual_seed(0)
    torch.testing.assert_close(ours, gm(x))
